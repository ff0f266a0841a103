"""Turns a call's ranges into work requests: each moves one stretch that is contiguous at both ends. Pure.

A registration covers at most PIECE_BYTES: a large region is registered in pieces, so that no single
registration holds up the event loop (pyverbs holds the interpreter lock in all of its calls). Keys differ
from piece to piece, so no work request crosses from one into the next.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvtransfer.errors import FrameError
from kvtransfer.memory import Ranges, offsets_at
from kvtransfer.rdma.lane_cut import LaneCut

PIECE_BYTES = 64 << 20
"""Memory of one registration. Pieces start at multiples of it, counted from the region's start."""
WORK_BYTES_MAX = 256 << 10
"""Payload of one work request: enough for full speed, little enough that a software device, which copies
while it is posted, does not hold the loop for long."""

Integers = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class RemoteKeys:
    """By which keys the caller may reach which stretches of the owner's region.

    `starts`, `ends` are offsets in the region, sorted, not overlapping; `keys[stretch][lane]`.
    """

    base_address: int
    starts: Integers
    ends: Integers
    keys: npt.NDArray[np.uint32]


@dataclass(frozen=True, slots=True)
class WorkPlan:
    """All work requests of a call in the order of its bytes; request i moves `lengths[i]` bytes.

    `pieces[i]` and `stretches[i]` say by which local and which remote key. Part k of the cut ends before
    request `part_ends[k]`.
    """

    local_offsets: Integers
    remote_offsets: Integers
    lengths: Integers
    pieces: Integers
    stretches: Integers
    part_ends: Integers

    def of_part(self, part: int) -> slice:
        return slice(int(self.part_ends[part - 1]) if part else 0, int(self.part_ends[part]))


def pieces_of(ranges: Ranges) -> list[int]:
    """The numbers of the pieces that `ranges` touch, in order."""
    if len(ranges) == 0:
        return []
    found: list[int] = np.unique(_in_pieces(ranges)[:, 0] // PIECE_BYTES).tolist()
    return found


def planned(local: Ranges, remote: Ranges, keys: RemoteKeys, cut: LaneCut, work_bytes_max: int) -> WorkPlan:
    """The plan of a call of at least one byte.

    Raises FrameError if `keys`, which the owner sent, do not cover `remote`.
    """
    if len(local) == len(remote) == 1 and cut.payload_bytes <= min(work_bytes_max, cut.part_bytes):
        plan = _single(local, remote, keys)
        if plan is not None:
            return plan
    near, far = _in_pieces(local), _in_pieces(remote)
    near_ends, far_ends = np.cumsum(near[:, 1]), np.cumsum(far[:, 1])
    total = cut.payload_bytes
    marks = np.unique(
        np.concatenate(
            (
                [0],
                near_ends,
                far_ends,
                np.arange(0, total, work_bytes_max, dtype=np.int64),
                np.arange(0, total, cut.part_bytes, dtype=np.int64),
            )
        )
    ).astype(np.int64)
    starts, lengths = marks[:-1], np.diff(marks)
    local_offsets = offsets_at(near, near_ends, starts)
    remote_offsets = offsets_at(far, far_ends, starts)
    stretches = np.searchsorted(keys.starts, remote_offsets, side="right") - 1
    if bool((stretches < 0).any()) or bool((remote_offsets + lengths > keys.ends[stretches]).any()):
        raise FrameError("the owner's keys do not cover the ranges that were asked for")
    part_marks = np.append(np.arange(1, cut.parts, dtype=np.int64) * cut.part_bytes, total)
    part_ends = np.searchsorted(marks, part_marks)
    return WorkPlan(
        local_offsets, remote_offsets, lengths, local_offsets // PIECE_BYTES, stretches, part_ends
    )


def _single(local: Ranges, remote: Ranges, keys: RemoteKeys) -> WorkPlan | None:
    """The plan of one work request, some ten times quicker; None if one does not do."""
    ((near, count),), ((far, _),) = local.tolist(), remote.tolist()
    piece = near // PIECE_BYTES
    stretch = int(np.searchsorted(keys.starts, far, side="right")) - 1
    if piece != (near + count - 1) // PIECE_BYTES or stretch < 0 or far + count > keys.ends[stretch]:
        return None
    # One array for all columns: making one is what takes the time.
    near_column, far_column, counts, pieces, stretches, part_ends = np.array(
        [[near], [far], [count], [piece], [stretch], [1]], np.int64
    )
    return WorkPlan(near_column, far_column, counts, pieces, stretches, part_ends)


def _in_pieces(ranges: Ranges) -> Ranges:
    """The same bytes, each range within one piece."""
    starts, ends = ranges[:, 0], ranges[:, 0] + ranges[:, 1]
    crossings = (ends - 1) // PIECE_BYTES - starts // PIECE_BYTES
    if not crossings.any():
        return ranges
    index = np.repeat(np.arange(len(ranges)), crossings + 1)
    number = np.arange(len(index)) - np.repeat(np.cumsum(crossings + 1) - (crossings + 1), crossings + 1)
    first_piece = starts[index] // PIECE_BYTES + number
    cut_starts = np.maximum(starts[index], first_piece * PIECE_BYTES)
    cut_ends = np.minimum(ends[index], (first_piece + 1) * PIECE_BYTES)
    return np.stack((cut_starts, cut_ends - cut_starts), axis=1)
