"""One authenticated socket in the event loop: moves bytes between it, an inbox and an outbox.

Each time the loop calls, at most `turn_bytes` move in one direction; then others have their turn.
"""

import asyncio
import logging
import socket
import time
from collections.abc import Mapping
from typing import Protocol

from kvtransfer.errors import FrameError, PeerLostError, TransferError
from kvtransfer.stream.inbox import FrameHandler, Inbox
from kvtransfer.stream.outbox import Outbox, Outgoing
from kvtransfer.stream.vectors import Vectors

RECEIVES_PER_TURN_MAX = 64
"""A peer that sends byte by byte gets no more of the loop than others."""

EARLY_RECEIVES_MAX = 8
"""Receives of a caller between two turns of the loop: with small calls about a millisecond."""

LOW_WATER_BYTES_MIN = 128 << 10
"""Of a payload that has less to come we hear at each segment."""

LOW_WATER_BYTES_MAX = 512 << 10
"""Bytes of a payload that may wait in the kernel before we hear of them. A peer that sends less than this in
`stall_s_max` counts as silent."""

FRAMES_WAITING_MAX = 4096
"""Frames that the peer does not take; honest peers have far fewer requests open."""

_log = logging.getLogger(__name__)


class ConnectionHandler(FrameHandler, Protocol):
    """What the caller's and the owner's side do with a connection."""

    def on_sent(self, outgoing: Outgoing) -> None:
        """All its bytes are with the kernel."""
        ...

    def on_closed(self, error: TransferError) -> None:
        """Called once, last."""
        ...


class Connection:
    """Owns the socket from `start` to `close`."""

    def __init__(
        self,
        sock: socket.socket,
        peer: str,
        handler: ConnectionHandler,
        accepted: Mapping[int, int],
        turn_bytes: int,
    ) -> None:
        self.peer = peer
        self._loop = asyncio.get_running_loop()
        self._sock = sock
        self._handler = handler
        self._turn_bytes = turn_bytes
        self._inbox = Inbox(handler, accepted)
        self._outbox = Outbox(turn_bytes)
        self._writer_armed = False
        self._in_turn = False
        self._early_left = EARLY_RECEIVES_MAX
        self._low_water = 1
        self.closed = False
        self.progress_at_s = time.monotonic()

    def start(self) -> None:
        self._loop.add_reader(self._sock, self._on_readable)

    def await_progress(self) -> None:
        """A call begins to wait where none did: the peer's silence counts from now."""
        self.progress_at_s = time.monotonic()

    def send_frame(self, frame: bytes) -> None:
        """Raises FrameError in a turn, or closes outside of one, if the peer does not read its frames."""
        if self._outbox.frames_waiting >= FRAMES_WAITING_MAX:
            error = FrameError(f"{self.peer} leaves {FRAMES_WAITING_MAX} frames unread")
            if self._in_turn:
                raise error
            self.close(error)
        elif not self.closed:
            self._outbox.add_frame(frame)
            # Within a turn the flush at its end takes all frames together; while the socket is full the
            # loop will call.
            if not self._in_turn and not self._writer_armed:
                self._turn(receiving=False)

    def send(self, outgoing: Outgoing) -> None:
        if not self.closed:
            self._outbox.add(outgoing)
            if not self._in_turn and not self._writer_armed:
                self._turn(receiving=False)

    def receive_early(self) -> None:
        """Take in what is there already, without the way through the loop. A caller that sent may find its
        answer: on one core the other process had its turn in the middle of our send. A few times only
        between two turns of the loop, so that calls that end at once do not keep others from theirs."""
        if self._early_left and not (self._in_turn or self._writer_armed or self.closed):
            self._early_left -= 1
            self._turn(receiving=True)

    def withdraw(self, outgoing: Outgoing) -> int:
        """From now on no byte of its memory is read. Returns how many left before."""
        return self._outbox.withdraw(outgoing)

    def close(self, error: TransferError) -> None:
        """Close at once; again is harmless."""
        if self.closed:
            return
        self.closed = True
        self._loop.remove_reader(self._sock)
        if self._writer_armed:
            self._loop.remove_writer(self._sock)
        self._inbox.drop()
        self._outbox.drop()
        self._sock.close()
        self._handler.on_closed(error)

    def _on_readable(self) -> None:
        self._early_left = EARLY_RECEIVES_MAX
        self._turn(receiving=True)

    def _on_writable(self) -> None:
        # Room in a full socket: the peer's kernel took something. What our kernel takes says nothing of it.
        self.progress_at_s = time.monotonic()
        self._turn(receiving=False)

    def _turn(self, receiving: bool) -> None:
        """Receive or not, and send what waits; any error in it ends this connection only."""
        self._in_turn = True
        try:
            if receiving:
                is_drained = self._receive()
                if not self.closed:
                    self._await_many(is_drained)
            # While the socket is full the loop says when it takes more.
            if not self.closed and not (receiving and self._writer_armed):
                self._flush()
        except TransferError as error:
            self.close(error)
        except OSError as error:
            self.close(PeerLostError(f"connection to {self.peer} lost: {error}"))
        except Exception as error:
            _log.exception("connection to %s fails on a defect of our own", self.peer)
            self.close(PeerLostError(f"connection to {self.peer} failed: {error!r}"))
        finally:
            self._in_turn = False

    def _receive(self) -> bool:
        """Whether all that was there is taken in."""
        left = self._turn_bytes
        for _ in range(RECEIVES_PER_TURN_MAX):
            if left <= 0 or self.closed:
                return False
            try:
                # Where bytes may land is asked and the bytes are received in one step: nothing comes between.
                count, room = self._receive_into(self._inbox.pieces(left))
            except (BlockingIOError, InterruptedError):
                return True
            if count == 0:
                raise PeerLostError(f"{self.peer} closed the connection")
            self.progress_at_s = time.monotonic()
            self._inbox.received(count)
            # In the middle of a payload more has come meanwhile, and to ask again costs less than a turn.
            if count < room and not self._inbox.in_payload:
                return True
            left -= count
        return False

    def _await_many(self, is_drained: bool) -> None:
        """Of a large payload the kernel wakes us once a good part is there, not at each segment."""
        due_bytes = self._inbox.payload_due_bytes if is_drained else 0
        low_water = min(due_bytes, LOW_WATER_BYTES_MAX) if due_bytes >= LOW_WATER_BYTES_MIN else 1
        if low_water != self._low_water:
            self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, low_water)
            self._low_water = low_water

    def _receive_into(self, pieces: list[memoryview] | Vectors) -> tuple[int, int]:
        """How many bytes came, and how many could have."""
        if isinstance(pieces, Vectors):
            return pieces.receive(self._sock.fileno()), pieces.total_bytes
        if len(pieces) == 1:
            (piece,) = pieces
            return self._sock.recv_into(piece), len(piece)
        return self._sock.recvmsg_into(pieces)[0], sum(map(len, pieces))

    def _flush(self) -> None:
        left = self._turn_bytes
        while not self.closed:
            if self._outbox.empty:
                if self._writer_armed:
                    self._arm_writer(False)
                return
            if left <= 0:
                break
            try:
                count = self._send_from(self._outbox.pieces())
            except (BlockingIOError, InterruptedError):
                break
            left -= count
            for outgoing in self._outbox.sent(count):
                self._handler.on_sent(outgoing)
        self._arm_writer(True)

    def _send_from(self, pieces: list[memoryview] | Vectors) -> int:
        if isinstance(pieces, Vectors):
            return pieces.send(self._sock.fileno())
        if len(pieces) == 1:
            return self._sock.send(pieces[0], socket.MSG_MORE if self._outbox.payload_follows else 0)
        return self._sock.sendmsg(pieces)

    def _arm_writer(self, armed: bool) -> None:
        if self.closed or armed == self._writer_armed:
            return
        self._writer_armed = armed
        if armed:
            self._loop.add_writer(self._sock, self._on_writable)
        else:
            self._loop.remove_writer(self._sock)
