"""Whether a request is let through: what owners ask of every WRITE and READ, whatever carries its bytes."""

from kvtransfer.device import DeviceRegion
from kvtransfer.errors import FrameError, GrantError, TransportUnfit
from kvtransfer.grants import Access, Grant, GrantTable
from kvtransfer.memory import Ranges
from kvtransfer.stream.frames import TransferRequest


def check_request(
    grants: GrantTable, peer: str, access: Access, wanted: TransferRequest
) -> tuple[Grant, Ranges]:
    """The grant that covers what `peer` wants, and the ranges made fit for a cursor.

    Raises GrantError if none does, FrameError for a request that no honest caller makes.
    """
    if access is Access.READ and (wanted.tag or wanted.tag_follows or wanted.digest):
        raise FrameError("a READ with a tag or a digest")
    if wanted.earlier_bytes and not wanted.tag:
        raise FrameError("bytes of earlier requests without the tag that belongs to them")
    grant, ranges = grants.check(wanted.token, peer, access, wanted.ranges)
    if (wanted.tag or wanted.tag_follows) and grant.on_arrival is None:
        raise GrantError("the grant takes no tags")
    if wanted.earlier_bytes > grant.landed_bytes:
        raise GrantError(f"{wanted.earlier_bytes} earlier bytes did not land under the grant")
    return grant, ranges


def check_has_view(grant: Grant) -> None:
    """For transports that serve host memory only. Raises TransportUnfit for memory of a device."""
    if isinstance(grant.region, DeviceRegion):
        raise TransportUnfit("this transport does not serve memory of a device")
