"""Whose cached prefix of a prompt is how long, and whose may be read by others."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from heapq import nsmallest

import numpy as np

from kvindex.core import InstanceId, InstanceMatch, Tier
from policy.board import Board
from policy.choice import PlacementLimits, spread
from policy.columns import Bools, Floats, Ints
from policy.core import CostCoefficients, ScheduleRequest

_SSD = Tier.SSD
SOURCES_MAX = 4
"""Instances whose prefix is considered for others: those with the longest."""


@dataclass(frozen=True, slots=True)
class HeldPrefixes:
    """Cached prefixes of a prompt by row, zero where there is none: `memory_blocks` lie in memory (device or
    DRAM), what comes after them, up to `blocks`, has to be read from SSD."""

    memory_blocks: Floats
    blocks: Floats
    on_ssd: bool
    """Whether any may be there: where not, both are the same."""

    def upto(self, blocks: int) -> "HeldPrefixes":
        in_all = np.minimum(self.blocks, blocks)
        in_memory = np.minimum(self.memory_blocks, blocks) if self.on_ssd else in_all
        return HeldPrefixes(in_memory, in_all, self.on_ssd)

    def of(self, rows: Ints) -> "HeldPrefixes":
        in_all = self.blocks[rows]
        return HeldPrefixes(self.memory_blocks[rows] if self.on_ssd else in_all, in_all, self.on_ssd)


@dataclass(frozen=True, slots=True)
class Source:
    """An instance whose cached prefix others may read."""

    name: InstanceId
    memory_blocks: int
    blocks: int
    cost: CostCoefficients

    @property
    def ends(self) -> tuple[int, ...]:
        """Where a tier ends, in blocks."""
        if self.memory_blocks in (0, self.blocks):
            return (self.blocks,)
        return (self.memory_blocks, self.blocks)


def held_prefixes(
    matches: Sequence[InstanceMatch], row_of: Mapping[InstanceId, int]
) -> tuple[HeldPrefixes, Ints]:
    """By row of the board, and the rows of those that hold something, in the order of the matches. Of
    instances that the board does not know nothing is taken over."""
    known = [match for match in matches if match.instance in row_of]
    holders = np.array([row_of[match.instance] for match in known], np.intp)
    blocks = np.zeros(len(row_of))
    blocks[holders] = [match.prefix_blocks for match in known]
    if all(len(match.runs) == 1 and match.runs[0].tier is not _SSD for match in known):
        return HeldPrefixes(blocks, blocks, False), holders
    memory_blocks = np.zeros(len(row_of))
    memory_blocks[holders] = [memory_blocks_of(match) for match in known]
    return HeldPrefixes(memory_blocks, blocks, True), holders


def memory_blocks_of(match: InstanceMatch) -> int:
    """Where runs are not told, all is taken to lie in memory. Along a prefix tiers only get slower; should
    they not, what comes after the first SSD is SSD."""
    blocks, runs = 0, match.runs
    if not runs:
        return match.prefix_blocks
    for run in runs:
        if run.tier is _SSD:
            break
        blocks += run.blocks
    return min(blocks, match.prefix_blocks)


def sources_of(
    board: Board,
    request: ScheduleRequest,
    held: HeldPrefixes,
    rows: Ints,
    limits: PlacementLimits,
    now_s: float,
) -> list[Source]:
    """Of the instances in `rows` those whose blocks may be read, longest prefix first: not one that takes no
    requests, is silent, or failed this request before. Requests take equals in different orders, so that none
    serves all."""
    readable = board.readable(request.fingerprint)
    if readable is None or not len(rows):
        return []
    holders = board.holders
    heard = now_s - holders.columns.heard_at_s[rows] <= limits.silence_s_max
    rows = rows[(held.blocks[rows] > 0) & readable[rows] & heard]
    if request.excluded:
        rows = rows[np.array([holders.names[row] not in request.excluded for row in rows.tolist()], np.bool_)]
    if not len(rows):
        return []
    rows = rows[_undominated(board, held.of(rows), rows)]
    rows = rows[_longest(held.of(rows))]
    sources = [
        Source(name, int(held.memory_blocks[row]), int(held.blocks[row]), board.instance(name).cost)
        for row in rows.tolist()
        for name in (holders.names[row],)
    ]
    return nsmallest(
        SOURCES_MAX,
        sources,
        key=lambda source: (-source.blocks, -source.memory_blocks, spread(request.request_id, source.name)),
    )


def _undominated(board: Board, held: HeldPrefixes, rows: Ints) -> Bools:
    """Without those that have less, and are not quicker, than the one with most in memory.

    Reading from that one or from nobody is never slower: between its end and an own prefix's the time is
    least at one of the two. And that one itself has no use for those that have less.
    """
    most = np.argmax(held.memory_blocks)
    columns = board.holders.columns
    fixed_s, bytes_per_s = columns.transfer_fixed_s[rows], columns.transfer_bytes_per_s[rows]
    undominated: Bools = (
        (held.blocks >= held.memory_blocks[most])
        | (fixed_s < fixed_s[most])
        | (bytes_per_s > bytes_per_s[most])
    )
    return undominated


def _longest(held: HeldPrefixes) -> Ints | slice:
    """Those of which SOURCES_MAX are the longest: more where there are equals."""
    if len(held.blocks) <= SOURCES_MAX:
        return slice(None)
    last = np.lexsort((-held.memory_blocks, -held.blocks))[SOURCES_MAX - 1]
    blocks, memory_blocks = held.blocks[last], held.memory_blocks[last]
    longest: Bools = (held.blocks > blocks) | (
        (held.blocks == blocks) & (held.memory_blocks >= memory_blocks)
    )
    return longest.nonzero()[0]
