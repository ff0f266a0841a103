"""One request on its way through the simulated cluster."""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

from kvhash import HASH_BYTES
from kvindex.core import InstanceId
from policy.core import Placement, RequestId
from simulator.setup import ARRIVALS_S_MAX, OUTPUT_TOKENS_LIMIT, ClusterSetup, SetupError
from simulator.trace import TracedRequest


@dataclass(slots=True, eq=False)
class SimulatedRequest:
    request_id: RequestId
    index: int
    arrived_s: float
    prompt_tokens: int
    output_tokens: int
    """At least 1: prefill always samples a token."""
    output_tokens_max: int
    """Of what is still to come, at least 1, as it names it."""
    block_ids: tuple[int, ...]
    """Of its full blocks: only those are ever cached."""
    block_tokens: int
    priority: int = 0
    resumed_tokens: int = 0
    """Of its answer, which came before its last loss: they are prefilled like prompt."""
    attempt: int = 0
    excluded: tuple[InstanceId, ...] = ()
    placement: Placement | None = None
    decoding: bool = False
    """Decode has taken it over, and needs its prefill no more."""
    predicted_ttft_s: float = 0.0
    """At its last placement before its first token."""
    cached_tokens: int = 0
    """Of its prompt, when that was first prefilled."""
    first_token_s: float | None = None
    last_token_s: float = 0.0
    """When the latest token before its decode came out."""
    losses: int = 0
    """Of an instance that it was on."""
    resumed: int = 0
    """Placements after its first token, to go on elsewhere."""
    recomputed_tokens: int = 0
    """Prefilled after losses."""
    gaps_s: "array[float]" = field(default_factory=lambda: array("d"))
    ended: bool = False

    @property
    def output_tokens_expected(self) -> int | None:
        """As its placement says."""
        return None if self.placement is None else self.placement.output_tokens_expected

    @property
    def tokens_out(self) -> int:
        """Of its answer, as far as they are told."""
        return 0 if self.first_token_s is None else 1 + len(self.gaps_s)

    @property
    def input_tokens(self) -> int:
        """To prefill: its prompt and, after a loss, its answer so far."""
        return self.prompt_tokens + self.resumed_tokens

    @property
    def output_tokens_left(self) -> int:
        """After those of its input."""
        return self.output_tokens - self.resumed_tokens

    @property
    def needed(self) -> tuple[InstanceId, ...]:
        """Without any of which it cannot go on."""
        if self.placement is None:
            return ()
        return (self.placement.decode,) if self.decoding else (self.placement.prefill, self.placement.decode)

    def placed(self, placement: Placement) -> None:
        self.placement = placement
        if self.first_token_s is None:
            self.predicted_ttft_s = placement.predicted_ttft_ms / 1e3
        else:
            self.resumed += 1

    def place_again(self, culprit: InstanceId) -> None:
        """Its next attempt avoids `culprit`, and goes on after the tokens that are out."""
        self.excluded = (*self.excluded, culprit)
        self.attempt += 1
        self.placement = None
        self.decoding = False
        more = self.tokens_out - self.resumed_tokens
        self.resumed_tokens += more
        self.output_tokens_max -= more

    def token_sampled(self, now_s: float) -> None:
        """By a prefill."""
        if self.first_token_s is None:
            self.first_token_s = now_s
        else:
            self.gaps_s.append(now_s - self.last_token_s)
        self.last_token_s = now_s

    @property
    def family(self) -> bytes:
        """Stands for the hash of its first block: requests that begin alike have the same."""
        return self.block_hashes(1)

    def block_hashes(self, blocks: int) -> bytes:
        """What stands for the hashes of the first so many."""
        return b"".join(
            block_id.to_bytes(HASH_BYTES, "little", signed=True) for block_id in self.block_ids[:blocks]
        )

    @property
    def usable_block_ids(self) -> tuple[int, ...]:
        """What of a cached prefix it can start from: its last token is always computed."""
        return self.block_ids[: (self.input_tokens - 1) // self.block_tokens]


def simulated(requests: Sequence[TracedRequest], setup: ClusterSetup) -> list[SimulatedRequest]:
    """The requests of a trace, of which there is at least one, as they arrive. SetupError where their block
    ids are those of blocks of another size, or their arrivals take longer than ARRIVALS_S_MAX."""
    first_ms = min(request.arrived_ms for request in requests)
    last_ms = max(request.arrived_ms for request in requests)
    if last_ms - first_ms > ARRIVALS_S_MAX * 1e3 * setup.speedup:
        raise SetupError(
            f"speedup: {setup.speedup:g}, the trace's arrivals must not take more than {ARRIVALS_S_MAX:g} s"
        )
    return [
        _simulated(traced, index, (traced.arrived_ms - first_ms) / 1e3 / setup.speedup, setup)
        for index, traced in enumerate(requests)
    ]


def _simulated(traced: TracedRequest, index: int, arrived_s: float, setup: ClusterSetup) -> SimulatedRequest:
    full_blocks = traced.input_tokens // setup.block_tokens
    in_part = traced.input_tokens % setup.block_tokens > 0
    # The block that its last tokens fill in part may have an id or not.
    if not full_blocks <= len(traced.block_ids) <= full_blocks + in_part:
        raise SetupError(
            f"block_tokens: {setup.block_tokens}, request {index} has {len(traced.block_ids)} block ids for "
            f"{traced.input_tokens} tokens"
        )
    output_tokens = max(1, traced.output_tokens)
    return SimulatedRequest(
        RequestId(f"{setup.seed}-{index}"),
        index,
        arrived_s,
        traced.input_tokens,
        output_tokens,
        max(OUTPUT_TOKENS_LIMIT, output_tokens),
        traced.block_ids[:full_blocks],
        setup.block_tokens,
        traced.priority,
    )
