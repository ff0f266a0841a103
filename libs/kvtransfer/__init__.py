"""Moves bytes between registered memory of two processes.

Owns memory registration, grants, the wire and its failures. Knows nothing of models or of what a
block means: it is given ranges of bytes. `Endpoint` is the way in; the transports live below it.
"""

from kvtransfer.endpoint import Endpoint
from kvtransfer.errors import (
    AuthError,
    BusyError,
    DescriptorError,
    EndpointClosedError,
    FrameError,
    GrantError,
    PeerLostError,
    RangeError,
    RetryableTransferError,
    TransferError,
    TransferTimeout,
)
from kvtransfer.grants import Access, Grant
from kvtransfer.limits import SECRET_BYTES_MIN, Limits
from kvtransfer.memory import Ranges, Region, RegisterableBuffer, checksum
from kvtransfer.peer import Peer
from kvtransfer.statistics import PeerStatistics

__all__ = [
    "SECRET_BYTES_MIN",
    "Access",
    "AuthError",
    "BusyError",
    "DescriptorError",
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
    "TransferError",
    "TransferTimeout",
    "checksum",
]
