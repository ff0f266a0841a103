"""The vocabulary of decisions: what a request asks and what an instance can do, as frozen data.

Everything in `policy` reads and returns these. Units come last in a name; `_tokens` and `_blocks` are
counts, token ids are called `token_ids`.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import NewType

from kvindex.core import InstanceId, Tier

RequestId = NewType("RequestId", str)
"""Made by the gateway; a client's own id never becomes one."""


PRIORITY_MIN, PRIORITY_MAX = -100, 100
"""Of a request; 0 where none is named."""


class Role(StrEnum):
    """What an instance can do; a coupled worker has the last two."""

    GATEWAY = "gateway"
    CONDUCTOR = "conductor"
    KVMETA = "kvmeta"
    PREFILL = "prefill"
    DECODE = "decode"


class InstanceState(StrEnum):
    SERVING = "serving"
    DRAINING = "draining"


class FinishReason(StrEnum):
    """Why an answer ended, in the words of the OpenAI API."""

    STOP = "stop"
    LENGTH = "length"


class StructureKind(StrEnum):
    """What an answer may be held to."""

    JSON_OBJECT = "json_object"
    JSON_SCHEMA = "json_schema"
    REGEX = "regex"
    CHOICE = "choice"
    GRAMMAR = "grammar"


STRUCTURE_BYTES_MAX = 64 * 1024
"""Of a StructureSpec's text in UTF-8."""
STRUCTURE_FIELD = "sampling.structure"
"""How a refusal names it, first of all."""


@dataclass(frozen=True, slots=True)
class StructureSpec:
    """What form the whole answer must have.

    `text` by kind: nothing for any JSON object; a JSON schema; a regular expression that the whole answer
    matches; a JSON list of strings, one of which is the answer; a context-free grammar in Lark's or
    llama.cpp's (GBNF) notation.
    """

    kind: StructureKind
    text: str = ""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How a request's next token is chosen; with the tokens so far, all the state a sampler has.

    `temperature` 0 is greedy. `top_k` 0 means no limit; `min_p` keeps tokens at least that probable,
    seen from the most probable. `seed` is always set (the gateway draws one where the client gave
    none), so that a replay draws the same numbers. `repetition_penalty` looks at prompt and output,
    the presence and frequency penalties at the output alone. `logit_bias` holds (token id, what is
    added to its logit). Generation ends after `output_tokens_max` tokens or at one of
    `stop_token_ids`, unless fewer than `output_tokens_min` came before it. Ranges are
    `policy.sampling_limits`'.
    """

    output_tokens_max: int
    stop_token_ids: tuple[int, ...] = ()
    output_tokens_min: int = 0
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    logprobs: int | None = None
    """None: none wanted; 0: of the chosen token; n: also those of the n most probable tokens."""
    samples: int = 1
    """Answers to one prompt, each with random numbers of its own."""
    structure: StructureSpec | None = None
    """The form the answer is held to: an answer that ends by itself always has it."""

    @property
    def needs_history(self) -> bool:
        """The sampler must see the tokens so far."""
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Natural logarithms of probabilities in the model's own distribution: before bias, penalties, masks
    and temperature."""

    token_logprob: float
    """Of the token that was chosen."""
    top: tuple[tuple[int, float], ...] = ()
    """(token id, logprob) of the most probable tokens, best first; of equals the lower id first."""


COEFFICIENT_S_MAX = 1e6
"""Of one coefficient of the cost model: days for a single token."""
BANDWIDTH_MIN, BANDWIDTH_MAX = 1e-3, 1e18
"""Of the cost model, in bytes a second."""
_BANDWIDTHS = dict.fromkeys(("transfer_bytes_per_s", "ssd_bytes_per_s"), (BANDWIDTH_MIN, BANDWIDTH_MAX))


@dataclass(frozen=True, slots=True)
class CostCoefficients:
    """The cost model of one instance, in seconds.

    T_prefill(new, prefix) = a + b·new + c·new·(prefix + new/2)
    T_step(batch, kv_tokens) = d + e·batch + f·kv_tokens
    T_transfer(bytes) = g + bytes / bandwidth
    T_first_token = queue + fetch + T_prefill + h

    Seconds are 0 to COEFFICIENT_S_MAX and bandwidths BANDWIDTH_MIN to BANDWIDTH_MAX, else ValueError: a
    message with others is malformed. So no prediction from counts that a message can hold becomes infinite.
    """

    prefill_fixed_s: float
    prefill_per_token_s: float
    prefill_per_token_pair_s: float
    step_fixed_s: float
    step_per_request_s: float
    step_per_kv_token_s: float
    transfer_fixed_s: float
    transfer_bytes_per_s: float
    ssd_fixed_s: float = 1e-3
    ssd_bytes_per_s: float = 1e9
    """Reading blocks back from the instance's SSD."""
    first_token_fixed_s: float = 0.0
    """What a first token takes beside queue, fetch and computing: placing, messages, reserving."""

    def __post_init__(self) -> None:
        # One by one: this runs for each load snapshot that is received.
        if not (
            0 <= self.prefill_fixed_s <= COEFFICIENT_S_MAX
            and 0 <= self.prefill_per_token_s <= COEFFICIENT_S_MAX
            and 0 <= self.prefill_per_token_pair_s <= COEFFICIENT_S_MAX
            and 0 <= self.step_fixed_s <= COEFFICIENT_S_MAX
            and 0 <= self.step_per_request_s <= COEFFICIENT_S_MAX
            and 0 <= self.step_per_kv_token_s <= COEFFICIENT_S_MAX
            and 0 <= self.transfer_fixed_s <= COEFFICIENT_S_MAX
            and BANDWIDTH_MIN <= self.transfer_bytes_per_s <= BANDWIDTH_MAX
            and 0 <= self.ssd_fixed_s <= COEFFICIENT_S_MAX
            and BANDWIDTH_MIN <= self.ssd_bytes_per_s <= BANDWIDTH_MAX
            and 0 <= self.first_token_fixed_s <= COEFFICIENT_S_MAX
        ):
            raise ValueError(_wrong_coefficient(asdict(self)))


def _wrong_coefficient(values: Mapping[str, float]) -> str:
    """Which one is out of bounds, and its bounds."""
    for name, value in values.items():
        low, high = _BANDWIDTHS.get(name, (0, COEFFICIENT_S_MAX))
        if not low <= value <= high:
            return f"{name}: {value}, must be {low:g} to {high:g}"
    raise AssertionError("none is out of bounds")


@dataclass(frozen=True, slots=True)
class ScheduleRequest:
    """gateway → `schedule`: where should this request run? Answered by Placement or Rejection."""

    request_id: RequestId
    attempt: int
    model: str
    fingerprint: str
    prompt_tokens: int
    """Tokens to prefill: the prompt and, after a loss, the output so far."""
    output_tokens_max: int
    block_hashes: bytes
    """Hashes of the full blocks of prompt + output so far, first to last."""
    deadline_s: float
    tenant: str = ""
    priority: int = 0
    """Under pressure lower ones are refused before higher ones."""
    ttft_ms_max: float | None = None
    tbt_ms_max: float | None = None
    excluded: tuple[InstanceId, ...] = ()
    """Instances that refused or were lost in earlier attempts: taken only where no other serves."""
    resumed: bool = False
    """It already streamed tokens, or was let in with another answer to its prompt: no early rejection."""
    samples: int = 1
    """Answers to the one prompt: so many sequences at decode."""


@dataclass(frozen=True, slots=True)
class Placement:
    request_id: RequestId
    attempt: int
    prefill: InstanceId
    decode: InstanceId
    source: InstanceId | None = None
    """Whose cached prefix prefill brings in; None means nothing is cached."""
    prefix_blocks: int = 0
    predicted_ttft_ms: float = 0.0
    predicted_tbt_ms: float = 0.0
    output_tokens_expected: int | None = None
    """How long its answer will be, from what requests like it showed; None: not predicted."""
    tbt_ms_max: float | None = None
    """The target that decode holds it to once more when it reserves: the request's own or the cluster's.
    None: nothing."""
    ttft_ms_max: float | None = None
    """The target that its first token is held to, from when the placement was asked for."""


class RejectReason(StrEnum):
    NO_INSTANCE = "no_instance"
    OVERLOADED = "overloaded"
    TTFT = "ttft"
    TBT = "tbt"


@dataclass(frozen=True, slots=True)
class Rejection:
    request_id: RequestId
    attempt: int
    reason: RejectReason
    detail: str
    retry_after_s: float


@dataclass(frozen=True, slots=True)
class QueuedRequest:
    """A request that prefill has accepted and not yet handed over."""

    request_id: RequestId
    attempt: int
    decode: InstanceId
    new_tokens: int
    """Tokens that are still to be computed."""
    prefix_tokens: int
    """Tokens before those, cached or computed already: both together are what decode will hold."""
    output_tokens_max: int
    samples: int = 1
    priority: int = 0
    output_tokens_expected: int | None = None
    """As its placement says."""


@dataclass(frozen=True, slots=True)
class RunningRequest:
    """A request that decode holds blocks for; `committed` once its first token is there."""

    request_id: RequestId
    attempt: int
    kv_tokens: int
    output_tokens: int
    output_tokens_max: int
    committed: bool
    samples: int = 1
    """Its answers that still grow: so many sequences in a step."""
    priority: int = 0
    output_tokens_expected: int | None = None
    """As its placement says."""


@dataclass(frozen=True, slots=True)
class EndedRequest:
    """A request that a snapshot may have listed before, or that came and went between two of them."""

    request_id: RequestId
    attempt: int
    output_tokens: int | None = None
    """Length of its answer, the longest of its samples; None where it did not come to its end."""
    tenant: str = ""
    family: bytes = b""
    """Hash of the prompt's first block: requests of one kind begin alike. Empty where there is none."""


ENDED_LISTED_MAX = 64
"""EndedRequests in one LoadSnapshot: the latest."""


@dataclass(frozen=True, slots=True)
class TierUse:
    """How full a tier is that lies below the blocks which an instance computes on."""

    tier: Tier
    blocks: int
    blocks_used: int


@dataclass(frozen=True, slots=True)
class LoadSnapshot:
    """instance → `load.<instance>`: the whole of its load, idempotent; also the reply to Describe."""

    instance: InstanceId
    roles: tuple[Role, ...]
    state: InstanceState
    queued: tuple[QueuedRequest, ...] = ()
    running: tuple[RunningRequest, ...] = ()
    requests: int = 0
    """Requests this instance is busy with, whatever its role."""
    blocks: int = 0
    blocks_free: int = 0
    """Blocks that hold nothing."""
    blocks_cached: int = 0
    """Blocks that hold reusable KV nobody is using: free on demand."""
    blocks_in_use: int = 0
    """Blocks pinned by queued, reserved and running requests."""
    blocks_indexed: int = 0
    """kvmeta only: blocks in the directory, over all instances."""
    prefill_tokens_total: int = 0
    """Prompt tokens computed since start; with `cached_tokens_total`, the hit rate."""
    cached_tokens_total: int = 0
    decode_tokens_total: int = 0
    cost: CostCoefficients | None = None
    lower_tiers: tuple[TierUse, ...] = ()
    """Fastest first. `blocks` and the like count what lies above them."""
    ended: tuple[EndedRequest, ...] = ()
    """The last to end here, oldest first, at most ENDED_LISTED_MAX."""
    ended_total: int = 0
    """Since start, those in `ended` included: who counts them counts none twice."""
    answered_total: int = 0
    """gateway only: requests that ended, those that were rejected or failed included, since start."""
    in_targets_total: int = 0
    """Those of them that met both of their targets."""
    rejected_total: int = 0
    """Those of them that were turned away before they began."""
    step_s_total: float = 0.0
    """What the engine's steps took, since start."""
    step_predicted_s_total: float = 0.0
    """What these were announced to take, each by the `cost` before it."""
