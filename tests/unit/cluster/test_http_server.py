"""HTTP that is malformed, slow, too much or none at all, sent byte by byte to a real socket."""

import asyncio
import json
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from aiohttp import ClientSession, web
from tests.support.certificates import certificate

from cluster.admin import AdminServer, Health, listen
from cluster.errors import ConfigError
from cluster.http_options import HttpOptions
from cluster.http_server import HEADER_LINE_BYTES_MAX, HEADERS_MAX
from cluster.logs import Level, Logger
from cluster.metrics import ServiceMetrics
from cluster.tls import TlsFiles, server_context
from kvindex.core import InstanceId
from policy.core import Role

pytestmark = pytest.mark.unit

WAIT_S = 5.0
LARGE_BYTES = 32 << 20
"""More than kernels keep for a client."""
READY = Health(True, "", InstanceId("g-1"), 1, (Role.GATEWAY,), True, True, True)


def _form(status: int, message: str) -> tuple[bytes, str]:
    return json.dumps({"error": {"status": status, "message": message}}).encode(), "application/json"


OPTIONS = HttpOptions(
    error_form=_form,
    answer_headers=lambda request: {"x-request-id": request.headers.get("x-request-id", "made")},
    request_bytes_max=1000,
)


@dataclass
class Answer:
    status: int
    headers: dict[str, str]
    body: bytes
    rest: bytes

    @property
    def message(self) -> str:
        assert self.headers["content-type"].startswith("application/json")
        error = json.loads(self.body)["error"]
        assert error["status"] == self.status
        return str(error["message"])


async def _echo(request: web.Request) -> web.Response:
    return web.Response(body=await request.read())


async def _large(_: web.Request) -> web.Response:
    return web.Response(body=bytes(LARGE_BYTES))


async def _broken(_: web.Request) -> web.Response:
    raise RuntimeError("a bug")


@asynccontextmanager
async def _serving(options: HttpOptions = OPTIONS) -> AsyncIterator[int]:
    listener = listen("127.0.0.1", 0)
    routes = [web.post("/echo", _echo), web.get("/broken", _broken), web.get("/large", _large)]
    log = Logger(Level.ERROR)
    server = AdminServer([listener], lambda: READY, ServiceMetrics(), routes, log, options)
    await server.start()
    try:
        yield listener.getsockname()[1]
    finally:
        await server.close()


async def _sent(port: int, *pieces: bytes, pause_s: float = 0.0) -> Answer:
    """What comes back until the other side closes, or the first answer ends."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        for piece in pieces:
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(pause_s)
        async with asyncio.timeout(WAIT_S):
            head = await reader.readuntil(b"\r\n\r\n")
            lines = head.decode().split("\r\n")
            headers = {
                name.lower(): value for name, _, value in (line.partition(": ") for line in lines[1:] if line)
            }
            body = await reader.readexactly(int(headers["content-length"]))
            rest = await reader.read() if headers.get("connection") == "close" else b""
            return Answer(int(lines[0].split()[1]), headers, body, rest)
    finally:
        writer.close()


GET = b"GET /live HTTP/1.1\r\nHost: x\r\n"


@pytest.mark.parametrize(
    ("request_bytes", "status"),
    [
        (b"\r\nnonsense\r\n\r\n", 400),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n", 400),
        (b"GET /live HTTP/9.9\r\nHost: x\r\n\r\n", 400),
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 400),
        (b"GE T /live HTTP/1.1\r\nHost: x\r\n\r\n", 400),
        (b"G@T /live HTTP/1.1\r\nHost: x\r\n\r\n", 400),
        (GET + b"no colon\r\n\r\n", 400),
        (GET + b"bad name: x\r\n\r\n", 400),
        (GET + b"X: a\x00b\r\n\r\n", 400),
        (GET + b" folded: x\r\n\r\n", 400),
        (GET + b"Content-Length: abc\r\n\r\n", 400),
        (GET + b"Content-Length: -1\r\n\r\n", 400),
        (GET + b"Content-Length: 1\r\nContent-Length: 2\r\n\r\nab", 400),
        (GET + b"Content-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n", 400),
        (GET + b"Transfer-Encoding: whatever\r\n\r\n", 400),
        (b"POST /echo HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked, gzip\r\n\r\n", 400),
        (GET + b"X: " + b"a" * (HEADER_LINE_BYTES_MAX + 100) + b"\r\n\r\n", 431),
        (b"GET /" + b"a" * (HEADER_LINE_BYTES_MAX + 100) + b" HTTP/1.1\r\nHost: x\r\n\r\n", 431),
        (GET + b"".join(b"X%d: 1\r\n" % n for n in range(HEADERS_MAX + 10)) + b"\r\n", 400),
        (b"POST /echo HTTP/1.1\r\nHost: x\r\nExpect: miracles\r\nContent-Length: 2\r\n\r\nab", 417),
        (b"POST /live HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\n\r\n", 405),
        (b"GET /absent HTTP/1.1\r\nHost: x\r\n\r\n", 404),
        (b"GET /%zz%ff HTTP/1.1\r\nHost: x\r\n\r\n", 404),
        (b"OPTIONS * HTTP/1.1\r\nHost: x\r\n\r\n", 404),
        (b"POST /echo HTTP/1.1\r\nHost: x\r\nContent-Length: 1001\r\n\r\n" + b"x" * 1001, 413),
        (b"GET /broken HTTP/1.1\r\nHost: x\r\n\r\n", 500),
    ],
)
async def test_whatever_the_server_refuses_has_the_services_form(request_bytes: bytes, status: int) -> None:
    async with _serving() as port:
        answer = await _sent(port, request_bytes)
        assert answer.status == status
        assert answer.message
        assert "\n" not in answer.message
        assert len(answer.message) < 300
        assert answer.headers["x-request-id"] == "made"
        assert answer.headers["server"] == "moonpool"
        assert b"HTTP/1.1" not in answer.rest
        good = await _sent(port, GET + b"\r\n")
        assert good.status == 200


async def test_bad_chunks_are_one_answer_and_the_end_of_the_connection() -> None:
    head = b"POST /echo HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
    async with _serving() as port:
        answer = await _sent(port, head + b"zz\r\nab\r\n0\r\n\r\n")
        assert answer.status == 400
        answer = await _sent(port, head + b"2\r\nab\r\n", b"zz\r\n", pause_s=0.05)
        assert answer.status == 400
        assert "malformed HTTP" in answer.message
        assert b"HTTP/1.1" not in answer.rest


async def test_the_old_version_is_answered() -> None:
    async with _serving() as port:
        answer = await _sent(port, b"GET /live HTTP/1.0\r\n\r\n")
        assert answer.status == 200
        assert json.loads(answer.body) == {"live": True}


async def test_a_continue_is_said_where_it_is_expected() -> None:
    head = b"POST /echo HTTP/1.1\r\nHost: x\r\nExpect: 100-continue\r\nContent-Length: 2\r\n\r\n"
    async with _serving() as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(head)
        async with asyncio.timeout(WAIT_S):
            assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 100")
            writer.write(b"ab")
            assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200")
        writer.close()


async def test_every_answer_has_the_headers_and_a_given_one_stays() -> None:
    async with _serving() as port, ClientSession() as session:
        for path in ("live", "livez", "ready", "readyz", "health", "healthz", "metrics", "version", "absent"):
            async with session.get(
                f"http://127.0.0.1:{port}/{path}", headers={"x-request-id": path}
            ) as answer:
                assert answer.headers["x-request-id"] == path
                assert answer.headers.getall("Server") == ["moonpool"]
                assert answer.status == (404 if path == "absent" else 200)


async def test_headers_that_do_not_come_end_the_connection() -> None:
    options = replace(OPTIONS, header_timeout_s=0.2)
    async with _serving(options) as port:
        answer = await _sent(port, GET, b"X-Slow: 1\r\n", pause_s=0.05)
        assert answer.status == 408
        assert "headers did not come" in answer.message
        # The time is the whole head's: bytes that trickle do not buy more of it.
        trickle = [b"a"] * 20
        answer = await _sent(port, GET + b"X: ", *trickle[:3], pause_s=0.05)
        assert answer.status == 408


async def test_a_slow_body_and_a_slow_handler_are_not_slow_headers() -> None:
    options = replace(OPTIONS, header_timeout_s=0.1)
    async with _serving(options) as port:
        head = b"POST /echo HTTP/1.1\r\nHost: x\r\nContent-Length: 4\r\n\r\n"
        answer = await _sent(port, head, b"ab", b"cd", pause_s=0.2)
        assert (answer.status, answer.body) == (200, b"abcd")


@pytest.mark.parametrize("sent", [b"", b"\x16\x03\x01", b"GET / HTTP/1.1\r\n\r\n"])
async def test_a_handshake_that_does_not_come_ends_the_connection(tmp_path: Path, sent: bytes) -> None:
    made = certificate(tmp_path, "server")
    tls = server_context(TlsFiles(made.cert, made.key))
    async with _serving(replace(OPTIONS, tls=tls, header_timeout_s=0.3)) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(sent)
        async with asyncio.timeout(WAIT_S):
            assert b"HTTP" not in await reader.read()
        writer.close()
        trusted = ssl.create_default_context(cafile=str(made.cert))
        reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=trusted)
        writer.write(GET + b"\r\n")
        async with asyncio.timeout(WAIT_S):
            assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200")
        writer.close()


async def test_a_connection_on_which_nothing_comes_is_closed() -> None:
    async with _serving(replace(OPTIONS, idle_timeout_s=0.2)) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        async with asyncio.timeout(WAIT_S):
            assert await reader.read() == b""
        writer.close()


async def test_one_connection_more_than_the_bound_is_told_so() -> None:
    async with _serving(replace(OPTIONS, connections_max=2)) as port:
        held = [await asyncio.open_connection("127.0.0.1", port) for _ in range(2)]
        refused = await _sent(port)
        assert refused.status == 503
        assert refused.headers["retry-after"] == "1"
        assert "2 connections are open" in refused.message
        _, writer = held.pop()
        writer.close()
        await writer.wait_closed()
        await asyncio.sleep(0.05)
        assert (await _sent(port, GET + b"\r\n")).status == 200
        held[0][1].close()


async def test_an_answer_may_come_before_the_routes() -> None:
    def first(request: web.Request) -> web.Response | None:
        return web.Response(status=204) if request.method == "OPTIONS" else None

    async with _serving(replace(OPTIONS, answer_first=first)) as port, ClientSession() as session:
        async with session.options(f"http://127.0.0.1:{port}/echo") as answer:
            assert (answer.status, answer.headers["x-request-id"]) == (204, "made")
        async with session.post(f"http://127.0.0.1:{port}/echo", data=b"x") as answer:
            assert await answer.read() == b"x"


async def test_other_services_answer_in_plain_text() -> None:
    async with _serving(HttpOptions()) as port:
        answer = await _sent(port, b"nonsense\r\n\r\n")
        assert answer.status == 400
        assert answer.body.startswith(b"400 Bad Request: malformed HTTP")
        assert answer.headers["content-type"].startswith("text/plain")


def test_the_loop_of_gateways_keeps_the_same_bounds() -> None:
    uvloop = pytest.importorskip("uvloop")

    async def held() -> list[int]:
        async with _serving(replace(OPTIONS, header_timeout_s=0.2, connections_max=2)) as port:
            malformed = await _sent(port, b"nonsense\r\n\r\n")
            late = await _sent(port, GET, b"X-Slow: 1\r\n", pause_s=0.05)
            pairs = [await asyncio.open_connection("127.0.0.1", port) for _ in range(2)]
            too_many = await _sent(port)
            for _, writer in pairs:
                writer.close()
            return [malformed.status, late.status, too_many.status]

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        assert runner.run(held()) == [400, 408, 503]


async def test_who_leaves_a_shared_port_finishes_what_it_has() -> None:
    shared, own = listen("127.0.0.1", 0, reuse_port=True), listen("127.0.0.1", 0)
    log = Logger(Level.ERROR)
    server = AdminServer([shared, own], lambda: READY, ServiceMetrics(), [], log, OPTIONS)
    await server.start()
    ports = [listener.getsockname()[1] for listener in (shared, own)]
    reader, writer = await asyncio.open_connection("127.0.0.1", ports[0])
    writer.write(GET + b"\r\n")
    async with asyncio.timeout(WAIT_S):
        await reader.readuntil(b"\r\n\r\n")
    await server.leave_shared_port()
    with pytest.raises(ConnectionError):
        await asyncio.open_connection("127.0.0.1", ports[0])
    assert (await _sent(ports[1], GET + b"\r\n")).status == 200
    writer.write(GET + b"\r\n")
    async with asyncio.timeout(WAIT_S):
        assert (await reader.readuntil(b"\r\n\r\n")).count(b"200") == 1
    writer.close()
    await server.close()


def test_a_port_is_shared_only_by_those_who_say_so() -> None:
    first = listen("127.0.0.1", 0, reuse_port=True)
    port = first.getsockname()[1]
    second = listen("127.0.0.1", port, reuse_port=True)
    assert second.getsockname() == first.getsockname()
    with pytest.raises(ConfigError, match="Address already in use"):
        listen("127.0.0.1", port)
    second.close()
    first.close()
    with listen("127.0.0.1", port), pytest.raises(ConfigError):
        listen("127.0.0.1", port, reuse_port=True)


async def test_a_client_that_does_not_read_its_answer_is_cut_off() -> None:
    async with _serving(replace(OPTIONS, write_timeout_s=0.2)) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1024)
        writer.write(b"GET /large HTTP/1.1\r\nHost: x\r\n\r\n")
        await reader.readuntil(b"\r\n\r\n")
        await asyncio.sleep(0.6)
        received = 0
        async with asyncio.timeout(WAIT_S):
            with suppress(ConnectionError):
                while piece := await reader.read(1 << 20):
                    received += len(piece)
        assert received < LARGE_BYTES
        writer.close()


async def test_a_client_that_reads_its_answer_has_all_of_it() -> None:
    # Within the usual time: how quick a client is that shares a busy machine is nobody's promise.
    async with (
        _serving() as port,
        ClientSession() as session,
        session.get(f"http://127.0.0.1:{port}/large") as answer,
    ):
        assert len(await answer.read()) == LARGE_BYTES
