"""Sends what is due, when it is due, whatever has become of the requests before: an open loop.

Owns the connections and the clock. What is sent is `schedule`'s and `prompts`', what comes back `answer`'s.
"""

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import aiohttp
import orjson

from moonpool.replay.answer import REJECTED_REASON_HEADER, StreamedAnswer, record_of, refused_record
from moonpool.replay.prompts import TokenRange, prompt_token_ids
from moonpool.replay.records import Outcome, Record, Results
from moonpool.replay.schedule import ScheduledRequest, block_ends
from moonpool.replay.target import Target

CONNECT_S_MAX = 30.0
ERROR_BODY_BYTES_MAX = 64 * 1024
"""An answer that is an error and longer is cut: only its code and message are of use."""
SILENT = "silent"
CONNECTION_FAILED = "connection_failed"


@dataclass(frozen=True, slots=True)
class SenderConfig:
    """`in_flight_max` requests are open at once; one that is due while there are so many is sent late.
    `silence_s_max`: a request whose answer says nothing for so long has failed. Targets that are None are not
    sent: the cluster's own hold."""

    target: Target
    scale: float
    seed: int
    tokens: TokenRange
    in_flight_max: int
    silence_s_max: float
    ttft_ms_max: float | None = None
    tbt_ms_max: float | None = None


async def send_all(requests: Sequence[ScheduledRequest], config: SenderConfig, results: Results) -> None:
    """Send `requests`, which are in the order in which they are due, and put what came of them into
    `results`; returns when all have ended. If it is cancelled, what is in flight is given up, and recorded
    as interrupted."""
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S_MAX, sock_read=config.silence_s_max)
    # `in_flight_max` is the bound; one more in the pool would let requests wait that count as sent.
    connector = aiohttp.TCPConnector(limit=0, ssl=config.target.tls or True)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
        loop = asyncio.get_running_loop()
        started_s, results.began_unix_s = loop.time(), time.time()
        sending = _Sending(config, session, results, lambda: loop.time() - started_s)
        async with asyncio.TaskGroup() as in_flight:
            for request in requests:
                # Also where it is overdue: the one before is on its way before this one's prompt is made.
                await asyncio.sleep(max(0.0, request.due_s - sending.now_s()))
                await sending.slots.acquire()
                in_flight.create_task(sending.send(request))


class _Sending:
    """One request at a time, from its prompt to its record."""

    def __init__(
        self,
        config: SenderConfig,
        session: aiohttp.ClientSession,
        results: Results,
        now_s: Callable[[], float],
    ) -> None:
        self._config = config
        self._session = session
        self._results = results
        self.now_s = now_s
        self.slots = asyncio.Semaphore(config.in_flight_max)

    async def send(self, request: ScheduledRequest) -> None:
        """Takes a slot that the caller has acquired, and gives it back."""
        body = self._body(request)
        sent_s = self.now_s()
        self._results.in_flight += 1
        try:
            record = await self._answered(request, body, sent_s)
        except TimeoutError as error:
            record = self._failed(request, sent_s, SILENT, str(error))
        except aiohttp.ClientError as error:
            record = self._failed(request, sent_s, CONNECTION_FAILED, str(error) or type(error).__name__)
        except asyncio.CancelledError:
            self._results.records.append(self._ended(request, sent_s, Outcome.INTERRUPTED))
            raise
        finally:
            self._results.in_flight -= 1
            self.slots.release()
        self._results.records.append(record)

    async def _answered(self, request: ScheduledRequest, body: bytes, sent_s: float) -> Record:
        headers = {"Content-Type": "application/json", **self._config.target.headers}
        async with self._session.post(
            self._config.target.completions_url, data=body, headers=headers
        ) as response:
            if response.status != 200:
                return refused_record(
                    request,
                    self._results,
                    status=response.status,
                    reason=response.headers.get(REJECTED_REASON_HEADER),
                    body=await _beginning(response.content, ERROR_BODY_BYTES_MAX),
                    sent_s=sent_s,
                    ended_s=self.now_s(),
                )
            answer = StreamedAnswer()
            while answer.error is None and (line := await _line(response.content)):
                answer.take(line, self.now_s())
            return record_of(answer, request, self._results, sent_s=sent_s, ended_s=self.now_s())

    def _body(self, request: ScheduledRequest) -> bytes:
        config = self._config
        ends = block_ends(request, config.scale)
        prompt = prompt_token_ids(request.block_ids, ends, config.seed, config.tokens)
        body: dict[str, object] = {
            "model": config.target.model,
            "prompt": prompt,
            "max_tokens": request.output_tokens,
            "ignore_eos": True,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
            "return_token_ids": True,
        }
        # Other servers may refuse what they do not know, so these are there only where they say something.
        if request.priority:
            body["priority"] = request.priority
        if config.ttft_ms_max is not None:
            body["ttft_ms_max"] = config.ttft_ms_max
        if config.tbt_ms_max is not None:
            body["tbt_ms_max"] = config.tbt_ms_max
        return orjson.dumps(body, option=orjson.OPT_SERIALIZE_NUMPY)

    def _failed(self, request: ScheduledRequest, sent_s: float, reason: str, message: str) -> Record:
        record = self._ended(request, sent_s, Outcome.FAILED)
        return replace(record, failure=self._results.failure(0, reason, message))

    def _ended(self, request: ScheduledRequest, sent_s: float, outcome: Outcome) -> Record:
        return Record(due_s=request.due_s, sent_s=sent_s, ended_s=self.now_s(), outcome=outcome)


async def _line(stream: aiohttp.StreamReader) -> bytes:
    """The next line; empty at the end. aiohttp bounds its length."""
    try:
        return await stream.readline()
    except ValueError as error:
        raise aiohttp.ClientPayloadError(f"a line of the stream is too long: {error}") from None


async def _beginning(stream: aiohttp.StreamReader, bytes_max: int) -> bytes:
    try:
        return await stream.readexactly(bytes_max)
    except asyncio.IncompleteReadError as error:
        return error.partial
