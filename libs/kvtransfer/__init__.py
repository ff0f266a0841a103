"""Moves bytes between registered memory of two processes.

Owns memory registration, grants, the wire and its failures. Knows nothing of models or of what a
block means: it is given ranges of bytes. `Endpoint` is the way in; the transports live below it.
"""

from kvtransfer.device import DeviceMemory
from kvtransfer.endpoint import TRANSPORTS, Endpoint
from kvtransfer.errors import (
    ArrivalError,
    AuthError,
    BusyError,
    ChecksumError,
    DescriptorError,
    EndpointClosedError,
    FrameError,
    GrantError,
    PeerLostError,
    RangeError,
    RetryableTransferError,
    TransferError,
    TransferTimeout,
    TransportUnavailable,
    TransportUnfit,
)
from kvtransfer.grants import Access, Arrival, Grant
from kvtransfer.kinds import TransportKind
from kvtransfer.limits import SECRET_BYTES_MIN, TAG_BYTES_MAX, Limits
from kvtransfer.memory import Ranges, Region, RegisterableBuffer, checksum
from kvtransfer.peer import Peer
from kvtransfer.results import Transferred
from kvtransfer.shared_buffer import SharedBuffer
from kvtransfer.statistics import PeerStatistics, TransferCounters

__all__ = [
    "SECRET_BYTES_MIN",
    "TAG_BYTES_MAX",
    "TRANSPORTS",
    "Access",
    "Arrival",
    "ArrivalError",
    "AuthError",
    "BusyError",
    "ChecksumError",
    "DescriptorError",
    "DeviceMemory",
    "Endpoint",
    "EndpointClosedError",
    "FrameError",
    "Grant",
    "GrantError",
    "Limits",
    "Peer",
    "PeerLostError",
    "PeerStatistics",
    "RangeError",
    "Ranges",
    "Region",
    "RegisterableBuffer",
    "RetryableTransferError",
    "SharedBuffer",
    "TransferCounters",
    "TransferError",
    "TransferTimeout",
    "Transferred",
    "TransportKind",
    "TransportUnavailable",
    "TransportUnfit",
    "checksum",
]
