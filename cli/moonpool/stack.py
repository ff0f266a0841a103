"""A whole Moonpool on this machine: real servers, every service as a process of its own.

Owns which processes there are, the order in which they start and stop, and when the whole is ready.
`moonpool up`, `moonpool bench` and the integration tests start their stacks here.
"""

import asyncio
import os
import secrets
import shutil
import socket
import sys
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from http import HTTPStatus
from pathlib import Path

import aiohttp

from cluster import keys
from engine.errors import ModelFolderError
from engine.models import resolve_model
from kvindex.core import InstanceId
from moonpool.cluster_client import ClusterAddresses, control_plane, registered
from moonpool.errors import EXIT_USAGE, CommandError, UsageError
from moonpool.kept_seed import kept_seed
from moonpool.processes import Child, ProcessSpec
from moonpool.roles import ServiceSettings, service_arguments
from moonpool.run_folder import (
    ProcessState,
    StackState,
    locked,
    moonpool_home,
    remove_state,
    run_folder,
    write_state,
)
from moonpool.servers import ServerError, ServerPlan, etcd_server, nats_server

READY_S_MAX_DEFAULT = 120.0
DRAIN_S_MAX_DEFAULT = 30.0
STOP_GRACE_S = 10.0
"""What a service gets on top of its drain time to close what it holds."""
SECRET_VARIABLE = "MOONPOOL_CLUSTER_SECRET"
SECRET_BYTES = 32
KERNELS_VARIABLE = "MOONPOOL_KERNELS_FOLDER"
OPENMP_SPINS = 2000
"""How often a thread of an engine looks for work before it sleeps, about 0.1 ms: longer than the gap between
two operations. OpenMP's own 15 ms burn the cores that the other processes of this machine wait for.
"""
SSD_FOLDER = "ssd"
READY_POLL_S = 0.1
READY_ANSWER_S_MAX = 5.0
SERVER_STOP_S_MAX = 5.0

Report = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class StackConfig:
    """What a stack is to be. `port` 0 takes a free one."""

    name: str
    model: str
    prefill: int = 1
    decode: int = 1
    coupled: int = 0
    host: str = "127.0.0.1"
    port: int = 0
    threads: int = 1
    pool_bytes: int | None = None
    """Memory for KV blocks of each worker; None leaves it to the worker."""
    ssd_bytes: int = 0
    """Files for KV blocks of each worker; 0: none."""
    ssd_folder: Path | None = None
    """Where they are, with the seed of their hashes, for the next stack too; None: in the run folder, as
    long as the stack runs."""
    ready_s_max: float = READY_S_MAX_DEFAULT
    drain_s_max: float = DRAIN_S_MAX_DEFAULT
    environment: Mapping[str, str] = field(default_factory=dict)
    """Added to the environment of every service, for settings that have no field here."""


@dataclass(frozen=True, slots=True)
class Member:
    """One service of a stack: `instance` is its id in the cluster and the name of its log."""

    instance: InstanceId
    role: str


def members(config: StackConfig) -> tuple[Member, ...]:
    """The services of a stack in the order in which they start; they stop the other way round."""
    counts = (
        ("kvmeta", 1),
        ("conductor", 1),
        ("prefill", config.prefill),
        ("decode", config.decode),
        ("coupled", config.coupled),
        ("gateway", 1),
    )
    return tuple(
        Member(InstanceId(f"{role}-{number}"), role) for role, count in counts for number in range(count)
    )


def service_environment(config: StackConfig) -> dict[str, str]:
    """What is added to our environment for every service."""
    return {
        # OpenMP's own threads would outnumber the cores: the engine says how many it wants.
        "OMP_NUM_THREADS": str(config.threads),
        "GOMP_SPINCOUNT": str(OPENMP_SPINS),
        KERNELS_VARIABLE: os.environ.get(KERNELS_VARIABLE, str(moonpool_home() / "kernels")),
        # One that is set is known to those who are to join the stack.
        SECRET_VARIABLE: os.environ.get(SECRET_VARIABLE) or secrets.token_hex(SECRET_BYTES),
        **config.environment,
    }


STOP_ORDER = (("gateway",), ("prefill", "decode", "coupled"), ("conductor", "kvmeta"))
"""The gateway first, so that open answers end while the rest still serves them."""


class Stack:
    """The processes of one stack. `running_stack` makes one, and stops it."""

    def __init__(self, config: StackConfig, folder: Path, model_folder: Path, report: Report) -> None:
        self._config = config
        self._logs = folder / "logs"
        self._folder = folder
        self._model_folder = model_folder
        self._report = report
        self._servers: list[Child] = []
        self._services: dict[Member, Child] = {}
        self._addresses = ClusterAddresses("", "")
        self._http_url = ""
        self._model_name = ""

    def state(self) -> StackState:
        """Complete once `start` has returned."""
        return StackState(
            name=self._config.name,
            pid=os.getpid(),
            model=self._model_name,
            model_folder=str(self._model_folder),
            url=f"{self._http_url}/v1",
            nats_url=self._addresses.nats_url,
            etcd_url=self._addresses.etcd_url,
            processes=tuple(
                ProcessState(child.name, child.pid, str(child.log_path)) for child in self._children()
            ),
        )

    async def start(self) -> None:
        """Return when every service is ready. Raises CommandError naming the one that is not."""
        try:
            async with asyncio.timeout(self._config.ready_s_max):
                await self._start_servers()
                await self._start_services()
                await self._unless_one_exits(self._wait_ready())
        except TimeoutError:
            raise CommandError(
                f"not ready within {self._config.ready_s_max:g} s; the logs are in {self._logs}"
            ) from None

    async def failure(self) -> CommandError:
        """Wait until a process ends by itself; what to say of it, once the end of its log was reported.

        A service that a setting is wrong for has its status passed on: what was typed here came to it.
        """
        child = await self._first_exit()
        self._report(f"the end of {child.log_path}:\n{child.log_tail()}")
        said = f"{child.name} {child.ending()}; see {child.log_path}"
        wrong_setting = child.exit_status == EXIT_USAGE and child in self._services.values()
        return UsageError(said) if wrong_setting else CommandError(said)

    async def stop(self) -> None:
        """Everything drains and goes, the gateway first. Cancelled, it leaves the rest to `kill`."""
        for roles in STOP_ORDER:
            group = [child for member, child in self._services.items() if member.role in roles]
            await self._stop_group(group)
        await self._stop_group(self._servers)

    async def kill(self) -> None:
        """Nothing that still runs is left, nor the files that only this stack could have read."""
        await asyncio.gather(*(child.kill() for child in self._children()))
        self._remove_ssd_files()

    async def _start_servers(self) -> None:
        # A registry of its own for every run: the last one's instances are gone, whatever their leases say.
        shutil.rmtree(self._folder / "etcd", ignore_errors=True)
        self._remove_ssd_files()
        try:
            plans = [nats_server(self._folder).plan, etcd_server(self._folder).plan]
        except ServerError as error:
            raise CommandError(str(error)) from error
        for plan in plans:
            self._report(f"starting {plan.name}")
            spec = ProcessSpec(name=plan.name, program=plan.command, stop_s_max=SERVER_STOP_S_MAX)
            self._servers.append(await Child.start(spec, self._logs))
        nats, etcd = plans
        self._addresses = ClusterAddresses(nats.url, etcd.url)
        await self._unless_one_exits(_answering(plans))
        if self._config.ssd_folder is not None:
            await self._unless_one_exits(self._give_seed(self._config.ssd_folder))

    async def _give_seed(self, folder: Path) -> None:
        """Have the hashes begin as those of the blocks in that folder."""
        seed = await asyncio.to_thread(kept_seed, folder)
        async with control_plane(self._addresses.etcd_url, timeout_s=self._config.ready_s_max) as control:
            await control.put(keys.SEED, seed)

    async def _start_services(self) -> None:
        settings = ServiceSettings(
            nats_url=self._addresses.nats_url,
            etcd_url=self._addresses.etcd_url,
            model_folder=self._model_folder,
            gateway_bind=self._config.host,
            gateway_port=self._config.port,
            threads=self._config.threads,
            pool_bytes=self._config.pool_bytes,
            ssd_bytes=self._config.ssd_bytes,
            ssd_folder=self._config.ssd_folder or self._folder / SSD_FOLDER,
            drain_s_max=self._config.drain_s_max,
        )
        environment = service_environment(self._config)
        for member in members(self._config):
            self._report(f"starting {member.instance}")
            spec = ProcessSpec(
                name=member.instance,
                program=(sys.executable, *service_arguments(member.role, member.instance, settings)),
                environment=environment,
                stop_s_max=self._config.drain_s_max + STOP_GRACE_S,
            )
            self._services[member] = await Child.start(spec, self._logs)

    async def _wait_ready(self) -> None:
        gateway = next(member.instance for member in self._services if member.role == "gateway")
        expected = [member.instance for member in self._services]
        async with control_plane(self._addresses.etcd_url, timeout_s=self._config.ready_s_max) as control:
            async for records in registered(control):
                for instance in [i for i in expected if i in records]:
                    expected.remove(instance)
                    self._report(f"{instance} is ready")
                if not expected:
                    self._http_url = records[gateway].http_url
                    self._model_name = next(r.model.name for r in records.values() if r.model)
                    break
        await _http_ready(self._http_url)

    async def _first_exit(self) -> Child:
        waits = {asyncio.create_task(child.wait()): child for child in self._children()}
        try:
            done, _ = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            return waits[done.pop()]
        finally:
            for wait in waits:
                wait.cancel()

    async def _unless_one_exits(self, waiting: Coroutine[None, None, None]) -> None:
        """Await `waiting`; CommandError where a process ends meanwhile."""
        ready = asyncio.create_task(waiting)
        failure = asyncio.create_task(self.failure())
        try:
            await asyncio.wait({ready, failure}, return_when=asyncio.FIRST_COMPLETED)
            if failure.done():
                raise failure.result()
            ready.result()
        finally:
            ready.cancel()
            failure.cancel()

    async def _stop_group(self, group: Sequence[Child]) -> None:
        running = [child for child in group if child.exit_status is None]
        if not running:
            return
        self._report(f"stopping {', '.join(child.name for child in running)}")
        heeded = await asyncio.gather(*(child.stop() for child in running))
        for child, went in zip(running, heeded, strict=True):
            if not went:
                self._report(f"{child.name} did not stop within {child.spec.stop_s_max:g} s and was killed")

    def _remove_ssd_files(self) -> None:
        """Those in the run folder. With the registry the seed of their hashes goes: nobody will ask for these
        blocks again."""
        shutil.rmtree(self._folder / SSD_FOLDER, ignore_errors=True)

    def _children(self) -> list[Child]:
        return [*self._servers, *self._services.values()]


async def _answering(plans: Sequence[ServerPlan]) -> None:
    for plan in plans:
        while True:
            if await asyncio.to_thread(plan.answers):
                break
            await asyncio.sleep(READY_POLL_S)


async def _http_ready(url: str) -> None:
    """Return once the service at `url` says that it can serve; the caller bounds the wait."""
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=READY_ANSWER_S_MAX)) as session:
        while True:
            with suppress(aiohttp.ClientError, TimeoutError):
                async with session.get(f"{url}/ready") as answer:
                    if answer.status == HTTPStatus.OK:
                        return
            await asyncio.sleep(READY_POLL_S)


def find_model(name: str, report: Report) -> Path:
    """The folder of a model by name or path, made where need be; CommandError where it cannot be had."""
    try:
        return resolve_model(name, moonpool_home(), report)
    except ModelFolderError as error:
        raise CommandError(str(error)) from error


def check_port(host: str, port: int) -> None:
    """CommandError where nobody could listen there."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        with socket.create_server((host, port), family=family):
            return
    except OSError as error:
        # Not strerror: create_server adds the address to it once more.
        reason = os.strerror(error.errno) if error.errno and error.errno > 0 else error.strerror or str(error)
        raise CommandError(
            f"cannot listen on {host} port {port}: {reason}; give another --host or --port"
        ) from error


@asynccontextmanager
async def running_stack(config: StackConfig, report: Report) -> AsyncIterator[Stack]:
    """A stack that is ready, and stopped at the end however that comes.

    Raises CommandError where the port is taken, a stack of this name runs already, the model cannot be
    had, or a service does not become ready.
    """
    check_port(config.host, config.port)
    folder = run_folder(config.name)
    with locked(folder):
        remove_state(folder)
        (folder / "logs").mkdir(exist_ok=True)
        model_folder = await asyncio.to_thread(find_model, config.model, report)
        stack = Stack(config, folder, model_folder, report)
        try:
            await stack.start()
            write_state(folder, stack.state())
            yield stack
        finally:
            remove_state(folder)
            try:
                await stack.stop()
            finally:
                await stack.kill()
