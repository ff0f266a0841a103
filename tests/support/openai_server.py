"""A small OpenAI-compatible server: streamed completions of token ids, with a cache that never forgets.

What it answers is scripted by the test; what it was asked it keeps. What a client takes from it, Moonpool's
gateway gives in the same form (tests/integration/test_replay.py asks that one).
"""

import asyncio
import contextlib
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import orjson
from aiohttp import web

BLOCK_TOKENS = 16
START_S_MAX = 10.0


@dataclass
class Script:
    """`refusals` are the answers to the first requests, as (status, headers, body); `cut_after` ends every
    stream after so many tokens without [DONE]."""

    models: list[dict[str, Any]] = field(
        default_factory=lambda: [{"id": "fake", "max_model_len": 2048}, {"id": "other", "max_model_len": 100}]
    )
    refusals: list[tuple[int, dict[str, str], bytes]] = field(default_factory=list)
    cut_after: int | None = None
    error_event: dict[str, Any] | None = None
    token_s: float = 0.0
    held: bool = False
    """Answers begin only when `release` is called."""


class OpenAiServer:
    """Runs in a thread of its own; `url` is the base of the API."""

    def __init__(self) -> None:
        self.script = Script()
        self.asked: list[dict[str, Any]] = []
        self.open_max = 0
        self.url = ""
        self._open = 0
        self._cached: set[tuple[int, ...]] = set()
        self._asked = threading.Condition()

    def wait_asked(self, requests: int, timeout_s: float = START_S_MAX) -> bool:
        with self._asked:
            return self._asked.wait_for(lambda: len(self.asked) >= requests, timeout_s)

    def release(self) -> None:
        self._loop.call_soon_threadsafe(self._released.set)

    async def serve(self, ready: threading.Event) -> None:
        self._loop = asyncio.get_running_loop()
        self._released, self._stopped = asyncio.Event(), asyncio.Event()
        app = web.Application(client_max_size=1 << 26)
        app.add_routes([web.get("/v1/models", self._models), web.post("/v1/completions", self._completion)])
        runner = web.AppRunner(app, shutdown_timeout=0)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
        ready.set()
        await self._stopped.wait()
        self._released.set()
        await runner.cleanup()

    def stop(self) -> None:
        self._loop.call_soon_threadsafe(self._stopped.set)

    async def _models(self, _http: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": self.script.models})

    async def _completion(self, http: web.Request) -> web.StreamResponse:
        body = orjson.loads(await http.read())
        with self._asked:
            self.asked.append(body)
            self._asked.notify_all()
        if self.script.refusals:
            status, headers, content = self.script.refusals.pop(0)
            return web.Response(status=status, headers=headers, body=content, content_type="application/json")
        self._open += 1
        self.open_max = max(self.open_max, self._open)
        try:
            if self.script.held:
                await self._released.wait()
            return await self._stream(http, body)
        finally:
            self._open -= 1

    async def _stream(self, http: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        cached_tokens = self._cache(body["prompt"])
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(http)
        tokens = body["max_tokens"] if self.script.cut_after is None else self.script.cut_after
        with contextlib.suppress(ConnectionError):
            for token_id in range(tokens):
                await asyncio.sleep(self.script.token_s)
                await response.write(_event({"choices": [{"text": "", "token_ids": [token_id]}]}))
            if self.script.error_event is not None:
                await response.write(_event({"error": self.script.error_event}))
            elif self.script.cut_after is None:
                usage = {
                    "prompt_tokens": len(body["prompt"]),
                    "completion_tokens": tokens,
                    "prompt_tokens_details": {"cached_tokens": cached_tokens},
                }
                await response.write(_event({"choices": [], "usage": usage}) + b"data: [DONE]\n\n")
            await response.write_eof()
        return response

    def _cache(self, prompt: list[int]) -> int:
        """Cached tokens of a prompt, which is cached from now on."""
        ends = range(BLOCK_TOKENS, len(prompt) + 1, BLOCK_TOKENS)
        prefixes = {end: tuple(prompt[:end]) for end in ends}
        cached = max((end for end in ends if end < len(prompt) and prefixes[end] in self._cached), default=0)
        self._cached |= set(prefixes.values())
        return cached


@contextmanager
def openai_server() -> Iterator[OpenAiServer]:
    server, ready = OpenAiServer(), threading.Event()
    thread = threading.Thread(target=lambda: asyncio.run(server.serve(ready)), daemon=True)
    thread.start()
    assert ready.wait(START_S_MAX)
    try:
        yield server
    finally:
        server.stop()
        thread.join(START_S_MAX)


def _event(value: object) -> bytes:
    return b"data: " + orjson.dumps(value) + b"\n\n"
