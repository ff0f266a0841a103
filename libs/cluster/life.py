"""A service from start to drained, over connections that are there.

Owns what is answered on the instance's subject, when the instance is in the registry, and what `/ready`
says. Knows neither signals nor how connections are made.
"""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from typing import Any, TypeVar

from cluster import subjects
from cluster.admin import Health
from cluster.bus import Handler, Received, Reply
from cluster.context import ServiceApp, ServiceContext
from cluster.errors import ConfigError, ProtocolError, RetryableError
from cluster.logs import Logger
from cluster.messages import Describe
from cluster.registration import Registration
from cluster.registry import Added, RegistryEvent, Removed
from cluster.reporter import report_load
from policy.core import InstanceState, LoadSnapshot

CLOSE_S_MAX = 10.0
"""What each step of closing may take."""
DRAIN_SLACK_S = 1.0
"""What `drain` may take beyond the deadline that it was given."""
FLUSH_S_MAX = 5.0
INSTANCE_CONCURRENCY_MAX = 256
INSTANCE_PENDING_MAX = 8192

EXIT_OK, EXIT_FAILED = 0, 1

ResultT = TypeVar("ResultT")


class Stop:
    """Wishes to end: the first drains, the second ends at once."""

    def __init__(self) -> None:
        self.drain = asyncio.Event()
        self.now = asyncio.Event()

    def ask(self) -> None:
        if self.drain.is_set():
            self.now.set()
        self.drain.set()


class Life:
    """One app from start to drained, over connections that are there."""

    def __init__(self, context: ServiceContext, app: ServiceApp, stop: Stop) -> None:
        self.app = app
        self._context = context
        self._stop = stop
        self._state = InstanceState.SERVING
        self._registration: Registration | None = None
        self._refusal: ConfigError | None = None

    async def run(self) -> int:
        """Until it ended; the exit status. Raises ConfigError where the cluster has no place for it."""
        context = self._context
        record = await unless_stopped(self.app.start(), self._stop.drain)
        if record is None:
            return EXIT_OK
        subscription = await context.bus.subscribe(
            subjects.instance(context.instance),
            dispatch({Describe: self._describe, **self.app.handlers()}),
            concurrency_max=INSTANCE_CONCURRENCY_MAX,
            pending_max=INSTANCE_PENDING_MAX,
        )
        with contextlib.suppress(RetryableError):
            # Whoever learns of us by the registration shall find us listening.
            await context.bus.flush(timeout_s=FLUSH_S_MAX)
        reporting = asyncio.create_task(
            report_load(context.bus, self._load, context.load_change, context.log)
        )
        self._registration = Registration(
            record,
            context.control,
            context.metrics,
            context.log,
            ttl_s=context.config.lease_ttl_s,
            on_taken=self._name_taken,
            on_refused=self._refused,
        )
        context.registry.on_change(self._registry_changed)
        self._registration.start()
        try:
            failed = await self._until_end()
            if not failed:
                await self._drain()
        finally:
            await closing("registration", self._registration.close, context.log)
            reporting.cancel()
            await closing("subscription", subscription.unsubscribe, context.log)
        if self._refusal is not None:
            raise self._refusal
        return EXIT_FAILED if failed else EXIT_OK

    def health(self) -> Health:
        context = self._context
        reason = self._unready_reason()
        return Health(
            ready=not reason,
            reason=reason,
            instance=context.instance,
            incarnation=context.incarnation,
            roles=context.roles,
            registered=self._registered(),
            bus_connected=context.bus.connected,
            control_connected=context.control.connected,
        )

    def _unready_reason(self) -> str:
        if self._registration is None:
            return "starting"
        if self._state is InstanceState.DRAINING:
            return "draining"
        if not self._registered():
            return "not registered"
        if not self._context.bus.connected:
            return "bus disconnected"
        return ""

    def _registered(self) -> bool:
        return self._registration is not None and self._registration.registered

    async def _until_end(self) -> bool:
        """True where the service failed, False where it was asked to stop."""
        stopping = asyncio.create_task(self._stop.drain.wait())
        ends: set[asyncio.Future[Any]] = {stopping, self._context.failure}
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        stopping.cancel()
        if self._context.failure.done():
            self._context.log.error("service failed", reason=self._context.failure.result())
            return True
        return False

    async def _drain(self) -> None:
        context = self._context
        deadline_s = context.config.drain_s_max
        self._state = InstanceState.DRAINING
        context.load_changed()
        context.log.info("draining", deadline_s=deadline_s)
        draining = asyncio.wait_for(self.app.drain(deadline_s), deadline_s + DRAIN_SLACK_S)
        try:
            await unless_stopped(draining, self._stop.now)
        except TimeoutError:
            context.log.warning("not drained in time", deadline_s=deadline_s)
        except Exception as error:
            context.log.exception("drain failed", error)

    async def _describe(self, _: Received) -> Reply:
        return self._load()

    def _load(self) -> LoadSnapshot:
        load = self.app.load()
        return load if self._state is InstanceState.SERVING else replace(load, state=self._state)

    def _registry_changed(self, event: RegistryEvent) -> None:
        """Two processes of one name would both answer what is sent to it: the older one goes. Two that serve
        one model in two ways would not understand each other's blocks: the younger one goes."""
        if isinstance(event, Removed):
            return
        record = event.record if isinstance(event, Added) else event.new
        if record.instance == self._context.instance:
            if record.incarnation > self._context.incarnation:
                self._name_taken()
        elif self._registration is not None:
            self._registration.appeared(record)

    def _name_taken(self) -> None:
        self._context.fail(f"another process took the name {self._context.instance}")

    def _refused(self, why: ConfigError) -> None:
        self._refusal = why
        self._context.fail(str(why))


def dispatch(handlers: Mapping[type, Handler]) -> Handler:
    """One handler that gives each message to the handler of its body's class."""

    async def handle(received: Received) -> Reply:
        handler = handlers.get(type(received.body))
        if handler is None:
            raise ProtocolError(f"{received.envelope.kind} is not for this instance")
        return await handler(received)

    return handle


async def unless_stopped(work: Awaitable[ResultT], stop: asyncio.Event) -> ResultT | None:
    """The result of `work`, or None, with the work cancelled, where `stop` comes first."""
    working = asyncio.ensure_future(work)
    stopping = asyncio.create_task(stop.wait())
    try:
        await asyncio.wait({working, stopping}, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return await working
        working.cancel()
        await asyncio.wait({working}, timeout=CLOSE_S_MAX)
        return None
    finally:
        working.cancel()
        stopping.cancel()


async def closing(what: str, close: Callable[[], Awaitable[None]], log: Logger) -> None:
    """Run one step of closing within its bound; what fails is logged and the next goes on."""
    try:
        async with asyncio.timeout(CLOSE_S_MAX):
            await close()
    except Exception as error:
        log.exception(f"{what} not closed in order", error)
