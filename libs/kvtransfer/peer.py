"""Calls to one peer: what is checked, counted and bounded in time, whichever transport carries them."""

import asyncio
from collections.abc import Awaitable
from collections.abc import Set as AbstractSet
from copy import copy
from dataclasses import replace
from functools import partial

import numpy.typing as npt

from kvtransfer.admission import Admission
from kvtransfer.bounce import Bounce
from kvtransfer.choice import NONE
from kvtransfer.deadline import Deadline
from kvtransfer.descriptor import Descriptor
from kvtransfer.device import DeviceRegion
from kvtransfer.errors import (
    ChecksumError,
    PieceTooLarge,
    RangeError,
    TransferError,
    TransferTimeout,
    TransportUnfit,
)
from kvtransfer.kinds import TransportKind
from kvtransfer.limits import REGION_BYTES_MAX, TAG_BYTES_MAX, TOKEN_BYTES_MAX, Limits
from kvtransfer.lines import Lines
from kvtransfer.memory import Region, checked_and_summed
from kvtransfer.piecewise import Piece, in_pieces
from kvtransfer.results import Transferred, landed_ranges
from kvtransfer.statistics import PeerStatistics, Statistics
from kvtransfer.transport import Call, DirectLink, Link, LocalMemory

PIECES_KNOWN_MAX = 1024
"""Grants of which is remembered that they want pieces; of more the next call learns it again."""


class Peer:
    """Made by `Endpoint.connect`. Calls may run at once, up to the endpoint's limits; the rest wait.

    Each call raises, besides what is named there: RangeError for malformed arguments, GrantError if the
    peer refuses, TransferTimeout at the deadline, BusyError at a limit, PeerLostError if the link breaks or
    no transport is to be tried before the deadline. A call is never repeated by itself: one whose transport
    fails ends with a retryable error, and made again it goes over the next transport. A call that fails or
    is cancelled touches no local memory afterwards. Of a failed write any part may have landed, or zeros in
    its place; the error's `landed_ranges` names what is known to have.
    """

    def __init__(
        self,
        descriptor: Descriptor,
        lines: Lines,
        bounce: Bounce,
        limits: Limits,
        statistics: Statistics,
    ) -> None:
        self.descriptor = descriptor
        self._statistics = statistics
        self._admission = Admission(limits)
        self._lines = lines
        self._bounce = bounce
        self._piece_bytes: dict[str, int] = {}
        self._loop = asyncio.get_running_loop()

    @property
    def name(self) -> str:
        return self.descriptor.name

    @property
    def idle(self) -> bool:
        """No call is running or waiting."""
        return self._admission.idle

    def statistics(self) -> PeerStatistics:
        """The counters of this peer at this moment."""
        return self._statistics.peer(self.name)

    async def write(
        self,
        region: Region,
        local: npt.ArrayLike,
        grant_token: str,
        remote: npt.ArrayLike,
        *,
        timeout_s: float,
        tag: bytes = b"",
        verify: bool = False,
    ) -> Transferred:
        """Copy the `local` ranges of `region` to the `remote` ranges of the granted region.

        The two lists are the same bytes in the same order, cut as each side likes. Returns once all of
        them are visible at the peer. A `tag`, at most TAG_BYTES_MAX bytes, is handed to the grant's
        `on_arrival` there, once, after all bytes, and never without them. `verify` compares the
        bytes that arrived with ours by their xxh3_128: ChecksumError.
        """
        if not isinstance(tag, bytes):
            raise RangeError(f"tag must be bytes, not {type(tag).__name__}")
        if len(tag) > TAG_BYTES_MAX:
            raise RangeError(f"tag has {len(tag)} bytes, at most {TAG_BYTES_MAX}")
        call = _checked_call(region, local, grant_token, remote, tag, verify)
        return await self._run(_Running(call, True), remote, timeout_s)

    async def read(
        self,
        region: Region,
        local: npt.ArrayLike,
        grant_token: str,
        remote: npt.ArrayLike,
        *,
        timeout_s: float,
        verify: bool = False,
    ) -> Transferred:
        """Copy the `remote` ranges of the granted region to the `local` ranges of `region`."""
        call = _checked_call(region, local, grant_token, remote, b"", verify)
        return await self._run(_Running(call, False), remote, timeout_s)

    async def ensure_link(self, timeout_s: float) -> None:
        """Connect now if there is no connection. Raises what a call raises."""
        deadline = Deadline(self._loop, self._loop.time() + timeout_s)
        try:
            self._lines.release(await self._lines.take(deadline.at_s))
        except asyncio.CancelledError as error:
            if not deadline.end():
                raise
            raise TransferTimeout(f"no connection to {self.name} within {timeout_s} s") from error
        finally:
            deadline.end()

    def close(self) -> None:
        """Break the connection for good; running calls fail with PeerLostError."""
        self._lines.close()

    async def wait_closed(self) -> None:
        """After `close`: until nothing of it runs any more."""
        await self._lines.wait_closed()

    async def _run(self, running: "_Running", remote: npt.ArrayLike, timeout_s: float) -> Transferred:
        """Within its time, counted, its error told by range."""
        if running.call.token in self._piece_bytes:
            running.call = replace(running.call, piece_bytes_max=self._piece_bytes[running.call.token])
        begin_s = self._loop.time()
        try:
            if timeout_s <= 0:
                raise TransferTimeout(f"timeout_s is {timeout_s}")
            await self._within(running, begin_s + timeout_s)
        except BaseException as error:
            counters = self._statistics.of(self.name, running.kind)
            counters.failures += 1
            counters.transfer_s += self._loop.time() - begin_s
            if not isinstance(error, TransferError):
                raise
            # The calls that fail with one link share its error, and each has ranges of its own.
            own = copy(error)
            own.landed_ranges = landed_ranges(remote, error.landed)
            raise own from error
        kind, payload_bytes = running.kind, running.call.memory.payload_bytes
        assert kind is not None
        counters = self._statistics.of(self.name, kind)
        counters.transfer_s += self._loop.time() - begin_s
        if running.write:
            counters.writes += 1
            counters.written_bytes += payload_bytes
        else:
            counters.reads += 1
            counters.read_bytes += payload_bytes
        return Transferred(payload_bytes, kind)

    async def _within(self, running: "_Running", deadline_s: float) -> None:
        """Waits for room, then carries it; a deadline that passes is a TransferTimeout."""
        payload_bytes = running.call.memory.payload_bytes
        deadline = Deadline(self._loop, deadline_s)
        entered = False
        try:
            if not self._admission.enter_now(payload_bytes):
                await self._admission.enter(payload_bytes)
            entered = True
            await self._carry(running, deadline)
        except asyncio.CancelledError as error:
            if not deadline.end():
                raise
            raise TransferTimeout(f"the call to {self.name} was not done in its time") from error
        finally:
            deadline.end()
            if entered:
                self._admission.leave(payload_bytes)

    async def _carry(self, running: "_Running", deadline: Deadline) -> None:
        """Over the best transport that serves this memory."""
        unfit: AbstractSet[TransportKind] = NONE
        while True:
            line = None if unfit else self._lines.take_now(self._loop.time())
            if line is None:
                line = await self._lines.take(deadline.at_s, unfit)
            running.kind = line.kind
            try:
                await self._move(line.link, running)
            except TransportUnfit as error:
                if error.settled or not running.write:
                    self._lines.release(line)
                else:  # its other parts must not land after what the next transport brings
                    self._lines.failed(line, error, distrusted=True, settled=False)
                unfit = unfit | {line.kind}
                if unfit >= set(self._lines.kinds):
                    raise
            except PieceTooLarge as error:
                # Nothing of it landed, nor will: the owner takes no byte before it said so.
                self._lines.release(line)
                if running.call.piece_bytes_max is not None:
                    raise
                self._make_in_pieces(running, error.piece_bytes_max)
            except BaseException as error:
                if deadline.expired:
                    line.link.close_if_stalled()
                answered = isinstance(error, TransferError) and error.settled and not line.link.closed
                self._lines.failed(
                    line,
                    error,
                    distrusted=isinstance(error, ChecksumError),
                    settled=answered or not running.write,
                )
                raise
            else:
                self._lines.carried(line)
                return

    def _move(self, link: Link, running: "_Running") -> Awaitable[None]:
        call = running.call
        if isinstance(call.memory.region, DeviceRegion) and not _is_direct(link, call):
            return self._bounce.write(link, call) if running.write else self._bounce.read(link, call)
        if call.piece_bytes_max is not None:
            return in_pieces(call, call.piece_bytes_max, partial(_move_piece, link, running))
        return link.write(call) if running.write else link.read(call)

    def _make_in_pieces(self, running: "_Running", piece_bytes_max: int) -> None:
        """This call and the next ones with its grant."""
        if len(self._piece_bytes) >= PIECES_KNOWN_MAX:
            del self._piece_bytes[next(iter(self._piece_bytes))]
        self._piece_bytes[running.call.token] = piece_bytes_max
        running.call = replace(running.call, piece_bytes_max=piece_bytes_max)


def _move_piece(link: Link, running: "_Running", piece: Piece) -> Awaitable[None]:
    call = piece.call(running.call)
    return link.write(call) if running.write else link.read(call)


def _is_direct(link: Link, call: Call) -> bool:
    """The link reaches the device's memory itself."""
    return isinstance(link, DirectLink) and link.takes(call)


class _Running:
    """A call on its way: `kind` is what carries it, once that is known."""

    __slots__ = ("call", "kind", "write")

    def __init__(self, call: Call, write: bool) -> None:
        self.call = call
        self.write = write
        self.kind: TransportKind | None = None


def _checked_call(
    region: Region, local: npt.ArrayLike, token: str, remote: npt.ArrayLike, tag: bytes, verify: bool
) -> Call:
    if not isinstance(region, Region):
        raise RangeError(f"region must be what Endpoint.register returned, not {type(region).__name__}")
    if not isinstance(token, str) or not token.isascii() or not 0 < len(token) <= TOKEN_BYTES_MAX:
        raise RangeError(f"grant_token must be a grant's token, 1 to {TOKEN_BYTES_MAX} ASCII characters")
    local_ranges, payload_bytes = checked_and_summed(local, region.region_bytes, "local")
    remote_ranges, remote_bytes = checked_and_summed(remote, REGION_BYTES_MAX, "remote")
    if remote_bytes != payload_bytes:
        raise RangeError(f"local has {payload_bytes} bytes, remote has {remote_bytes}")
    return Call(LocalMemory(region, local_ranges, payload_bytes), token, remote_ranges, tag, verify)
