"""A prompt, or what is left of it, as an engine computes it in parts."""

from collections.abc import Callable
from dataclasses import dataclass

from simulator.request import SimulatedRequest


def _nothing() -> None:
    pass


def _told_nothing(tokens: int, duration_s: float) -> None:
    pass


@dataclass(slots=True, eq=False)
class PrefillJob:
    """`new_tokens` to compute after `prefix_tokens`; its blocks are held by whoever made it."""

    request: SimulatedRequest
    new_tokens: int
    prefix_tokens: int
    load_s: float
    """To bring the prefix up from DRAM, layer by layer beside the first part."""
    done: Callable[[], None]
    """Called after the last part."""
    part_began: Callable[[int, float], None] = _told_nothing
    """Told the tokens of a part and how long they take."""
    part_done: Callable[[], None] = _nothing

    def tell_nobody(self) -> None:
        """Whatever comes of it."""
        self.done = self.part_done = _nothing
        self.part_began = _told_nothing
