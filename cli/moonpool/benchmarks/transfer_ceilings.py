"""What this machine allows a transfer: memcpy, blocking TCP between two processes, and round trips.

Moves the bytes of the same walks as the transfers do. The other process (`python -m` this module) gets one
end of a TCP connection and of a pair of unix sockets, and is asked over the socket itself.
"""

import json
import socket
import struct
import subprocess
import sys
import threading
import time
from typing import Any, Self

from moonpool.benchmarks.transfer_plan import MEMORY_BYTES, Memory, Row, Sample, Side, Walk, touched_memory

ANSWER_S_MAX = 60.0
EXIT_S_MAX = 5.0
READY = b"r"
ACKNOWLEDGED = b"a"
_LENGTH = struct.Struct("!I")


class Ceilings:
    """The near end. Blocking: each method takes as long as what it measures."""

    def __init__(self, memory_bytes: int = MEMORY_BYTES) -> None:
        near_tcp, far_tcp = _tcp_pair()
        near_unix, far_unix = socket.socketpair()
        with far_tcp, far_unix:
            fds = (far_tcp.fileno(), far_unix.fileno())
            module = f"{__package__}.transfer_ceilings"
            self._process = subprocess.Popen(
                [sys.executable, "-m", module, str(memory_bytes), *map(str, fds)], pass_fds=fds
            )
        self._tcp, self._unix = near_tcp, near_unix
        for sock in (near_tcp, near_unix):
            sock.settimeout(ANSWER_S_MAX)
        self._source = touched_memory(memory_bytes)
        self._target = touched_memory(memory_bytes)

    def memcpy(self, row: Row, first: int, calls: int) -> Sample:
        """Calls by one thread, range by range, within this process."""
        walk = Walk(row, len(self._source))
        views = [
            list(
                zip(
                    _views(self._source, walk, Side.CALLER, call),
                    _views(self._target, walk, Side.OWNER, call),
                    strict=True,
                )
            )
            for call in range(first, first + calls)
        ]
        call_s = []
        started_s = time.perf_counter()
        for pairs in views:
            call_started_s = time.perf_counter()
            for source, target in pairs:
                target[:] = source
            call_s.append(time.perf_counter() - call_started_s)
        return Sample(time.perf_counter() - started_s, tuple(call_s))

    def tcp(self, row: Row, first: int, calls: int, *, each_acknowledged: bool) -> Sample:
        """Calls over one connection: `sendall` of each range, `recv_into` where it belongs. The
        other side answers after each call, or once after the last."""
        walk = Walk(row, len(self._source))
        prepared = [_views(self._source, walk, Side.CALLER, call) for call in range(first, first + calls)]
        about = {"row": [row.ranges, row.range_bytes], "first": first, "calls": calls}
        self._ask(self._tcp, do="receive", each_acknowledged=each_acknowledged, **about)
        call_s = []
        started_s = time.perf_counter()
        for views in prepared:
            call_started_s = time.perf_counter()
            for view in views:
                self._tcp.sendall(view)
            if each_acknowledged:
                _expect(self._tcp, ACKNOWLEDGED)
            call_s.append(time.perf_counter() - call_started_s)
        if not each_acknowledged:
            _expect(self._tcp, ACKNOWLEDGED)
        return Sample(time.perf_counter() - started_s, tuple(call_s))

    def tcp_echo(self, message_bytes: int, count: int) -> Sample:
        """Round trips of a message over TCP."""
        return self._echo(self._tcp, message_bytes, count)

    def unix_echo(self, message_bytes: int, count: int) -> Sample:
        """Round trips of a message over a unix socket."""
        return self._echo(self._unix, message_bytes, count)

    def close(self) -> None:
        self._tcp.close()
        self._unix.close()
        try:
            self._process.wait(EXIT_S_MAX)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _echo(self, sock: socket.socket, message_bytes: int, count: int) -> Sample:
        message = b"m" * message_bytes
        answer = memoryview(bytearray(message_bytes))
        self._ask(sock, do="echo", message_bytes=message_bytes, count=count)
        call_s = []
        started_s = time.perf_counter()
        for _ in range(count):
            call_started_s = time.perf_counter()
            sock.sendall(message)
            _receive_into(sock, answer)
            call_s.append(time.perf_counter() - call_started_s)
        return Sample(time.perf_counter() - started_s, tuple(call_s))

    @staticmethod
    def _ask(sock: socket.socket, **question: object) -> None:
        """Returns when the other side has prepared what it was asked for."""
        data = json.dumps(question).encode()
        sock.sendall(_LENGTH.pack(len(data)) + data)
        _expect(sock, READY)


def _tcp_pair() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        near = socket.create_connection(listener.getsockname())
        far, _ = listener.accept()
    for sock in (near, far):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return near, far


def _views(memory: Memory, walk: Walk, side: Side, call: int) -> list[memoryview]:
    view, range_bytes = memory.data, walk.row.range_bytes
    return [view[offset : offset + range_bytes] for offset in walk.offsets(side, call).tolist()]


def _receive_into(sock: socket.socket, view: memoryview) -> None:
    """Raises EOFError if the other side closes."""
    while view:
        count = sock.recv_into(view)
        if not count:
            raise EOFError
        view = view[count:]


def _expect(sock: socket.socket, byte: bytes) -> None:
    answer = bytearray(1)
    _receive_into(sock, memoryview(answer))
    assert answer == byte


def serve(sock: socket.socket, memory: Memory) -> None:
    """The far end of one socket, until the near one is closed."""
    header = memoryview(bytearray(_LENGTH.size))
    try:
        while True:
            _receive_into(sock, header)
            question = memoryview(bytearray(_LENGTH.unpack(header)[0]))
            _receive_into(sock, question)
            _obey(sock, memory, json.loads(bytes(question)))
    except (EOFError, ConnectionError):
        return


def _obey(sock: socket.socket, memory: Memory, question: dict[str, Any]) -> None:
    match question:
        case {"do": "echo", "message_bytes": message_bytes, "count": count}:
            message = memoryview(bytearray(message_bytes))
            sock.sendall(READY)
            for _ in range(count):
                _receive_into(sock, message)
                sock.sendall(message)
        case {"do": "receive", "row": [ranges, range_bytes], "first": first, "calls": count}:
            walk = Walk(Row(ranges, range_bytes), len(memory))
            calls = [_views(memory, walk, Side.OWNER, call) for call in range(first, first + count)]
            sock.sendall(READY)
            for views in calls:
                for view in views:
                    _receive_into(sock, view)
                if question["each_acknowledged"]:
                    sock.sendall(ACKNOWLEDGED)
            if not question["each_acknowledged"]:
                sock.sendall(ACKNOWLEDGED)


def main(arguments: list[str]) -> None:
    memory = touched_memory(int(arguments[0]))
    threads = [
        threading.Thread(target=serve, args=(socket.socket(fileno=int(fd)), memory)) for fd in arguments[1:]
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


if __name__ == "__main__":
    main(sys.argv[1:])
