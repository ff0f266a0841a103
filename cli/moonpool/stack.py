"""A whole Moonpool on this machine: real servers, every service as a process of its own.

Owns which processes there are, the order in which they start and stop, and when the whole is ready.
`moonpool up`, `moonpool bench` and the integration tests start their stacks here.
"""

import asyncio
import os
import shutil
import socket
import sys
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager, suppress
from http import HTTPStatus
from pathlib import Path

import aiohttp

from cluster import keys
from engine.errors import ModelFolderError
from engine.models import resolve_model
from moonpool.cluster_client import ClusterAddresses, control_plane, registered
from moonpool.errors import EXIT_USAGE, CommandError, UsageError
from moonpool.kept_seed import kept_seed
from moonpool.ports import check_port, hold_port
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
from moonpool.stack_plan import STOP_ORDER, Member, StackConfig, members, service_environment

STOP_GRACE_S = 10.0
"""What a service gets on top of its drain time to close what it holds."""
SSD_FOLDER = "ssd"
READY_POLL_S = 0.1
READY_ANSWER_S_MAX = 5.0
SERVER_STOP_S_MAX = 5.0

Report = Callable[[str], None]


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
        self._api_url = ""
        self._ready = False
        self._lost: set[Child] = set()
        """Gateways that ended while others go on."""
        self._port_held: socket.socket | None = None
        self._model_name = ""

    def state(self) -> StackState:
        """Complete once `start` has returned."""
        return StackState(
            name=self._config.name,
            pid=os.getpid(),
            model=self._model_name,
            model_folder=str(self._model_folder),
            url=self._api_url,
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
                self._ready = True
        except TimeoutError:
            raise CommandError(
                f"not ready within {self._config.ready_s_max:g} s; the logs are in {self._logs}"
            ) from None

    async def failure(self) -> CommandError:
        """Wait until a process ends by itself that the stack cannot do without; what to say of it, once the
        end of its log was reported.

        A service that a setting is wrong for has its status passed on: what was typed here came to it.
        """
        child = await self._first_exit()
        while self._can_do_without(child):
            self._lost.add(child)
            self._report(f"{child.name} {child.ending()}; the other gateways go on; see {child.log_path}")
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
        if self._port_held is not None:
            self._port_held.close()
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
        port = self._config.port
        if self._config.gateways > 1:
            self._port_held = hold_port(self._config.host, port)
            port = self._port_held.getsockname()[1]
        settings = ServiceSettings(
            nats_url=self._addresses.nats_url,
            etcd_url=self._addresses.etcd_url,
            model_folder=self._model_folder,
            gateway_bind=self._config.host,
            gateway_port=port,
            gateways_share_port=self._config.gateways > 1,
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
        gateways = [member.instance for member in self._services if member.role == "gateway"]
        expected = [member.instance for member in self._services]
        urls: list[str] = []
        async with control_plane(self._addresses.etcd_url, timeout_s=self._config.ready_s_max) as control:
            async for records in registered(control):
                for instance in [i for i in expected if i in records]:
                    expected.remove(instance)
                    self._report(f"{instance} is ready")
                if not expected:
                    urls = [records[gateway].http_url for gateway in gateways]
                    self._model_name = next(r.model.name for r in records.values() if r.model)
                    break
        await asyncio.gather(*map(_http_ready, urls))
        self._api_url = f"{self._public_url(urls[0])}/v1"

    def _public_url(self, gateway_url: str) -> str:
        """Where all gateways are reached, given where one of them is."""
        if self._port_held is None:
            return gateway_url
        address, _, _ = gateway_url.rpartition(":")
        return f"{address}:{self._port_held.getsockname()[1]}"

    def _can_do_without(self, lost: Child) -> bool:
        """Of several gateways on one port any one is enough, once all have begun."""
        gateways = [child for member, child in self._services.items() if member.role == "gateway"]
        others = [child for child in gateways if child is not lost and child.exit_status is None]
        return self._ready and lost in gateways and bool(others)

    async def _first_exit(self) -> Child:
        children = [child for child in self._children() if child not in self._lost]
        waits = {asyncio.create_task(child.wait()): child for child in children}
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
    async with aiohttp.ClientSession(
        timeout=aiohttp.ClientTimeout(total=READY_ANSWER_S_MAX),
        # It is a process of ours that is asked, about nothing secret: its certificate names another host.
        connector=aiohttp.TCPConnector(ssl=False),
    ) as session:
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
