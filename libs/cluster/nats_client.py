"""nats-py's client with a shorter way for each message, in and out.

As it comes, a received message waits in its subscription's queue for a task that calls back, and what is
sent is written by another task: two turns of the event loop and some 20 µs a message, of which a request to
the cluster has a dozen. Here a message goes straight to whoever takes it, where nothing waits before it, and
what is sent within one turn of the loop is written at its end. Whatever is not as usual (somebody is behind,
the socket is full, the connection is lost) takes the client's own way.

Overrides what nats-py 2.16 keeps to itself; the bus's contract tests run over all of it.
"""

import asyncio
import contextlib
from collections.abc import Callable

from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription
from nats.aio.transport import TcpTransport

TakeNow = Callable[[Msg], bool]
"""False where the message has to wait for its turn."""


class DirectClient(Client):
    def __init__(self) -> None:
        super().__init__()
        self._takers: dict[int, TakeNow] = {}
        self._writing: asyncio.Handle | None = None

    def take_directly(self, subscription: Subscription, take: TakeNow) -> None:
        """`take` each message of `subscription` as it comes; where it returns False the message waits for the
        subscription's callback, and those behind it do."""
        self._takers[subscription._id] = take

    def forget(self, subscription: Subscription) -> None:
        self._takers.pop(subscription._id, None)

    async def _process_msg(self, sid: int, subject: bytes, reply: bytes, data: bytes, headers: bytes) -> None:
        take = self._takers.get(sid)
        subscription = self._subs.get(sid)
        if take is not None and subscription is not None and subscription._pending_queue.empty():
            parsed = await self._process_headers(headers) if headers else None
            message = Msg(self, subject.decode(), reply.decode(), data, parsed, _sid=sid)
            if take(message):
                return
        await super()._process_msg(sid, subject, reply, data, headers)

    async def _send_publish(  # type: ignore[override]
        self, subject: str, reply: str, payload: bytes, payload_size: int, headers: bytes | None
    ) -> None:
        """`headers` as they go over the wire."""
        if headers is None:
            head = f"PUB {subject} {reply} {payload_size}\r\n".encode()
            command = b"".join((head, payload, b"\r\n"))
        else:
            head = f"HPUB {subject} {reply} {len(headers)} {len(headers) + payload_size}\r\n".encode()
            command = b"".join((head, headers, payload, b"\r\n"))
        await self._send_command(command)
        await self._flush_pending()

    async def _flush_pending(self, force_flush: bool = False) -> None:
        if not force_flush and self.is_connected and self._socket_is_empty():
            if self._writing is None:
                self._writing = asyncio.get_running_loop().call_soon(self._write)
        elif force_flush or self._flush_queue is None or self._flush_queue.empty():
            # The flusher waits for the socket; one wish waiting for it is enough.
            await super()._flush_pending(force_flush)

    def _write(self) -> None:
        self._writing = None
        if not self._pending or not self.is_connected or self._transport is None:
            return
        pending, self._pending, self._pending_data_size = self._pending, [], 0
        # Where the connection is lost the reader learns of it, and this is lost with it.
        with contextlib.suppress(OSError, RuntimeError):
            self._transport.write(pending[0] if len(pending) == 1 else b"".join(pending))

    def _socket_is_empty(self) -> bool:
        """All that was written before is with the kernel."""
        transport = self._transport
        if not isinstance(transport, TcpTransport) or transport._io_writer is None:
            return False
        return transport._io_writer.transport.get_write_buffer_size() == 0
