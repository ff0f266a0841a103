"""`moonpool bench serve` without a stack: its load, what it counts, and what it makes of it."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from itertools import repeat

import msgspec
import pytest

from moonpool.benchmarks import http_load
from moonpool.benchmarks.http_load import (
    BROKEN,
    Address,
    Outcomes,
    closed_loop,
    open_loop,
    request_bytes,
    status_of,
    whole_length,
)
from moonpool.benchmarks.serve import GROUPS, Load, Sample, Setting, request_stream, summarise, told

pytestmark = pytest.mark.unit

GOOD = b'"choices"'
BODY = b'{"choices":[]}'
ANSWER = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(BODY), BODY)
CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n%x\r\n%b\r\n0\r\n\r\n" % (len(BODY), BODY)
REFUSED = b"HTTP/1.1 429 Too Many Requests\r\ncontent-length: 2\r\n\r\n{}"
REQUEST = request_bytes("/v1/completions", b'{"prompt": "x"}')

Answer = Callable[[asyncio.StreamWriter], Awaitable[None]]


@asynccontextmanager
async def server(answer: Answer) -> AsyncIterator[Address]:
    """Reads requests as they are, and has `answer` write."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                assert await reader.readexactly(len(REQUEST)) == REQUEST
                await answer(writer)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    listening = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with listening:
        host, port = listening.sockets[0].getsockname()
        yield Address(host, port)


async def load_of(answer: Answer) -> Outcomes:
    async with server(answer) as address:
        return await closed_loop([address], repeat(REQUEST), concurrency=2, seconds=0.05, good=GOOD)


@pytest.mark.parametrize("whole", [ANSWER, CHUNKED])
async def test_answers_are_taken_whole_however_they_come(whole: bytes) -> None:
    async def answer(writer: asyncio.StreamWriter) -> None:
        for begin in range(0, len(whole), 20):
            writer.write(whole[begin : begin + 20])
            await writer.drain()
            await asyncio.sleep(0)

    outcomes = await load_of(answer)
    assert len(outcomes.latencies_s) > 2
    assert outcomes.failed == Counter()
    assert outcomes.took_s >= 0.05


async def test_what_is_refused_counts_by_its_status_and_has_no_latency() -> None:
    async def answer(writer: asyncio.StreamWriter) -> None:
        writer.write(REFUSED)

    outcomes = await load_of(answer)
    assert outcomes.latencies_s == []
    assert set(outcomes.failed) == {429}


async def test_a_connection_that_ends_is_a_failed_request() -> None:
    async def answer(writer: asyncio.StreamWriter) -> None:
        writer.write(ANSWER[:30])
        writer.close()

    outcomes = await load_of(answer)
    assert outcomes.failed == Counter({BROKEN: 2})


def test_an_answer_that_only_says_that_it_is_good_is_not() -> None:
    assert status_of(ANSWER, GOOD) == 200
    assert status_of(ANSWER, b'"usage"') == BROKEN
    assert status_of(REFUSED, GOOD) == 429


def test_where_an_answer_ends() -> None:
    assert whole_length(b"HTTP/1.1 200 OK\r\nContent-Le") is None
    assert whole_length(ANSWER) == len(ANSWER)
    assert whole_length(CHUNKED) == 0


async def test_an_open_loop_waits_for_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """Latencies count from when a request was due, and what finds no connection is told."""
    monkeypatch.setattr(http_load, "CONNECTIONS_MAX", 4)

    async def answer(writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(0.02)
        writer.write(ANSWER)

    async with server(answer) as address:
        outcomes = await open_loop([address], repeat(REQUEST), rate=1000.0, seconds=0.2, good=GOOD, seed=1)
    assert outcomes.unsent > 0
    assert len(outcomes.latencies_s) >= 4
    assert min(outcomes.latencies_s) >= 0.02
    assert outcomes.failed == Counter()


def test_prompts_come_in_families_and_each_is_its_own() -> None:
    requests = request_stream("m", prompt_words=10)
    bodies = [msgspec.json.decode(next(requests).partition(b"\r\n\r\n")[2]) for _ in range(2 * GROUPS)]
    prompts = [body["prompt"] for body in bodies]
    assert len(set(prompts)) == 2 * GROUPS
    assert {len(prompt.split()) for prompt in prompts} == {10}
    beginnings = [prompt.rpartition(" ")[0] for prompt in prompts]
    assert beginnings[:GROUPS] == beginnings[GROUPS:]
    assert len(set(beginnings)) == GROUPS
    assert {(body["model"], body["max_tokens"]) for body in bodies} == {("m", 1)}


def sample(requests: int, gateway_s: float) -> Sample:
    latencies_s = [0.001 * number for number in range(1, requests + 1)]
    closed = Load(Outcomes(latencies_s, took_s=2.0), {"gateway-0": gateway_s, "client": 0.01})
    steady = Outcomes(latencies_s, took_s=2.0, failed=Counter({429: 3}), unsent=1)
    return Sample(closed, Load(steady, {"gateway-0": gateway_s, "client": 0.01}))


def test_the_lines_say_what_was_measured() -> None:
    setting = Setting("tiny", 1, 4, 8, 50.0, 200, 2)
    samples = {"moonpool": [sample(10, 0.02)], "sglang_router": [sample(30, 0.03)]}
    values = {(line.case, line.metric): line.value for line in summarise(samples, setting)}
    assert values["moonpool", "requests"] == 5.0
    assert values["moonpool", "closed_processor_gateway-0"] == pytest.approx(2.0)
    assert values["moonpool", "open_latency_p50"] == pytest.approx(5.0)
    assert values["moonpool", "open_latency_p99"] == pytest.approx(10.0)
    assert values["moonpool", "closed_failed"] == 0.0
    assert values["moonpool", "open_failed"] == 4.0
    assert values["sglang_router", "requests_by_moonpool"] == 3.0
    assert "4 refused or failed" in told("moonpool", samples["moonpool"][0])
