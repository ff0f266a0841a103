"""Posts the work requests of a call on its lanes: chain by chain, in turn with others, never for too long."""

import asyncio
import time
from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate

import numpy as np

from kvtransfer.rdma.lane import Lane
from kvtransfer.rdma.pending import Pending
from kvtransfer.rdma.registrations import PieceKeys
from kvtransfer.rdma.sendring import Columns
from kvtransfer.rdma.work import WorkPlan

_CHAIN_BYTES_MAX = 512 << 10
"""Posted at once: a software device copies while it is posted."""
_POST_S_MAX = 0.002
"""Posting goes on for this long before the loop gets its turn."""


async def post_all(pending: Pending, plan: WorkPlan, local: PieceKeys, lanes: Sequence[Lane]) -> None:
    """All bytes of the call over `lanes`; returns when its work requests are complete.

    However it ends, nothing more is posted afterwards; what was, is in `pending.posted`. Raises OSError if a
    lane takes no work, `pending.error` as soon as there is one, the error with which a lane was closed.
    """
    if len(lanes) == 1:
        await _post_lane(pending, plan, local, lanes[0], 0)
        return
    posting = [
        asyncio.create_task(_post_lane(pending, plan, local, lane, number))
        for number, lane in enumerate(lanes)
    ]
    try:
        await asyncio.gather(*posting)
    finally:
        for task in posting:
            task.cancel()
        await asyncio.wait(posting)


async def _post_lane(pending: Pending, plan: WorkPlan, local: PieceKeys, lane: Lane, number: int) -> None:
    """One lane's parts, part after part, and the completion of the last one."""
    for part in pending.cut.parts_of(number):
        await _post_part(pending, _columns(plan, plan.of_part(part), local, pending, number), lane, part)
    await lane.completed(pending.posted[lane])


async def _post_part(pending: Pending, columns: Columns, lane: Lane, part: int) -> None:
    reached = list(accumulate(columns.lengths, initial=0))
    total, at = len(columns.lengths), 0
    begin_s = time.monotonic()
    while at < total:
        async with lane.turn:
            room = await lane.room()
            if pending.error is not None:
                raise pending.error
            fitting = bisect_right(reached, reached[at] + _CHAIN_BYTES_MAX) - 1
            end = max(at + 1, min(at + room, fitting))
            chain = Columns(*(column[at:end] for column in columns))
            if pending.is_write:
                pending.posted[lane] = lane.write(chain, pending.request if end == total else None)
            else:
                pending.posted[lane] = lane.read(chain)
        at = end
        if at == total:
            # In the same turn: the owner's answer may come with the next one.
            pending.part_ends.append((lane, pending.posted[lane], part))
        if time.monotonic() - begin_s >= _POST_S_MAX:
            await asyncio.sleep(0)
            begin_s = time.monotonic()


def _columns(plan: WorkPlan, rows: slice, local: PieceKeys, pending: Pending, lane: int) -> Columns:
    keys = pending.keys
    assert keys is not None
    piece_rows = np.searchsorted(local.pieces, plan.pieces[rows])
    return Columns(
        (plan.local_offsets[rows] + local.base_address).tolist(),
        plan.lengths[rows].tolist(),
        local.local[piece_rows, lane].tolist(),
        (plan.remote_offsets[rows] + keys.base_address).tolist(),
        keys.keys[plan.stretches[rows], lane].tolist(),
    )
