"""`moonpool up`: NATS, etcd and every service as processes on this machine, until Ctrl-C."""

import argparse
import asyncio
import json
import math
import os
import shlex
import signal
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING

from moonpool.api import API_KEY_VARIABLE
from moonpool.arguments import PORT_MAX, Command, folder, seconds, whole_number
from moonpool.errors import EXIT_OK, UsageError
from moonpool.run_folder import DEFAULT_NAME, NAME_PATTERN

if TYPE_CHECKING:
    from moonpool.stack_plan import StackConfig

INSTANCES_MAX = 64
"""Most instances of one role that one machine is asked to start."""
THREADS_MAX = 256
POOL_BYTES_MIN = 1 << 20
POOL_BYTES_MAX = 1 << 44
SSD_BYTES_MAX = 1 << 44
WAIT_S_MAX = 3600.0
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
ONE_WISH_S = 0.5
"""Signals this close together are one wish: `make` passes on what the whole group got already."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    count = whole_number(0, INSTANCES_MAX)
    parser.add_argument(
        "--model",
        default="smollm2",
        help="smollm2 (default), tiny (random weights), a Hugging Face folder, or a GGUF file",
    )
    parser.add_argument("--prefill", type=count, default=1, metavar="N", help="prefill instances (default 1)")
    parser.add_argument("--decode", type=count, default=1, metavar="N", help="decode instances (default 1)")
    parser.add_argument(
        "--coupled", type=count, default=0, metavar="N", help="instances that do both (default 0)"
    )
    parser.add_argument(
        "--gateways",
        type=whole_number(1, INSTANCES_MAX),
        default=1,
        metavar="N",
        help="gateways, which share the port (default 1)",
    )
    parser.add_argument("--host", default="127.0.0.1", help="where the API listens (default 127.0.0.1)")
    parser.add_argument(
        "--port", type=whole_number(0, PORT_MAX), default=8000, help="default 8000; 0 takes a free one"
    )
    parser.add_argument(
        "--threads",
        type=whole_number(1, THREADS_MAX),
        default=1,
        metavar="N",
        help="threads of each engine (default 1)",
    )
    parser.add_argument(
        "--pool-bytes",
        type=whole_number(POOL_BYTES_MIN, POOL_BYTES_MAX),
        metavar="N",
        help="memory for KV blocks of each worker, at least 16 of them (default 2 GiB); a prompt with its "
        "answer must fit",
    )
    parser.add_argument(
        "--ssd-bytes",
        type=whole_number(0, SSD_BYTES_MAX),
        default=0,
        metavar="N",
        help="files for KV blocks of each worker, for what its memory has no room for (default 0: none)",
    )
    parser.add_argument(
        "--ssd-folder",
        type=folder,
        metavar="FOLDER",
        help="where these files are, to be found again by the next run; by default in the folder of the run, "
        "as long as the stack runs",
    )
    parser.add_argument("--name", default=DEFAULT_NAME, help=f"of this stack (default {DEFAULT_NAME})")
    parser.add_argument(
        "--ready-timeout",
        type=seconds(WAIT_S_MAX),
        default=120.0,
        metavar="S",
        help="seconds until all must be ready (default 120)",
    )
    parser.add_argument(
        "--drain-timeout",
        type=seconds(WAIT_S_MAX),
        default=30.0,
        metavar="S",
        help="seconds that open answers get at Ctrl-C (default 30); a second Ctrl-C ends them",
    )


def run(options: argparse.Namespace) -> int:
    return asyncio.run(_up(stack_config(options)))


def stack_config(options: argparse.Namespace) -> "StackConfig":
    """What was asked for, checked as a whole."""
    from moonpool.stack_plan import StackConfig

    if not options.coupled and not (options.prefill and options.decode):
        raise UsageError("--prefill and --decode must both be at least 1, or --coupled must be")
    if options.ssd_folder and not options.ssd_bytes:
        raise UsageError("--ssd-folder is given, so --ssd-bytes must be at least 1")
    if not NAME_PATTERN.fullmatch(options.name):
        raise UsageError(f"--name must match {NAME_PATTERN.pattern}, not {options.name!r}")
    return StackConfig(
        name=options.name,
        model=options.model,
        prefill=options.prefill,
        decode=options.decode,
        coupled=options.coupled,
        gateways=options.gateways,
        host=options.host,
        port=options.port,
        threads=options.threads,
        pool_bytes=options.pool_bytes,
        ssd_bytes=options.ssd_bytes,
        ssd_folder=options.ssd_folder and options.ssd_folder.resolve(),
        ready_s_max=options.ready_timeout,
        drain_s_max=options.drain_timeout,
    )


async def _up(config: "StackConfig") -> int:
    """Run until a signal comes (then 0, once all has stopped) or a process ends (then CommandError)."""
    serving = asyncio.create_task(_serve(config))
    loop = asyncio.get_running_loop()
    wished_at_s = -math.inf

    def stop() -> None:
        """The first wish cancels the serving, and so stops the stack; a second one cancels the stopping."""
        nonlocal wished_at_s
        if loop.time() - wished_at_s > ONE_WISH_S:
            serving.cancel()
        wished_at_s = loop.time()

    for number in STOP_SIGNALS:
        loop.add_signal_handler(number, stop)
    try:
        await serving
    except asyncio.CancelledError:
        print("stopped", flush=True)
    return EXIT_OK


async def _serve(config: "StackConfig") -> None:
    from moonpool.stack import running_stack

    started_s = time.monotonic()

    def report(text: str) -> None:
        print(f"[{time.monotonic() - started_s:5.1f} s] {text}", flush=True)

    async with running_stack(config, report) as stack:
        state = stack.state()
        print(f"ready {state.url}", flush=True)
        print(example_curl(state.url, state.model, asks_for_key=asks_for_key(os.environ)), flush=True)
        raise await stack.failure()


def asks_for_key(environment: Mapping[str, str]) -> bool:
    """Whether the gateways of this environment have API keys."""
    return any(environment.get(name) for name in ("MOONPOOL_API_KEYS", "MOONPOOL_API_KEYS_FILE"))


def example_curl(url: str, model: str, *, asks_for_key: bool = False) -> str:
    """A command to copy that asks for one streamed answer."""
    body = {
        "model": model,
        "messages": [{"role": "user", "content": "What is the capital of France?"}],
        "max_tokens": 64,
        "temperature": 0,
        "stream": True,
    }
    header = shlex.quote("Content-Type: application/json")
    # In quotes that let the shell put the variable in.
    key = f' -H "Authorization: Bearer ${API_KEY_VARIABLE}"' if asks_for_key else ""
    return f"curl -N {url}/chat/completions -H {header}{key} -d {shlex.quote(json.dumps(body))}"


COMMAND = Command("up", "start a whole stack on this machine and serve until Ctrl-C", add_arguments, run)
