"""`python -m moonpool.benchmarks.stub_http_workers PORT...`: model servers that answer at once.

What a router in front of servers of the OpenAI API needs of them: health, the model's name, and an answer of
one token. All are in this one process, as the instances of `moonpool.benchmarks.stub_workers` are.
"""

import asyncio
import json
import sys
from collections.abc import Awaitable, Callable, Sequence

import uvloop
from aiohttp import web

HOST = "127.0.0.1"
MODEL = "stub"
ANSWER = {
    "id": "cmpl-0",
    "object": "text_completion",
    "created": 0,
    "model": MODEL,
    "choices": [{"index": 0, "text": "ok", "finish_reason": "length"}],
    "usage": {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2},
}
MODELS = {"object": "list", "data": [{"id": MODEL, "object": "model", "owned_by": "stub"}]}
ABOUT = {"model_path": MODEL, "served_model_name": MODEL, "is_generation": True, "version": "0", "dp_size": 1}
HEALTH_PATHS = ("/health", "/health_generate")
ABOUT_PATHS = ("/get_model_info", "/model_info", "/get_server_info", "/server_info")


def application() -> web.Application:
    app = web.Application()
    app.router.add_post("/v1/completions", _complete)
    app.router.add_get("/v1/models", _saying(MODELS))
    for path in HEALTH_PATHS:
        app.router.add_get(path, _saying({"status": "ok"}))
    for path in ABOUT_PATHS:
        app.router.add_get(path, _saying(ABOUT))
    return app


async def _complete(request: web.Request) -> web.Response:
    json.loads(await request.read())
    return web.json_response(ANSWER)


def _saying(what: object) -> Callable[[web.Request], Awaitable[web.Response]]:
    async def answer(_: web.Request) -> web.Response:
        return web.json_response(what)

    return answer


async def serve(ports: Sequence[int]) -> None:
    for port in ports:
        runner = web.AppRunner(application(), access_log=None)
        await runner.setup()
        await web.TCPSite(runner, HOST, port).start()
    await asyncio.Event().wait()


def main(argv: Sequence[str]) -> int:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(serve([int(port) for port in argv]))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
