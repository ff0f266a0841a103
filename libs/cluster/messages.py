"""Every message on the bus and every record in the control plane, as frozen data (DESIGN §5).

Owns the shapes, not the wire (see `cluster.wire`) nor the subjects (see `cluster.subjects`). Fields of
type `bytes` are packed arrays, base64 in JSON: 16 bytes a block hash, a little-endian int32 a token id
or block id. Deadlines travel as seconds left. Names of token counts end in `_tokens`, of token ids in
`_token_ids`. Fields are only ever added; an unknown field is ignored by whoever receives it. What
decisions read and return (ScheduleRequest, Placement, Rejection, LoadSnapshot) is defined in
`policy.core`, matches and block events in `kvindex.core`: they are messages too, see MESSAGE_KINDS.
"""

from dataclasses import dataclass
from enum import StrEnum

from kvindex.core import BlockEvent, InstanceId, InstanceMatch, Tier
from policy.core import (
    FinishReason,
    LoadSnapshot,
    Placement,
    Rejection,
    RequestId,
    Role,
    SamplingParams,
    ScheduleRequest,
    TokenLogprobs,
)
from policy.evict import SloClass

TOKEN_ID_BYTES = 4
"""Of a token id in a packed array."""

# --- the control plane's records ----------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """The model an instance serves; instances with another fingerprint never exchange a block.

    Its sizes are at least 1, else ValueError: a record with others is malformed.
    """

    name: str
    fingerprint: str
    context_tokens_max: int
    block_tokens: int
    block_bytes: int
    layers: int
    dtype: str

    def __post_init__(self) -> None:
        for name, value in (
            ("context_tokens_max", self.context_tokens_max),
            ("block_tokens", self.block_tokens),
            ("block_bytes", self.block_bytes),
            ("layers", self.layers),
        ):
            if value < 1:
                raise ValueError(f"{name}: {value}, must be at least 1")


@dataclass(frozen=True, slots=True)
class InstanceRecord:
    """What an instance registers under `/moonpool/v1/instances/<id>` once it is ready."""

    instance: InstanceId
    incarnation: int
    roles: tuple[Role, ...]
    host: str
    http_url: str
    model: ModelInfo | None = None
    blocks: int = 0
    transfer: str | None = None
    """Descriptor of the instance's kvtransfer endpoint, opaque to everyone but kvtransfer."""


# --- placement ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Decision:
    """conductor → `decision`: every placement and rejection with its inputs, for peers and replay."""

    request_id: RequestId
    attempt: int
    prompt_tokens: int
    output_tokens_max: int
    last_block_hash: bytes
    matches: tuple[InstanceMatch, ...]
    placement: Placement | None = None
    rejection: Rejection | None = None
    samples: int = 1
    priority: int = 0


MATCH_BLOCKS_MAX = 16_384
"""Hashes in one ScheduleRequest or MatchRequest; what a prompt has beyond them is not looked up."""


@dataclass(frozen=True, slots=True)
class MatchRequest:
    """conductor → `kvmeta.match`: how long a prefix does each instance hold?"""

    block_hashes: bytes


@dataclass(frozen=True, slots=True)
class MatchReply:
    """Instances that hold no block of the prompt are left out."""

    matches: tuple[InstanceMatch, ...]


# --- block events and inventory -----------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class BlockEvents:
    """instance → `kv.<instance>`. Event i of `events` has the number `first_number + i`; numbers have
    no gaps within an incarnation and start at 1."""

    first_number: int
    events: tuple[BlockEvent, ...]


@dataclass(frozen=True, slots=True)
class InventoryRequest:
    """kvmeta → `kv_inventory.<instance>`: all blocks held, or a window of them. Answered by InventoryChunk,
    each of which says how many there are in all.

    A first window has `first_chunk` 0; the next ones go on in the inventory `as_of_number`, which the
    instance keeps for a while. `chunks_max` 0: all that are left.
    """

    first_chunk: int = 0
    chunks_max: int = 0
    as_of_number: int = 0


@dataclass(frozen=True, slots=True)
class InventoryChunk:
    """Blocks `parents first`; block i has parent `parents[16i:16i+16]`, all zero for a first block.

    State as of event `as_of_number`, the same in all chunks of one answer.
    """

    as_of_number: int
    chunk: int
    chunks: int
    tier: Tier
    block_hashes: bytes
    parents: bytes


# --- to an instance: one request each on `instance.<instance>` ------------------------------------


class RefusalReason(StrEnum):
    QUEUE_FULL = "queue_full"
    DRAINING = "draining"
    NO_BLOCKS = "no_blocks"
    TBT = "tbt"
    BAD_REQUEST = "bad_request"
    WRONG_MODEL = "wrong_model"
    UNKNOWN = "unknown"
    EXPIRED = "expired"
    MISMATCH = "mismatch"
    CANCELLED = "cancelled"
    STALE = "stale"


@dataclass(frozen=True, slots=True)
class Accepted:
    """The answer yes; saying it twice changes nothing."""

    request_id: RequestId
    attempt: int


@dataclass(frozen=True, slots=True)
class Refused:
    """The answer no, with a reason. The request may be placed elsewhere, except for `bad_request`."""

    request_id: RequestId
    attempt: int
    reason: RefusalReason
    detail: str = ""
    retry_after_s: float = 0.0


@dataclass(frozen=True, slots=True)
class PromptPart:
    """Part `part` of `parts` of a prompt that is too long for one message; sent before Submit or
    Reserve on the same subject, each answered by Accepted."""

    request_id: RequestId
    attempt: int
    part: int
    parts: int
    token_ids: bytes


@dataclass(frozen=True, slots=True)
class Work:
    """What is to be generated, the same for prefill and decode."""

    request_id: RequestId
    attempt: int
    gateway: InstanceId
    fingerprint: str
    sampling: SamplingParams
    prompt_tokens: int
    prompt_token_ids: bytes
    """Empty where the prompt came in `prompt_parts` parts before."""
    prompt_parts: int
    output_token_ids: bytes
    """What earlier attempts already streamed; the next token's `output_index` is its length."""
    deadline_s: float
    tenant_salt: str = ""
    adapter: str = ""
    priority: int = 0
    slo: SloClass = SloClass.NONE
    """How tight its targets are: what its blocks are worth to the pool."""
    tenant: str = ""
    output_tokens_expected: int | None = None
    """As the placement says."""


@dataclass(frozen=True, slots=True)
class Submit:
    """gateway → prefill. Accepted or Refused at once; idempotent per (request, attempt)."""

    work: Work
    decode: InstanceId
    source: InstanceId | None = None
    prefix_blocks: int = 0
    waited_s: float = 0.0
    """Since the placement was asked for."""
    tbt_ms_max: float | None = None
    """As the placement says."""


@dataclass(frozen=True, slots=True)
class Reserve:
    """prefill → decode: hold blocks for the prompt and one more for each sample. Reserved or Refused;
    idempotent."""

    work: Work
    owner: InstanceId
    ttl_s: float
    tbt_ms_max: float | None = None
    """Refused where a step with it is predicted to take longer; None: not asked."""


@dataclass(frozen=True, slots=True)
class Reserved:
    """Blocks `block_ids` are granted to the owner. The first `held_blocks` already hold the prompt's
    prefix and must not be written; the rest may be, under `grant`."""

    request_id: RequestId
    attempt: int
    generation: int
    held_blocks: int
    block_ids: bytes
    grant: str
    """Opaque to everyone but kvtransfer."""
    ttl_s: float


@dataclass(frozen=True, slots=True)
class Renew:
    request_id: RequestId
    attempt: int
    generation: int
    ttl_s: float


@dataclass(frozen=True, slots=True)
class Commit:
    """prefill → decode: all writes are complete at your end; go on from `first_token_id`."""

    request_id: RequestId
    attempt: int
    generation: int
    blocks_written: int
    bytes_written: int
    checksum: str
    """xxh3_128 over the written blocks in order, hexadecimal; empty where checksums are off."""
    first_token_id: int
    cached_tokens: int
    first_token_logprobs: TokenLogprobs | None = None
    """Where the request wants them: decode tells the first token too."""


@dataclass(frozen=True, slots=True)
class Release:
    """prefill → decode: the reservation is not needed (first token ended it, failure, cancel)."""

    request_id: RequestId
    attempt: int
    generation: int


@dataclass(frozen=True, slots=True)
class Finish:
    """gateway → decode: `output_tokens` tokens are taken; stop, keep the blocks in the pool."""

    request_id: RequestId
    attempt: int
    output_tokens: int


@dataclass(frozen=True, slots=True)
class Cancel:
    """gateway → the placed instances: drop everything of this request up to this attempt."""

    request_id: RequestId
    attempt: int


@dataclass(frozen=True, slots=True)
class Resume:
    """gateway → decode: send again what you emitted from `from_index` on."""

    request_id: RequestId
    attempt: int
    sample: int
    from_index: int


@dataclass(frozen=True, slots=True)
class HandlerFailed:
    """The answer to a request that was malformed or whose handling broke; the asker may try elsewhere."""

    detail: str


@dataclass(frozen=True, slots=True)
class Describe:
    """anyone → instance: your load, now. Answered by LoadSnapshot."""


# --- blocks between instances: on `instance.<instance>` too ---------------------------------------


@dataclass(frozen=True, slots=True)
class ReadPin:
    """reader → source: hold the blocks of this chain for me to read. ReadPinned or PinRefused; idempotent
    per (sender, pin_id)."""

    pin_id: str
    """The reader's own, unique among its pins."""
    fingerprint: str
    block_hashes: bytes
    """A chain from the prompt's start."""
    first_block: int
    """The reader holds the blocks before this one."""
    ttl_s: float


@dataclass(frozen=True, slots=True)
class ReadPinned:
    """Blocks `first_block` and on of the chain, as many as there are `block_ids`, stay where they are for
    `ttl_s` and may be read under `grant`."""

    pin_id: str
    first_block: int
    block_ids: bytes
    """Packed int32: whole blocks of the source's arena."""
    grant: str
    """Opaque to everyone but kvtransfer."""
    ttl_s: float


@dataclass(frozen=True, slots=True)
class PinRefused:
    """Nothing is held: `unknown` where the blocks are gone."""

    pin_id: str
    reason: RefusalReason
    detail: str = ""


@dataclass(frozen=True, slots=True)
class ReleasePin:
    """reader → source: it has read, or will not. Answered by PinReleased, also where nothing was held."""

    pin_id: str


@dataclass(frozen=True, slots=True)
class PinReleased:
    pin_id: str


@dataclass(frozen=True, slots=True)
class Replicate:
    """duty holder → instance: bring in these blocks from `source`, as a read of your own. Replicated at the
    end, however much of it came."""

    fingerprint: str
    source: InstanceId
    block_hashes: bytes
    """A chain from the prompt's start."""
    deadline_s: float


@dataclass(frozen=True, slots=True)
class Replicated:
    held_blocks: int
    """Leading blocks of the chain that the instance holds now."""
    read_bytes: int
    detail: str = ""


@dataclass(frozen=True, slots=True)
class PrefixHeat:
    """A prefix that was asked for, and how often since the sender's last PrefixHeats."""

    block_hashes: bytes
    """The chain up to where the longest match ended."""
    requests: int


@dataclass(frozen=True, slots=True)
class PrefixHeats:
    """kvmeta → `kvmeta.heat`: what was asked of it, for whoever holds the duty of replication."""

    prefixes: tuple[PrefixHeat, ...]


# --- to a gateway: `stream.<gateway>` --------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ProgressEntry:
    """How far a prompt has come; also a sign of life of a long prefill."""

    request_id: RequestId
    attempt: int
    computed_tokens: int
    cached_tokens: int


@dataclass(frozen=True, slots=True)
class TokensEntry:
    """`token_ids` begin at `output_index`, which is absolute within the answer over all attempts.

    `logprobs` has one entry a token, or none at all where none were asked; else ValueError: an entry
    with another number is malformed.
    """

    request_id: RequestId
    attempt: int
    sample: int
    output_index: int
    token_ids: bytes
    cached_tokens: int = 0
    logprobs: tuple[TokenLogprobs | None, ...] = ()
    """None where the sender does not know them: tokens of an earlier attempt."""

    def __post_init__(self) -> None:
        tokens = len(self.token_ids) // TOKEN_ID_BYTES
        if self.logprobs and len(self.logprobs) != tokens:
            raise ValueError(f"logprobs: {len(self.logprobs)} entries for {tokens} tokens")


@dataclass(frozen=True, slots=True)
class FinishEntry:
    """The answer is complete with `output_tokens` tokens over all attempts."""

    request_id: RequestId
    attempt: int
    sample: int
    output_tokens: int
    reason: FinishReason


@dataclass(frozen=True, slots=True)
class FailedEntry:
    """This attempt came to nothing. `culprit`: who is better avoided in the next, if not the sender.
    `reason`: the refusal behind it, where there was one."""

    request_id: RequestId
    attempt: int
    retryable: bool
    detail: str
    culprit: InstanceId | None = None
    reason: RefusalReason | None = None


@dataclass(frozen=True, slots=True)
class StreamBatch:
    """All that an instance has to tell one gateway after a step; `tokens` go before `finished`."""

    progress: tuple[ProgressEntry, ...] = ()
    tokens: tuple[TokensEntry, ...] = ()
    finished: tuple[FinishEntry, ...] = ()
    failed: tuple[FailedEntry, ...] = ()


MESSAGE_KINDS: dict[str, type] = {
    "schedule": ScheduleRequest,
    "placement": Placement,
    "rejection": Rejection,
    "decision": Decision,
    "match": MatchRequest,
    "match_reply": MatchReply,
    "load": LoadSnapshot,
    "block_events": BlockEvents,
    "inventory": InventoryRequest,
    "inventory_chunk": InventoryChunk,
    "accepted": Accepted,
    "refused": Refused,
    "prompt_part": PromptPart,
    "submit": Submit,
    "reserve": Reserve,
    "reserved": Reserved,
    "renew": Renew,
    "commit": Commit,
    "release": Release,
    "finish": Finish,
    "cancel": Cancel,
    "resume": Resume,
    "describe": Describe,
    "handler_failed": HandlerFailed,
    "read_pin": ReadPin,
    "read_pinned": ReadPinned,
    "pin_refused": PinRefused,
    "release_pin": ReleasePin,
    "pin_released": PinReleased,
    "replicate": Replicate,
    "replicated": Replicated,
    "prefix_heats": PrefixHeats,
    "stream": StreamBatch,
}
"""The `kind` that a message carries on the wire, for each class: explicit, nothing is looked up by name."""
