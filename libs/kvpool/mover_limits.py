"""How much a TierMover does at once, and what it counted."""

from dataclasses import dataclass, field

from kvindex.core import Tier

READ_THREADS = 4
"""Reads at once: what one disk needs to be busy while another thread verifies."""
WRITE_THREADS = 2
"""Of each lower tier. Few, since sinking is never urgent and takes memory bandwidth from the engine."""
PIECE_BYTES = 2 << 20
"""Copied by a thread in one go, or one block where that is larger: some milliseconds, so that going to the
thread costs little and giving up is quick."""
SINK_BATCH_BYTES = 16 << 20
"""Sunk before the pool is asked what is most pressing now."""
SINK_BATCH_BLOCKS_MAX = 128
"""Of small blocks: their bookkeeping keeps the event loop some 25 µs each."""
ERASE_BATCH_SLOTS_MAX = 1024
"""Erased before anything is sunk: some milliseconds, a record is small."""
BACK_OFF_S_MIN = 0.5
BACK_OFF_S_MAX = 60.0
"""Between attempts to sink into a tier whose store fails, or to erase there; doubled each time."""
BACK_OFF_DOUBLINGS_MAX = 32
"""Past any maximum, and short of what a float cannot hold."""
STALL_S = 5.0
"""A read that takes longer says that the disk hangs: nobody waits for it until it is done."""
SETTLE_S_MAX = 2.0
"""Of the time for closing, what the copies under way get to end."""


@dataclass(frozen=True, slots=True)
class MoverLimits:
    """Bounds of one TierMover; in memory at once are at most `read_threads` pieces on their way up, and a
    sink batch for each lower tier on its way down."""

    read_threads: int = READ_THREADS
    write_threads: int = WRITE_THREADS
    piece_bytes: int = PIECE_BYTES
    sink_batch_bytes: int = SINK_BATCH_BYTES
    sink_batch_blocks_max: int = SINK_BATCH_BLOCKS_MAX
    erase_batch_slots_max: int = ERASE_BATCH_SLOTS_MAX
    back_off_s_min: float = BACK_OFF_S_MIN
    back_off_s_max: float = BACK_OFF_S_MAX
    stall_s: float = STALL_S
    settle_s_max: float = SETTLE_S_MAX

    def piece_blocks(self, block_bytes: int) -> int:
        """Copied by a thread in one go."""
        return max(1, self.piece_bytes // block_bytes)

    def sink_batch_blocks(self, block_bytes: int) -> int:
        return min(self.sink_batch_blocks_max, max(1, self.sink_batch_bytes // block_bytes))

    def back_off_s(self, failures: int) -> float:
        """How long a tier is left alone after so many failures in a row, at least 1."""
        return min(
            self.back_off_s_max, self.back_off_s_min * 2.0 ** min(failures - 1, BACK_OFF_DOUBLINGS_MAX)
        )


@dataclass(slots=True)
class TierCounters:
    """What happened to copies in one lower tier since the start."""

    sunk_blocks: int = 0
    sunk_bytes: int = 0
    write_failed_blocks: int = 0
    risen_blocks: int = 0
    risen_bytes: int = 0
    unreadable_blocks: int = 0
    corrupt_blocks: int = 0
    erase_failures: int = 0
    backing_off: bool = False
    """The store fails, and the tier takes nothing for a while."""


@dataclass(slots=True)
class MoverCounters:
    """Counters by lower tier, and of rises, which may take from several."""

    tiers: dict[Tier, TierCounters] = field(default_factory=dict)
    late_rises: int = 0
    """Were not done by their deadline."""
    stalled_rises: int = 0
    """Were not begun because the disk hangs."""
