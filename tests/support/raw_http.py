"""An HTTP client that may do what real ones must not: send half a request, read nothing, go at any byte."""

import asyncio
import json
import socket
import struct
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Self
from urllib.parse import urlsplit

CONNECT_S_MAX = 20.0
ANSWER_S_MAX = 60.0
HEAD_BYTES_MAX = 64 * 1024
EVENT_BYTES_MAX = 4 * 1024 * 1024
SLOW_SEGMENT_BYTES = 536
DATA = b"data: "
DONE = b"[DONE]"


def post_bytes(path: str, body: bytes | dict[str, Any], *headers: str) -> bytes:
    """A whole POST, with its length."""
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    lines = [
        f"POST {path} HTTP/1.1",
        *("Host: gateway", "Content-Type: application/json", f"Content-Length: {len(content)}"),
        *headers,
    ]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + content


@dataclass(frozen=True, slots=True)
class RawAnswer:
    """`headers` by name in lower case."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


class RawClient:
    """One connection. Leave it by `hang_up` or `reset`."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    @classmethod
    async def connect(cls, url: str, *, receive_bytes: int | None = None) -> Self:
        """`receive_bytes`: how much the kernel takes for a client that does not read. Its segments are small
        then, so that the kernel at the other end keeps little for it either."""
        parts = urlsplit(url)
        made = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        if receive_bytes is not None:
            made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
            made.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, SLOW_SEGMENT_BYTES)
        made.setblocking(False)
        try:
            async with asyncio.timeout(CONNECT_S_MAX):
                address = (parts.hostname or "", parts.port or 80)
                await asyncio.get_running_loop().sock_connect(made, address)
                limit = receive_bytes if receive_bytes is not None else EVENT_BYTES_MAX
                return cls(*await asyncio.open_connection(sock=made, limit=limit))
        except BaseException:
            made.close()
            raise

    async def send(self, data: bytes) -> None:
        self.writer.write(data)
        async with asyncio.timeout(ANSWER_S_MAX):
            await self.writer.drain()

    async def head(self) -> tuple[int, dict[str, str]]:
        """Status and headers, once they are there."""
        async with asyncio.timeout(ANSWER_S_MAX):
            raw = await self.reader.readuntil(b"\r\n\r\n")
        first, *lines = raw.decode("latin-1").split("\r\n")[:-2]
        named = (line.partition(":") for line in lines)
        return int(first.split()[1]), {name.lower(): value.strip() for name, _, value in named}

    async def answer(self) -> RawAnswer:
        """A whole answer with a length."""
        status, headers = await self.head()
        async with asyncio.timeout(ANSWER_S_MAX):
            if headers.get("transfer-encoding") == "chunked":
                return RawAnswer(status, headers, await self._chunks())
            body = await self.reader.readexactly(int(headers.get("content-length", "0")))
        return RawAnswer(status, headers, body)

    async def event(self) -> dict[str, Any] | None:
        """The next event of a stream; None at its end."""
        async with asyncio.timeout(ANSWER_S_MAX):
            while (line := await self.reader.readline()).endswith(b"\n"):
                if line.startswith(DATA):
                    content = line.removeprefix(DATA).strip()
                    return None if content == DONE else json.loads(content)
        raise ConnectionResetError("the stream ended without [DONE]")

    async def events(self) -> tuple[list[dict[str, Any]], bool]:
        """All that come, and whether the stream ended as one does that is whole."""
        found: list[dict[str, Any]] = []
        with suppress(ConnectionError):
            while (event := await self.event()) is not None:
                found.append(event)
            return found, True
        return found, False

    async def ended(self, timeout_s: float) -> bool:
        """Whether the other side ends the connection within that time, whatever it says before."""
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                try:
                    while await self.reader.read(EVENT_BYTES_MAX):
                        pass
                except ConnectionError:
                    pass
                return True
        return False

    async def hang_up(self) -> None:
        """The usual way to go."""
        self.writer.close()
        with suppress(OSError):
            await self.writer.wait_closed()

    async def reset(self) -> None:
        """Go as a process does that is killed: the other side finds a reset connection."""
        made = self.writer.get_extra_info("socket")
        made.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.writer.transport.abort()

    async def _chunks(self) -> bytes:
        body = b""
        while size := int(await self.reader.readline(), 16):
            body += (await self.reader.readexactly(size + 2))[:-2]
        await self.reader.readline()
        return body


async def post(url: str, path: str, body: bytes | dict[str, Any], *headers: str) -> RawAnswer:
    """One request on a connection of its own."""
    client = await RawClient.connect(url)
    try:
        await client.send(post_bytes(path, body, *headers))
        return await client.answer()
    finally:
        await client.hang_up()
