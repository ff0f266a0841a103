"""One request on its way through the simulated cluster."""

from array import array
from dataclasses import dataclass, field

from kvhash import HASH_BYTES
from kvindex.core import InstanceId
from policy.core import Placement, RequestId
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
    block_ids: tuple[int, ...]
    """Of its full blocks: only those are ever cached."""
    block_tokens: int
    priority: int = 0
    attempt: int = 0
    excluded: tuple[InstanceId, ...] = ()
    placement: Placement | None = None
    cached_tokens: int = 0
    first_token_s: float | None = None
    gaps_s: "array[float]" = field(default_factory=lambda: array("d"))
    ended: bool = False

    @property
    def output_tokens_expected(self) -> int | None:
        """As its placement says."""
        return None if self.placement is None else self.placement.output_tokens_expected

    @property
    def family(self) -> bytes:
        """Stands for the hash of its first block: requests that begin alike have the same."""
        return b"".join(
            block_id.to_bytes(HASH_BYTES, "little", signed=True) for block_id in self.block_ids[:1]
        )

    @property
    def usable_block_ids(self) -> tuple[int, ...]:
        """What of a cached prefix it can start from: its last token is always computed."""
        return self.block_ids[: (self.prompt_tokens - 1) // self.block_tokens]


def simulated(
    traced: TracedRequest, index: int, arrived_s: float, seed: int, limit: int, block_tokens: int
) -> SimulatedRequest:
    """`limit` is what it names as its most tokens, unless its answer is longer."""
    output_tokens = max(1, traced.output_tokens)
    return SimulatedRequest(
        RequestId(f"{seed}-{index}"),
        index,
        arrived_s,
        traced.input_tokens,
        output_tokens,
        max(limit, output_tokens),
        traced.block_ids[: traced.input_tokens // block_tokens],
        block_tokens,
        traced.priority,
    )
