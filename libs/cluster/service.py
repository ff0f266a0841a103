"""The life of every service's process: start → register → serve → drain → deregister → close.

Owns the order of things, the signals, the exit status. A service brings a `ServiceApp`; what it is given
is a `ServiceContext`. Knows no service.
"""

import asyncio
import contextlib
import os
import re
import secrets
import signal
import socket
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol, TypeVar

from cluster import keys
from cluster.admin import VERSION, AdminServer, listen
from cluster.bus import Bus
from cluster.config import HelpRequested, load_config
from cluster.context import Build, ServiceApp, ServiceConfig, ServiceContext
from cluster.control import ControlPlane
from cluster.errors import ConfigError, MoonpoolError
from cluster.etcd_control import EtcdControl
from cluster.http_options import HttpOptions
from cluster.life import EXIT_FAILED, EXIT_OK, Life, Stop, closing, unless_stopped
from cluster.logs import Level, Logger, capture_standard_logging
from cluster.metrics import ServiceMetrics
from cluster.nats_bus import NatsBus
from cluster.registry import Registry
from kvindex.core import InstanceId
from policy.core import Role

__all__ = [
    "Build",
    "ServiceApp",
    "ServiceConfig",
    "ServiceContext",
    "Stop",
    "run_service",
    "serve",
    "service_main",
]

SEED_BYTES = 32
ENGINE_ROLES = frozenset({Role.PREFILL, Role.DECODE})

EXIT_USAGE = 2

_INSTANCE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}")

ConfigT = TypeVar("ConfigT", bound=ServiceConfig)


class Connect(Protocol):
    """Makes the connections of one process; tests give fakes."""

    async def __call__(
        self,
        config: ServiceConfig,
        instance: InstanceId,
        incarnation: int,
        metrics: ServiceMetrics,
        log: Logger,
    ) -> tuple[Bus, ControlPlane]: ...


def service_main(
    config_class: type[ConfigT],
    role: str,
    start: Callable[[ConfigT], int],
    argv: Sequence[str] | None = None,
) -> int:
    """What `python -m <role>` does: read the settings, then `start(config)`, usually `run_service`.

    The exit status; 2 with one line on standard error where a setting is wrong.
    """
    try:
        config = load_config(config_class, sys.argv[1:] if argv is None else argv, os.environ, role=role)
        return start(config)
    except HelpRequested as help_requested:
        print(help_requested)
        return EXIT_OK
    except ConfigError as error:
        print(f"{role}: {error}", file=sys.stderr)
        return EXIT_USAGE


def run_service(
    config: ServiceConfig,
    roles: tuple[Role, ...],
    build: Build,
    *,
    http: HttpOptions | None = None,
) -> int:
    """Run until SIGTERM or SIGINT; the exit status.

    Raises ConfigError where a setting turns out to be unusable (a port that is taken).
    """

    async def main() -> int:
        stop = Stop()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, stop.ask)
        return await serve(config, roles, build, stop, http=http, capture_logs=True)

    with asyncio.Runner(loop_factory=_loop_factory(roles)) as runner:
        return runner.run(main())


async def serve(
    config: ServiceConfig,
    roles: tuple[Role, ...],
    build: Build,
    stop: Stop,
    *,
    connect: Connect | None = None,
    http: HttpOptions | None = None,
    capture_logs: bool = False,
) -> int:
    """The whole life, within a running loop; the exit status."""
    instance = instance_name(config, roles)
    # Microseconds: grows from process to process of one name, and exact as a JSON number everywhere.
    incarnation = time.time_ns() // 1000
    service = "+".join(roles)
    log = Logger(Level.parse(config.log_level), service=service, instance=instance)
    if capture_logs:
        capture_standard_logging(log)
    metrics = ServiceMetrics()
    metrics.info.labels(instance, service, VERSION).set(1)
    http = http or HttpOptions()
    listeners = _listeners(config, http)
    # The last one is nobody else's: asked there, it is this process that answers.
    http_url, public_url = (_url(config, http, listener) for listener in (listeners[-1], listeners[0]))
    log.info("starting", version=VERSION, incarnation=incarnation, http_url=http_url, public_url=public_url)
    async with contextlib.AsyncExitStack() as stack:
        for listener in listeners:
            stack.callback(listener.close)
        try:
            connecting = (connect or connect_servers)(config, instance, incarnation, metrics, log)
            connections = await unless_stopped(connecting, stop.drain)
            if connections is None:
                return EXIT_OK
            bus, control = connections
            stack.push_async_callback(closing, "bus", bus.close, log)
            stack.push_async_callback(closing, "control plane", control.close, log)
            registry = Registry(control, metrics, log, grace_s=2 * config.lease_ttl_s)
            stack.push_async_callback(closing, "registry", registry.close, log)
            seed = await unless_stopped(_join(registry, control, config.connect_s_max), stop.drain)
            if seed is None:
                return EXIT_OK
            context = ServiceContext(
                instance=instance,
                incarnation=incarnation,
                roles=roles,
                config=config,
                bus=bus,
                control=control,
                registry=registry,
                metrics=metrics,
                log=log,
                cluster_seed=seed,
                http_url=http_url,
            )
            built = build(context)
            app = await unless_stopped(built, stop.drain) if isinstance(built, Awaitable) else built
            if app is None:
                return EXIT_OK
            life = Life(context, app, stop)
            stack.push_async_callback(closing, "service", life.app.close, log)
            admin = AdminServer(listeners, life.health, metrics, life.app.routes(), log, http)
            stack.push_async_callback(closing, "http", admin.close, log)
            await admin.start()
            leaving = asyncio.create_task(_leave_port(admin, stop))
            stack.callback(leaving.cancel)
            return await life.run()
        except ConfigError:
            raise
        except MoonpoolError as error:
            log.error("service failed", error=error)
            return EXIT_FAILED
        except Exception as error:
            log.exception("service failed", error)
            return EXIT_FAILED


async def _leave_port(admin: AdminServer, stop: Stop) -> None:
    """While this process drains, others on its port get the new connections."""
    await stop.drain.wait()
    await admin.leave_shared_port()


async def connect_servers(
    config: ServiceConfig, instance: InstanceId, incarnation: int, metrics: ServiceMetrics, log: Logger
) -> tuple[Bus, ControlPlane]:
    """NATS and etcd, each waited for `connect_s_max` at most."""
    async with contextlib.AsyncExitStack() as stack:
        control = await EtcdControl.connect(
            config.etcd_url, metrics=metrics, log=log, timeout_s=config.connect_s_max
        )
        stack.push_async_callback(control.close)
        bus = await NatsBus.connect(
            config.nats_url, instance, incarnation, metrics=metrics, log=log, timeout_s=config.connect_s_max
        )
        stack.pop_all()
        return bus, control


async def _join(registry: Registry, control: ControlPlane, timeout_s: float) -> bytes:
    """The cluster's seed, once it is known who is there."""
    await registry.start(timeout_s=timeout_s)
    return await control.put_if_absent(keys.SEED, secrets.token_bytes(SEED_BYTES))


def instance_name(config: ServiceConfig, roles: tuple[Role, ...]) -> InstanceId:
    """The configured name, or one made up. It is a word of subjects and a part of keys: ConfigError where
    it could not be."""
    if config.instance and not _INSTANCE_NAME.fullmatch(config.instance):
        raise ConfigError(
            f"--instance {config.instance!r}: must be 1 to 64 letters, digits, - and _, no - or _ in front"
        )
    return InstanceId(config.instance or f"{roles[0]}-{secrets.token_hex(4)}")


def _loop_factory(roles: tuple[Role, ...]) -> Callable[[], asyncio.AbstractEventLoop] | None:
    """uvloop where it is installed, except beside an engine, which shares the process's cores."""
    if not ENGINE_ROLES.isdisjoint(roles):
        return None
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.new_event_loop


def _listeners(config: ServiceConfig, http: HttpOptions) -> tuple[socket.socket, ...]:
    """One on the port of the settings; where others may listen there, one of our own behind it."""
    public = listen(config.bind, config.http_port, reuse_port=http.reuse_port)
    if not http.reuse_port:
        return (public,)
    try:
        return (public, listen(config.bind, 0))
    except ConfigError:
        public.close()
        raise


def _url(config: ServiceConfig, http: HttpOptions, listener: socket.socket) -> str:
    scheme = "http" if http.tls is None else "https"
    return f"{scheme}://{_bracketed(config.host)}:{listener.getsockname()[1]}"


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host
