"""Frames and file descriptors on a unix socket, in the event loop.

Owns the socket, framing and the descriptors on their way. Knows nothing of what the frames mean.
Descriptors arrive no later than the first byte of the frame that was sent with them, so they wait in a
queue until a frame takes them.
"""

import array
import asyncio
import logging
import os
import socket
import time
from collections import deque
from collections.abc import Mapping
from typing import Protocol

from kvtransfer.errors import FrameError, PeerLostError, TransferError
from kvtransfer.stream.frames import HEADER_BYTES, Header, parse_header

_RECEIVE_BYTES = 64 << 10
DESCRIPTORS_WAITING_MAX = 8
"""Descriptors received and not taken by a frame yet; a peer sends one with each frame that has one."""
BACKLOG_BYTES_MAX = 1 << 20
"""With more than this to send, an owner's side does not read the next request."""
_DESCRIPTOR_BYTES = array.array("i").itemsize
_ANCILLARY_BYTES = socket.CMSG_SPACE(DESCRIPTORS_WAITING_MAX * _DESCRIPTOR_BYTES)
_CLOSE_ON_EXEC = int(socket.MSG_CMSG_CLOEXEC)
_CUT = int(socket.MSG_CTRUNC)
"""As plain numbers: an enum's `&` costs as much as the rest of receiving a frame."""

_log = logging.getLogger(__name__)


class ChannelHandler(Protocol):
    def on_frame(self, header: Header, body: bytes) -> None:
        """A whole frame. TransferError closes the channel."""
        ...

    def on_closed(self, error: TransferError) -> None:
        """Called once, last."""
        ...


class Channel:
    """Owns the socket from its making to `close`; receives from `start` on."""

    def __init__(
        self,
        sock: socket.socket,
        peer: str,
        handler: ChannelHandler,
        accepted: Mapping[int, int],
        *,
        waits_for_room: bool,
    ) -> None:
        """`waits_for_room`: read no further request while the answers are not taken (BACKLOG_BYTES_MAX)."""
        self.peer = peer
        self._sock = sock
        self._handler = handler
        self._accepted = accepted
        self._waits_for_room = waits_for_room
        self._loop = asyncio.get_running_loop()
        self._staging = memoryview(bytearray(_RECEIVE_BYTES))
        self._rest = bytearray()
        self._descriptors: deque[int] = deque()
        self._backlog: deque[tuple[memoryview, int | None]] = deque()
        self._backlog_bytes = 0
        self._reading = False
        self.closed = False
        self.progress_at_s = time.monotonic()

    def start(self) -> None:
        if not self.closed:
            self._read(True)

    def send(self, frame: bytes, descriptor: int | None = None) -> None:
        """Now, or when there is room. The descriptor stays the caller's."""
        if self.closed:
            return
        try:
            if not self._backlog:
                sent = self._send(memoryview(frame), descriptor)
                if sent == len(frame):
                    return
                self._wait_with(memoryview(frame)[sent:], descriptor if sent == 0 else None)
                self._loop.add_writer(self._sock, self._on_writable)
            else:
                self._wait_with(memoryview(frame), descriptor)
        except OSError as error:
            self._lost(error)

    def take_descriptor(self) -> int:
        """The one that came with the current frame; the caller's to close. FrameError if there is none."""
        if not self._descriptors:
            raise FrameError("a frame without the descriptor that belongs to it")
        return self._descriptors.popleft()

    def close(self, error: TransferError) -> None:
        """At once; again is harmless."""
        if self.closed:
            return
        self.closed = True
        self._read(False)
        if self._backlog:
            self._loop.remove_writer(self._sock)
        self._sock.close()
        for descriptor in self._descriptors:
            os.close(descriptor)
        for _, waiting in self._backlog:
            if waiting is not None:
                os.close(waiting)
        self._descriptors.clear()
        self._backlog.clear()
        self._handler.on_closed(error)

    def _read(self, wanted: bool) -> None:
        if wanted and not self._reading:
            self._loop.add_reader(self._sock, self._on_readable)
        elif self._reading and not wanted:
            self._loop.remove_reader(self._sock)
        self._reading = wanted

    def _lost(self, error: OSError) -> None:
        self.close(PeerLostError(f"connection to {self.peer} lost: {error}"))

    def _on_readable(self) -> None:
        try:
            self._receive()
        except TransferError as error:
            self.close(error)
        except OSError as error:
            self._lost(error)
        except Exception as error:
            _log.exception("connection to %s fails on a defect of our own", self.peer)
            self.close(PeerLostError(f"connection to {self.peer} failed: {error!r}"))

    def _receive(self) -> None:
        """One system call's worth; the loop calls again if there is more."""
        try:
            count, ancillary, flags, _ = self._sock.recvmsg_into(
                [self._staging], _ANCILLARY_BYTES, _CLOSE_ON_EXEC
            )
        except (BlockingIOError, InterruptedError):
            return
        if ancillary or flags & _CUT:
            self._keep_descriptors(ancillary, flags)
        if count == 0:
            raise PeerLostError(f"{self.peer} closed the connection")
        self.progress_at_s = time.monotonic()
        if not self._rest:
            used = self._parse(self._staging[:count])
            self._rest += self._staging[used:count]
            return
        self._rest += self._staging[:count]
        with memoryview(self._rest) as data:
            used = self._parse(data)
        del self._rest[:used]

    def _parse(self, data: memoryview) -> int:
        """Hand over the whole frames in `data`; returns how many bytes they are."""
        at = 0
        while len(data) - at >= HEADER_BYTES and not self.closed:
            header = parse_header(data[at : at + HEADER_BYTES], self._accepted)
            end = at + HEADER_BYTES + header.body_bytes
            if end > len(data):
                break
            self._handler.on_frame(header, bytes(data[at + HEADER_BYTES : end]))
            at = end
        return at

    def _keep_descriptors(self, ancillary: list[tuple[int, int, bytes]], flags: int) -> None:
        came = 0
        for level, kind, data in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                whole = data[: len(data) // _DESCRIPTOR_BYTES * _DESCRIPTOR_BYTES]
                self._descriptors.extend(array.array("i", whole))
                came += len(whole) // _DESCRIPTOR_BYTES
        if flags & _CUT and came < DESCRIPTORS_WAITING_MAX:
            raise PeerLostError(f"a descriptor of {self.peer} was lost: this process may open no more files")
        if flags & _CUT or len(self._descriptors) > DESCRIPTORS_WAITING_MAX:
            raise FrameError(f"more than {DESCRIPTORS_WAITING_MAX} descriptors that belong to no frame")

    def _send(self, data: memoryview, descriptor: int | None) -> int:
        try:
            if descriptor is None:
                return self._sock.send(data)
            rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [descriptor]))
            return self._sock.sendmsg([data], [rights])
        except (BlockingIOError, InterruptedError):
            return 0

    def _wait_with(self, data: memoryview, descriptor: int | None) -> None:
        # The caller may close its descriptor before there is room.
        self._backlog.append((data, None if descriptor is None else os.dup(descriptor)))
        self._backlog_bytes += len(data)
        if self._waits_for_room and self._backlog_bytes > BACKLOG_BYTES_MAX:
            self._read(False)

    def _on_writable(self) -> None:
        try:
            while self._backlog:
                data, descriptor = self._backlog[0]
                sent = self._send(data, descriptor)
                if sent == 0:
                    return
                self.progress_at_s = time.monotonic()
                self._backlog_bytes -= sent
                if descriptor is not None:
                    os.close(descriptor)
                if sent < len(data):
                    self._backlog[0] = (data[sent:], None)
                    return
                self._backlog.popleft()
        except OSError as error:
            self._lost(error)
            return
        self._loop.remove_writer(self._sock)
        if self._waits_for_room:
            self._read(True)
