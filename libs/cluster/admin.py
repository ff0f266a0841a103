"""HTTP of every service: /live, /ready, /health, /metrics, /version, and the service's own routes.

`/livez`, `/readyz` and `/healthz` are other names of the first three.
"""

import asyncio
import socket
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib.metadata import version

from aiohttp import hdrs, web
from aiohttp.typedefs import Handler, Middleware

from cluster.errors import ConfigError
from cluster.http_options import HttpOptions
from cluster.http_server import SERVER_NAME, BoundedRunner
from cluster.logs import Logger
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


def listen(bind: str, port: int, *, reuse_port: bool = False) -> socket.socket:
    """A listening socket, so that the port is known before anything is served on it. `reuse_port`: others of
    the same user that say so may listen there, too, and the kernel gives each connection to one of them."""
    family = socket.AF_INET6 if ":" in bind else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if reuse_port:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        listener.bind((bind, port))
        listener.listen(BACKLOG_MAX)
    except OSError as error:
        listener.close()
        raise ConfigError(f"--bind {bind} --http-port {port}: {error.strerror}") from error
    return listener


class AdminServer:
    def __init__(
        self,
        listeners: Iterable[socket.socket],
        health: Callable[[], Health],
        metrics: ServiceMetrics,
        routes: Iterable[web.RouteDef],
        log: Logger,
        options: HttpOptions,
    ) -> None:
        """The same is served on each of `listeners`."""
        self._listeners = tuple(listeners)
        self._health = health
        self._metrics = metrics
        self._options = options
        self._servers: list[asyncio.Server] = []
        middlewares = [_first(options)] if options.answer_first is not None else []
        app = web.Application(client_max_size=options.request_bytes_max, middlewares=middlewares)
        own = [
            web.get("/live", self._live),
            web.get("/livez", self._live),
            web.get("/ready", self._ready),
            web.get("/readyz", self._ready),
            web.get("/health", self._ready),
            web.get("/healthz", self._ready),
            web.get("/metrics", self._exposition),
            web.get("/version", self._version),
        ]
        app.add_routes([*routes, *own])
        app.on_response_prepare.append(self._add_headers)
        self._runner = BoundedRunner(app, options, log, shutdown_s=CLOSE_S_MAX)

    async def start(self) -> None:
        await self._runner.setup()
        server = self._runner.server
        assert server is not None, "the runner is set up"
        loop = asyncio.get_running_loop()
        tls = self._options.tls
        # Who connects and never ends the handshake has sent no head either.
        handshake_s = None if tls is None else self._options.header_timeout_s
        for listener in self._listeners:
            self._servers.append(
                await loop.create_server(
                    server, sock=listener, backlog=BACKLOG_MAX, ssl=tls, ssl_handshake_timeout=handshake_s
                )
            )

    async def leave_shared_port(self) -> None:
        """Take no new connections on the port that others listen on, too; those that are open stay."""
        while len(self._servers) > 1:
            self._servers.pop(0).close()

    async def close(self) -> None:
        for server in self._servers:
            server.close()
        await self._runner.cleanup()
        for listener in self._listeners:
            listener.close()

    async def _add_headers(self, request: web.Request, response: web.StreamResponse) -> None:
        response.headers[hdrs.SERVER] = SERVER_NAME
        for name, value in self._options.answer_headers(request).items():
            response.headers.setdefault(name, value)

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


def _first(options: HttpOptions) -> Middleware:
    """The middleware that asks `answer_first`."""

    @web.middleware
    async def first(request: web.Request, handler: Handler) -> web.StreamResponse:
        response = options.answer_first(request) if options.answer_first is not None else None
        return await handler(request) if response is None else response

    return first
