"""What `moonpool bench serve` puts under load: Moonpool's control path, and a router in front of servers.

Each is started as processes of its own, with stub workers behind it, and is a name, addresses that take
requests, and process ids.
"""

import asyncio
import sys
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moonpool.benchmarks.http_load import Address
from moonpool.errors import CommandError

if TYPE_CHECKING:
    from moonpool.processes import Child

HOST = "127.0.0.1"
READY_S_MAX = 60.0
POLL_S = 0.05
ANSWER_S_MAX = 5.0
STUBS = "stub_workers"
ROUTER = "sglang_router"
ROUTER_POLICY = "cache_aware"
TRIES_MAX = 200
"""Questions of whether a system serves yet, each after POLL_S."""


@dataclass(frozen=True, slots=True)
class System:
    name: str
    addresses: Sequence[Address]
    processes: Mapping[str, int]
    """Process ids; those whose names begin with STUBS are no part of the system."""


@dataclass(frozen=True, slots=True)
class Profiled:
    """The service, such as gateway-0, that is to run under cProfile, and where its profile goes."""

    service: str
    output: Path


async def start_moonpool(
    stack: AsyncExitStack,
    folder: Path,
    model_folder: Path,
    *,
    gateways: int,
    workers: int,
    profiled: Profiled | None,
) -> System:
    """Half of the `workers` prefill, half decode. All ends with `stack`; CommandError where one does not
    come up."""
    # Here, and not above: other commands need none of it.
    from moonpool.servers import ServerError, etcd_server, free_port, nats_server

    try:
        nats = stack.enter_context(nats_server(folder))
        etcd = stack.enter_context(etcd_server(folder))
    except ServerError as error:
        raise CommandError(str(error)) from error
    servers = ("--nats-url", nats.url, "--etcd-url", etcd.url)
    model = ("--model-folder", str(model_folder))
    names = ["kvmeta-0", "conductor-0", *(f"gateway-{number}" for number in range(gateways))]
    ports = [free_port() for _ in names]
    counts = ("--prefill", str(workers // 2), "--decode", str(workers // 2))
    started = [
        await _start(
            stack, folder, STUBS, ("-m", "moonpool.benchmarks.stub_workers", *servers, *model, *counts)
        )
    ]
    for name, port in zip(names, ports, strict=True):
        module = name.partition("-")[0]
        arguments = ["-m", module, "--instance", name, *servers, "--http-port", str(port)]
        if module == "gateway":
            arguments += model
        if profiled is not None and profiled.service == name:
            arguments = ["-m", "cProfile", "-o", str(profiled.output), *arguments]
        started.append(await _start(stack, folder, name, arguments))
    await _ready(ports, started)
    processes = {child.name: child.pid for child in started}
    servers_pids = {"nats": nats.pid or 0, "etcd": etcd.pid or 0}
    addresses = [Address(HOST, port) for port, name in zip(ports, names, strict=True) if "gateway" in name]
    return System("moonpool", addresses, {**processes, **servers_pids})


async def start_router(
    stack: AsyncExitStack, folder: Path, router_python: Path | None, *, workers: int
) -> tuple[System, System | None]:
    """The stub servers themselves, and the router before them where there is one. As `start_moonpool`."""
    from moonpool.servers import free_port

    ports = [free_port() for _ in range(workers)]
    name = f"{STUBS}_http"
    arguments = ("-m", "moonpool.benchmarks.stub_http_workers", *map(str, ports))
    stubs = await _start(stack, folder, name, arguments)
    direct = System("stub_worker", [Address(HOST, port) for port in ports], {name: stubs.pid})
    await _answers(ports[0], "/health", stubs)
    if router_python is None:
        return direct, None
    port = free_port()
    urls = [f"http://{HOST}:{each}" for each in ports]
    arguments = (
        *("-m", "sglang_router.launch_router", "--host", HOST, "--port", str(port)),
        *("--worker-urls", *urls, "--policy", ROUTER_POLICY, "--log-level", "warn"),
        *("--prometheus-port", str(free_port())),
    )
    router = await _start(stack, folder, ROUTER, arguments, python=router_python)
    await _answers(port, "/health", router)
    return direct, System(ROUTER, [Address(HOST, port)], {ROUTER: router.pid, name: stubs.pid})


async def _start(
    stack: AsyncExitStack, folder: Path, name: str, arguments: Sequence[str], *, python: Path | None = None
) -> "Child":
    from moonpool.processes import Child, ProcessSpec

    program = (str(python or sys.executable), *arguments)
    child = await Child.start(ProcessSpec(name=name, program=program), folder)
    stack.push_async_callback(child.stop)
    return child


async def _ready(ports: Sequence[int], children: Sequence["Child"]) -> None:
    from moonpool.benchmarks.services import until_ready

    waiting = asyncio.gather(*map(until_ready, ports))
    ends = {asyncio.ensure_future(child.wait()): child for child in children}
    awaited: set[asyncio.Future[Any]] = {waiting, *ends}
    done, _ = await asyncio.wait(awaited, timeout=READY_S_MAX, return_when=asyncio.FIRST_COMPLETED)
    for each in awaited:
        each.cancel()
    ended = [child for end, child in ends.items() if end in done]
    if ended:
        raise CommandError(f"{ended[0].name} {ended[0].ending()}\n{ended[0].log_tail()}")
    if waiting not in done:
        tails = "\n".join(child.log_tail() for child in children)
        raise CommandError(f"not ready within {READY_S_MAX:g} s:\n{tails}")
    waiting.result()


async def _answers(port: int, path: str, child: "Child") -> None:
    """Return once what runs there answers that it is well."""
    import aiohttp

    url = f"http://{HOST}:{port}{path}"
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=ANSWER_S_MAX)) as session:
        for _ in range(TRIES_MAX):
            if child.exit_status is not None:
                raise CommandError(f"{child.name} {child.ending()}")
            with suppress(aiohttp.ClientError, TimeoutError):
                async with session.get(url) as answer:
                    if answer.status == HTTPStatus.OK:
                        return
            await asyncio.sleep(POLL_S)
    raise CommandError(f"{child.name} does not answer at {url}:\n{child.log_tail()}")
