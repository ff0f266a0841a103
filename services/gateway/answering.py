"""Writing an answer to its client: whole, or as a stream of server-sent events.

Owns the client's connection while an answer goes out. What the events hold is `gateway.answer_forms`'s.
"""

import asyncio
from collections.abc import Awaitable

from aiohttp import web

from gateway.answer_forms import DONE, AnswerForm, error_event
from gateway.calls import Call, Calls, ClientGoneError, json_response
from gateway.running import RunningRequest

STREAM_HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",
}


class Answering:
    def __init__(self, calls: Calls, *, write_timeout_s: float) -> None:
        """`write_timeout_s`: what one write may wait for a client that does not read."""
        self._calls = calls
        self._write_timeout_s = write_timeout_s

    async def whole(self, call: Call, running: RunningRequest, form: AnswerForm) -> web.StreamResponse:
        texts: list[str] = []
        token_ids: list[int] = []
        while call.ending is None:
            piece = await running.outbox.take()
            call.answered(len(piece.token_ids))
            texts.append(piece.text)
            token_ids += piece.token_ids
            call.ending = piece.ending
        return json_response(200, form.whole("".join(texts), token_ids, call.ending))

    async def stream(
        self, http: web.Request, call: Call, running: RunningRequest, form: AnswerForm
    ) -> web.StreamResponse:
        # Nothing is sent before there is something to say: a refusal can still have its own status.
        piece = await running.outbox.take()
        response = web.StreamResponse(headers=STREAM_HEADERS | call.headers())
        await response.prepare(http)
        try:
            await self._write(http, response.write(form.opening()))
            while piece.ending is None:
                call.answered(len(piece.token_ids))
                delta = form.delta(piece.text, piece.token_ids)
                if delta:
                    await self._write(http, response.write(delta))
                piece = await running.outbox.take()
            call.answered(len(piece.token_ids))
            call.ending = piece.ending
            last = form.delta(piece.text, piece.token_ids)
            await self._write(http, response.write(last + form.closing(piece.ending) + DONE))
        except (ConnectionError, ClientGoneError):
            raise
        except Exception as error:
            call.failure = self._calls.failure(call, error)
            await self._write(http, response.write(error_event(call.failure)))
        await self._write(http, response.write_eof())
        return response

    async def _write(self, http: web.Request, writing: Awaitable[None]) -> None:
        """Waits for a client that reads slowly, but not for ever; meanwhile its outbox fills."""
        try:
            async with asyncio.timeout(self._write_timeout_s):
                await writing
        except TimeoutError:
            if http.transport is not None:
                http.transport.abort()
            raise ClientGoneError(f"the client read nothing for {self._write_timeout_s:g} s") from None
