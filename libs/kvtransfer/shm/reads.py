"""The READs of one caller, admitted: it is told where the memory is and which slot to look at, and copies.

Owns what waits for a digest meanwhile, and counts what the caller says it read. Knows nothing of PUTs.
"""

from collections.abc import Callable

import numpy as np

from kvtransfer.errors import GrantError, TransportUnfit
from kvtransfer.grants import REVOKED, Access, Grant
from kvtransfer.kinds import TransportKind
from kvtransfer.memory import Ranges
from kvtransfer.shm.channel import Channel
from kvtransfer.shm.frames import STRETCHES_TOLD_MAX, GoFrame, MovedFrame, pack_go
from kvtransfer.shm.memories import Exports
from kvtransfer.shm.resources import Resources
from kvtransfer.stream.frames import ErrorCode, TransferRequest, error_code
from kvtransfer.stream.granted import check_has_view, check_request
from kvtransfer.transport import TransportContext

Refuse = Callable[[int, ErrorCode, str], None]


class Reads:
    """Of one session."""

    def __init__(
        self,
        peer: str,
        context: TransportContext,
        resources: Resources,
        channel: Channel,
        exports: Exports,
        refuse: Refuse,
    ) -> None:
        self._peer = peer
        self._context = context
        self._resources = resources
        self._channel = channel
        self._exports = exports
        self._refuse = refuse
        self._counters = context.statistics.of(peer, TransportKind.SHM)
        self._hashing = 0

    def admit(self, request: int, wanted: TransferRequest) -> None:
        """Answered by GO or ERROR, at once or after the digest. Raises FrameError."""
        try:
            grant, ranges = check_request(self._context.grants, self._peer, Access.READ, wanted)
            check_has_view(grant)
        except (GrantError, TransportUnfit) as error:
            self._refuse(request, error_code(error), str(error))
            return
        served_max = self._context.limits.transfers_served_max
        if not wanted.verify:
            self._go(request, grant, b"")
        elif self._hashing >= served_max:
            self._refuse(request, ErrorCode.BUSY, f"transfers_served_max of {served_max} is reached")
        else:
            self._hashing += 1
            self._resources.digests.start(grant, ranges, lambda digest: self._go_with(request, grant, digest))

    def count(self, moved: MovedFrame) -> None:
        """What the caller read since it last said so."""
        self._counters.served_reads += moved.reads
        self._counters.served_read_bytes += moved.payload_bytes
        self._counters.served_failures += moved.failures

    def _go_with(self, request: int, grant: Grant, digest: bytes) -> None:
        self._hashing -= 1
        if grant.revoked:
            self._refuse(request, ErrorCode.GRANT, REVOKED)
        elif not self._channel.closed:
            self._go(request, grant, digest)

    def _go(self, request: int, grant: Grant, digest: bytes) -> None:
        self._exports.tell(grant.region)
        slot = self._resources.slot_of(grant)
        stretches: Ranges | None = None
        if len(grant.starts) <= STRETCHES_TOLD_MAX:
            stretches = np.stack((grant.starts, grant.ends - grant.starts), axis=1)
        go = GoFrame(grant.region.region_id, slot.index, slot.epoch, digest, stretches)
        self._channel.send(pack_go(request, go))
