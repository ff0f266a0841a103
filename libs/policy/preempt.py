"""How a sequence that must give up its blocks gets its KV back: computed again, or copied out and in.

Both take the engine's time, so the cheaper one is what costs fewer seconds of it. Knows no blocks: whoever
asks says how much of the sequence stays where it is.
"""

from dataclasses import dataclass
from enum import StrEnum

from policy.core import CostCoefficients
from policy.cost import prefill_s


class Preemption(StrEnum):
    RECOMPUTE = "recompute"
    SWAP = "swap"


@dataclass(frozen=True, slots=True)
class HostCopyCost:
    """What it takes to move KV between the cache and host memory, one way: fixed_s + bytes / bytes_per_s.

    ValueError where `fixed_s` is negative or `bytes_per_s` not above 0.
    """

    fixed_s: float
    bytes_per_s: float

    def __post_init__(self) -> None:
        if self.fixed_s < 0:
            raise ValueError(f"fixed_s: {self.fixed_s}, must be at least 0")
        if not self.bytes_per_s > 0:
            raise ValueError(f"bytes_per_s: {self.bytes_per_s}, must be above 0")


def swap_s(cost: HostCopyCost, copied_bytes: int) -> float:
    """Time to copy this much out, and later in again."""
    return 2 * (cost.fixed_s + copied_bytes / cost.bytes_per_s)


def choose_preemption(
    compute: CostCoefficients, copy: HostCopyCost, lost_tokens: int, kept_tokens: int, copied_bytes: int
) -> Preemption:
    """The cheaper way for a sequence that loses the KV of `lost_tokens` tokens, `copied_bytes` in size.

    The KV of the `kept_tokens` before them stays, because others use it. Of equals it is recompute, which
    takes no memory.
    """
    recompute_s = prefill_s(compute, lost_tokens, kept_tokens)
    return Preemption.SWAP if swap_s(copy, copied_bytes) < recompute_s else Preemption.RECOMPUTE
