"""What can go wrong with a transfer, by who can do something about it.

`RetryableTransferError`: the same call may succeed if it is made again (on a new connection).
Every other `TransferError` fails the same way each time: the caller or the peer is wrong.
"""

import numpy as np
import numpy.typing as npt


class TransferError(Exception):
    """Base of everything this library raises on purpose.

    `landed` names the stretches (start, count), in bytes of the failed call's order, that are known to have
    landed; nothing is known of the rest. On the error that a call of `Peer` raises, `landed_ranges` says the
    same for each remote range as the caller passed it: True where all of it landed. Other parts of a call
    that is not `settled` were given up when this one failed: their bytes may still be on their way.
    """

    retryable: bool = False
    settled: bool = True
    landed: tuple[tuple[int, int], ...] = ()
    landed_ranges: npt.NDArray[np.bool_] | None = None


class RetryableTransferError(TransferError):
    """The call failed for a reason that may pass."""

    retryable = True


class PeerLostError(RetryableTransferError):
    """The peer is not reachable, died, or closed the connection in the middle."""


class TransferTimeout(RetryableTransferError):
    """The deadline of the call passed. Bytes of a write may have landed in part."""


class BusyError(RetryableTransferError):
    """A named limit on work in flight is reached, here or at the peer."""


class ChecksumError(RetryableTransferError):
    """What arrived is not what was sent."""


class TransportUnfit(RetryableTransferError):
    """This transport cannot serve this memory; another one of the pair can."""


class PieceTooLarge(TransferError):
    """The owner's memory is that of a device: it takes no more than `piece_bytes_max` bytes in one request.
    `Peer` makes the call in pieces then."""

    def __init__(self, text: str, piece_bytes_max: int = 0) -> None:
        super().__init__(text)
        self.piece_bytes_max = piece_bytes_max


class GrantError(TransferError):
    """The grant does not cover this access: unknown, revoked, another peer, generation or range."""


class ArrivalError(TransferError):
    """The bytes of a tagged write are there, but the owner's callback for its tag failed."""


class RangeError(TransferError):
    """Ranges are malformed, leave their region, or the two sides differ in length."""


class AuthError(TransferError):
    """The peer does not know the cluster secret, or does not believe that we do."""


class FrameError(TransferError):
    """The peer sent what the protocol does not allow; the connection is closed."""


class DescriptorError(TransferError):
    """A descriptor does not parse or names no transport that this endpoint speaks."""


class TransportUnavailable(TransferError):
    """This machine lacks what the transport needs; the text says what."""


class EndpointClosedError(TransferError):
    """The endpoint is closed or was never started."""
