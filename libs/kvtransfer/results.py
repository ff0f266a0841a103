"""What became of a call: as a whole, and range by range where it failed."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvtransfer.kinds import TransportKind


@dataclass(frozen=True, slots=True)
class Transferred:
    """A call that went through: how many bytes, and what carried them."""

    payload_bytes: int
    transport: TransportKind


def landed_ranges(ranges: npt.ArrayLike, landed: Sequence[tuple[int, int]]) -> npt.NDArray[np.bool_]:
    """For each of a caller's ranges whether all its bytes are within the stretches that landed.

    `landed` holds (start, count) in bytes of the call's order, in any order, overlapping or not. A range
    without bytes is never missing any.
    """
    lengths = np.asarray(ranges, np.int64).reshape(-1, 2)[:, 1]
    ends = np.cumsum(lengths)
    starts = ends - lengths
    stretches = np.asarray(sorted(landed), np.int64).reshape(-1, 2)
    if len(stretches) == 0:
        return np.equal(lengths, 0)
    # The end of each stretch, carried on while the next one begins before it.
    reach = np.maximum.accumulate(stretches.sum(axis=1))
    first = np.concatenate(([True], stretches[1:, 0] > reach[:-1]))
    begins = stretches[first, 0]
    stops = np.append(reach[:-1][first[1:]], reach[-1])
    at = np.searchsorted(begins, starts, side="right") - 1
    return np.equal(lengths, 0) | ((at >= 0) & (ends <= stops[at]))
