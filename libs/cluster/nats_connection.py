"""One lasting connection to NATS, whatever happens to the clients under it.

Owns connecting, recovery and the bounds of what waits to be sent. Knows no message and no subscription:
each client that takes over is given to `equip`. Facts of nats-py that shape this file: a server's `-ERR`
closes the client for good, so a client that closed by itself is replaced; what is published while
disconnected is kept and sent late; a lost connection is told of only when the socket took the last bytes,
which a hanging server never lets happen, so a watchdog looks too; a close that meets a reconnection
raises CancelledError by itself.
"""

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from urllib.parse import urlsplit

import nats.errors

from cluster import subjects
from cluster.delivery import tell_connection
from cluster.errors import ConfigError, DeadlineError, DisconnectedError, ProtocolError
from cluster.logs import Logger, without_credentials
from cluster.metrics import ServiceMetrics
from cluster.nats_client import DirectClient

SCHEMES = frozenset({"nats", "tls"})
DEFAULT_SCHEME = "nats"
DEFAULT_PORT = 4222
CONNECT_S_MAX = 2
RECONNECT_WAIT_S = 0.2
PING_INTERVAL_S = 2
PINGS_UNANSWERED_MAX = 2
"""A silent connection counts as lost after about (1 + PINGS_UNANSWERED_MAX) · PING_INTERVAL_S."""
WATCHDOG_S = 1.0
CLOSE_S_MAX = 2.0
BUFFERED_BYTES_MAX = 8 * 1024 * 1024
"""What publishes may leave waiting for the connection, while it is down or slow."""
FLUSH_S_MAX = 5.0
OVERFLOW_TOLD_S = 1.0
"""Between two log lines of dropped messages of one family."""
HEADER_BYTES_MAX = 256
"""Room for our two headers: the server's max_payload counts it, and ends the connection of who exceeds it."""

CLIENT_ERRORS = (nats.errors.Error, OSError, TimeoutError)


class NatsConnection:
    """For the event loop's thread. Between `open` and `close` there is always a client or one coming."""

    def __init__(
        self,
        urls: Sequence[str],
        name: str,
        metrics: ServiceMetrics,
        log: Logger,
        equip: Callable[[DirectClient], Awaitable[None]],
    ) -> None:
        """`equip` gives a client that takes over what it must listen to."""
        self._urls = list(urls)
        self._name = name
        self._metrics = metrics
        self._log = log
        self._equip = equip
        self._client: DirectClient | None = None
        self._connected = False
        self._closing = False
        self._callbacks: list[Callable[[bool], None]] = []
        self._reopening: asyncio.Task[None] | None = None
        self._watchdog: asyncio.Task[None] | None = None
        self._last_error = ""
        self._overflow_told_at_s: dict[str, float] = {}
        """By family of subjects."""

    @property
    def connected(self) -> bool:
        return self._connected

    @property
    def client(self) -> DirectClient:
        assert self._client is not None, "open comes first"
        return self._client

    def on_change(self, callback: Callable[[bool], None]) -> None:
        self._callbacks.append(callback)

    async def open(self, timeout_s: float) -> None:
        """DisconnectedError where no server answers in time."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._connect()
        except CLIENT_ERRORS as error:
            await self.close()
            raise DisconnectedError(f"no NATS server answers within {timeout_s:g} s") from error
        self._watchdog = asyncio.create_task(self._watch())

    async def send(self, subject: str, data: bytes, headers: bytes | None, reply: str = "") -> None:
        """`headers` as they go over the wire. Raises as `Bus.publish` does."""
        payload_bytes_max = self.client.max_payload - HEADER_BYTES_MAX
        if len(data) > payload_bytes_max:
            raise ProtocolError(
                f"message of {len(data)} bytes on {subject}: the limit is {payload_bytes_max}"
            )
        try:
            await self.client.publish(subject, data, reply, headers)  # type: ignore[arg-type]  # see `nats_client`
        except nats.errors.BadSubjectError as error:
            raise ProtocolError(f"{subject!r} is no subject") from error
        except nats.errors.OutboundBufferLimitError as error:
            raise DisconnectedError(
                f"the bus is disconnected and {BUFFERED_BYTES_MAX} bytes are waiting already"
            ) from error
        except CLIENT_ERRORS as error:
            raise DisconnectedError(f"the bus is disconnected: {error}") from error

    async def flush(self, timeout_s: float) -> None:
        if not self._connected:
            raise DisconnectedError("the bus is disconnected")
        try:
            async with asyncio.timeout(timeout_s):
                await _round_trip(self.client)
        except TimeoutError as error:
            raise DeadlineError(f"the bus did not answer a flush within {timeout_s:g} s") from error
        except CLIENT_ERRORS as error:
            raise DisconnectedError(f"the bus is disconnected: {error}") from error

    async def close(self) -> None:
        self._closing = True
        for task in (self._reopening, self._watchdog):
            if task is not None:
                task.cancel()
        if self._client is not None:
            await _close_client(self._client)
        self._set_connected(False)

    async def _connect(self) -> None:
        client = DirectClient()
        try:
            await client.connect(
                self._urls,
                name=self._name,
                error_cb=self._on_error,
                disconnected_cb=partial(self._on_disconnected, client),
                reconnected_cb=partial(self._on_reconnected, client),
                closed_cb=partial(self._on_closed, client),
                connect_timeout=CONNECT_S_MAX,
                reconnect_time_wait=RECONNECT_WAIT_S,  # type: ignore[arg-type]  # any number will do
                max_reconnect_attempts=-1,
                ping_interval=PING_INTERVAL_S,
                max_outstanding_pings=PINGS_UNANSWERED_MAX,
                pending_size=BUFFERED_BYTES_MAX,
                flush_timeout=FLUSH_S_MAX,
            )
            # Before `equip`: what subscribes from here on goes to this client by itself.
            self._client = client
            await self._equip(client)
        except BaseException:
            await _close_client(client)
            raise
        self._set_connected(client.is_connected)

    def _start_reopening(self) -> None:
        if not self._closing and (self._reopening is None or self._reopening.done()):
            self._log.error("the bus connection ended for good, opening another")
            self._reopening = asyncio.create_task(self._reopen())

    async def _reopen(self) -> None:
        """Until a client has taken over: nobody else would try again."""
        while not self._connected:
            # Also one that was lost as it took over: it would come back beside the next one.
            await _close_client(self.client)
            try:
                await self._connect()
            except CLIENT_ERRORS as error:
                self._log.warning("bus not reopened yet", error=error)
            except Exception as error:
                self._log.exception("bus not reopened yet", error)
            await asyncio.sleep(0 if self._connected else RECONNECT_WAIT_S)

    async def _watch(self) -> None:
        suspicions = 0
        while True:
            await asyncio.sleep(WATCHDOG_S)
            suspicions = suspicions + 1 if self._connected and not self.client.is_connected else 0
            if suspicions > 1:
                self._set_connected(False)
                self._start_reopening()

    async def _on_error(self, error: Exception) -> None:
        if isinstance(error, nats.errors.SlowConsumerError):
            self._tell_overflow(error.subject)
            return
        # While the server is away each attempt fails alike: once is enough.
        text = f"{type(error).__name__}: {error}"
        if self._connected or text != self._last_error:
            self._log.warning("bus error", error=text)
        self._last_error = text

    def _tell_overflow(self, subject: str) -> None:
        """Each is counted; a flood is not made one of log lines too."""
        family, now_s = subjects.family(subject), time.monotonic()
        self._metrics.bus_dropped.labels(family, "overflow").inc()
        if now_s - self._overflow_told_at_s.get(family, -OVERFLOW_TOLD_S) >= OVERFLOW_TOLD_S:
            self._overflow_told_at_s[family] = now_s
            self._log.warning("message dropped", subject=subject, reason="overflow")

    async def _on_disconnected(self, client: DirectClient) -> None:
        if client is self._client:
            self._set_connected(False)

    async def _on_reconnected(self, client: DirectClient) -> None:
        if client is self._client:
            self._set_connected(True)

    async def _on_closed(self, client: DirectClient) -> None:
        if client is self._client:
            self._set_connected(False)
            self._start_reopening()

    def _set_connected(self, connected: bool) -> None:
        self._metrics.bus_connected.set(connected)
        if connected == self._connected:
            return
        self._connected = connected
        if connected:
            self._last_error = ""
            self._log.info("bus connected")
        elif not self._closing:
            self._metrics.bus_connection_losses.inc()
            self._log.warning("bus disconnected")
        tell_connection(self._callbacks, connected, self._log)


def server_urls(url: str) -> list[str]:
    """Each `nats://host:port` or `tls://host:port` of `url`, which are separated by commas; scheme and port
    may be left out. Raises ConfigError for any other form."""
    return [_server_url(part.strip()) for part in url.split(",")]


def _server_url(part: str) -> str:
    url = part if "://" in part else f"{DEFAULT_SCHEME}://{part}"
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        raise _malformed(part) from None
    if parts.scheme not in SCHEMES or not parts.hostname or parts.path.strip("/"):
        raise _malformed(part)
    return f"{parts.scheme}://{parts.netloc}" + ("" if port else f":{DEFAULT_PORT}")


def _malformed(part: str) -> ConfigError:
    return ConfigError(f"nats_url: {without_credentials(part)!r} must have the form nats://host:port")


async def _round_trip(client: DirectClient) -> None:
    """Until the server has taken all that was sent before.

    The client's own flush does not tell: its PING goes straight to the socket, past a subscription that
    still waits to be sent, and what others publish meanwhile is lost.
    """
    echo = await client.subscribe(client.new_inbox())
    try:
        await client.publish(echo.subject)
        await echo.next_msg(timeout=None)
    finally:
        with contextlib.suppress(*CLIENT_ERRORS):
            await echo.unsubscribe()


async def _close_client(client: DirectClient) -> None:
    """Close it within CLOSE_S_MAX; where the server hangs, its socket goes when the server does."""
    closing = asyncio.create_task(client.close())
    done, late = await asyncio.wait({closing}, timeout=CLOSE_S_MAX)
    for task in late:
        task.cancel()
    for task in done:
        if not task.cancelled():
            # Retrieved, so that asyncio does not report what is of no use to anybody any more.
            task.exception()
