"""What a caller may read without asking again: the grants that an owner admitted it to, while they stand.

Owns checking an owner's GO and keeping a bounded number of them. Knows nothing of how they are asked for.
"""

from collections import OrderedDict
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvtransfer.errors import FrameError
from kvtransfer.memory import Ranges
from kvtransfer.shm.board import Permission
from kvtransfer.shm.frames import GoFrame
from kvtransfer.shm.memories import Imports, PeerMemory
from kvtransfer.transport import Call

ADMISSIONS_MAX = 256
"""Grants that are kept; beyond it the one unused for longest is asked for again."""
_NOTHING = np.empty(0, np.int64)


@dataclass(frozen=True, slots=True)
class Admission:
    """Where to read from, and the stretches of the whole grant; none of them if it is not to be kept."""

    memory: PeerMemory
    permission: Permission
    digest: bytes
    starts: npt.NDArray[np.int64]
    ends: npt.NDArray[np.int64]

    def serves(self, ranges: Ranges) -> bool:
        """Whether a read of these ranges needs no word with the owner."""
        if not len(ranges) or not len(self.starts) or not self.permission.stands():
            return False
        if len(ranges) == 1:
            start, count = ranges[0].tolist()
            found = int(self.starts.searchsorted(start, "right")) - 1
            return found >= 0 and start + count <= int(self.ends[found])
        at = np.searchsorted(self.starts, ranges[:, 0], side="right") - 1
        return bool(((at >= 0) & (ranges[:, 0] + ranges[:, 1] <= self.ends[at])).all())


class Admissions:
    """Of one link, by the token of the grant."""

    def __init__(self) -> None:
        self._kept: OrderedDict[str, Admission] = OrderedDict()

    def __len__(self) -> int:
        return len(self._kept)

    def find(self, call: Call) -> Admission | None:
        """One that serves the call, if it needs no digest of the owner's."""
        admission = self._kept.get(call.token)
        if admission is None or call.verify or not admission.serves(call.remote):
            return None
        self._kept.move_to_end(call.token)
        return admission

    def understand(self, go: GoFrame, call: Call, imports: Imports) -> Admission:
        """What a GO to this call admits to; kept from now on. Raises FrameError if it cannot be."""
        memory = imports.region(go.region_id)
        permission = imports.permission(go.slot, go.epoch)
        if not memory.covers(call.remote) or bool(go.digest) is not call.verify:
            raise FrameError("GO to a read that leaves the region, or without the digest asked for")
        if go.stretches is None:
            return Admission(memory, permission, go.digest, _NOTHING, _NOTHING)
        if not memory.covers(go.stretches):
            raise FrameError("GO with stretches that leave the region")
        starts = go.stretches[:, 0]
        admission = Admission(memory, permission, go.digest, starts, starts + go.stretches[:, 1])
        self._kept[call.token] = admission
        self._kept.move_to_end(call.token)
        if len(self._kept) > ADMISSIONS_MAX:
            self._kept.popitem(last=False)
        return admission

    def forget(self, token: str) -> None:
        self._kept.pop(token, None)

    def drop(self, memory: PeerMemory | None) -> None:
        """The region is gone: let go of its mapping."""
        for token in [token for token, kept in self._kept.items() if kept.memory is memory]:
            del self._kept[token]

    def clear(self) -> None:
        self._kept.clear()
