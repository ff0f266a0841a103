"""HTTP of every service: /live, /ready, /health, /metrics, /version, and the service's own routes."""

import socket
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib.metadata import version

from aiohttp import web

from cluster.errors import ConfigError
from cluster.metrics import CONTENT_TYPE, ServiceMetrics
from cluster.wire import encode_record
from kvindex.core import InstanceId
from policy.core import Role

BACKLOG_MAX = 1024
CLOSE_S_MAX = 2.0
"""What open HTTP connections get at close."""
VERSION = version("moonpool")


@dataclass(frozen=True, slots=True)
class Health:
    """What `/health` and `/ready` answer, with status 200 where `ready` and 503 where not."""

    ready: bool
    reason: str
    """Why it is not ready; empty where it is."""
    instance: InstanceId
    incarnation: int
    roles: tuple[Role, ...]
    registered: bool
    bus_connected: bool
    control_connected: bool


def listen(bind: str, port: int) -> socket.socket:
    """A listening socket, so that the port is known before anything is served on it."""
    family = socket.AF_INET6 if ":" in bind else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((bind, port))
        listener.listen(BACKLOG_MAX)
    except OSError as error:
        listener.close()
        raise ConfigError(f"--bind {bind} --http-port {port}: {error.strerror}") from error
    return listener


class AdminServer:
    def __init__(
        self,
        listener: socket.socket,
        health: Callable[[], Health],
        metrics: ServiceMetrics,
        routes: Iterable[web.RouteDef],
        *,
        request_bytes_max: int,
    ) -> None:
        self._listener = listener
        self._health = health
        self._metrics = metrics
        app = web.Application(client_max_size=request_bytes_max)
        own = [
            web.get("/live", self._live),
            web.get("/ready", self._ready),
            web.get("/health", self._ready),
            web.get("/metrics", self._exposition),
            web.get("/version", self._version),
        ]
        app.add_routes([*routes, *own])
        self._runner = web.AppRunner(
            app,
            handle_signals=False,
            access_log=None,
            shutdown_timeout=CLOSE_S_MAX,
            handler_cancellation=True,
        )

    async def start(self) -> None:
        await self._runner.setup()
        await web.SockSite(self._runner, self._listener).start()

    async def close(self) -> None:
        await self._runner.cleanup()
        self._listener.close()

    async def _live(self, _: web.Request) -> web.Response:
        return web.json_response({"live": True})

    async def _ready(self, _: web.Request) -> web.Response:
        health = self._health()
        status = 200 if health.ready else 503
        return web.Response(body=encode_record(health), status=status, content_type="application/json")

    async def _exposition(self, _: web.Request) -> web.Response:
        return web.Response(body=self._metrics.exposition(), headers={"Content-Type": CONTENT_TYPE})

    async def _version(self, _: web.Request) -> web.Response:
        return web.json_response({"version": VERSION})
