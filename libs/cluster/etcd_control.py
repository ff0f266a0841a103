"""The control plane over etcd: the only file that knows the client `etcd3`.

Owns the connection and its recovery. The client blocks, so calls run on a few threads, each watch on one
of its own that hands events to the loop. Facts of python3-etcd3 0.13 that shape this file: an endpoint
that failed once is refused for 300 s unless told otherwise, and the client's own watcher dies without a
word when the connection is lost, so watches use the generated gRPC stub directly.
"""

import asyncio
import contextlib
import math
import threading
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar
from urllib.parse import urlsplit

import grpc  # type: ignore[import-untyped]
from etcd3 import Endpoint, MultiEndpointEtcd3Client, etcdrpc, exceptions, utils

from cluster.control import Deleted, Lease, Listing, Put, Versioned, WatchEvent
from cluster.errors import ConfigError, DisconnectedError, LeaseLostError
from cluster.logs import Logger, without_credentials
from cluster.metrics import ServiceMetrics

CALL_THREADS_MAX = 4
CALL_S_MAX = 3.0
WATCH_RETRY_S = 0.25
EVENTS_MAX = 4096
"""Events that may wait for a slow watcher; beyond, they are dropped and it gets a new listing."""
CLOSE_S_MAX = 2.0
ETCD_PORT = 2379

_CHANNEL_OPTIONS = (
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1000),
    # etcd refuses pings more often than every 5 s.
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.enable_http_proxy", 0),
    ("grpc.use_local_subchannel_pool", 1),
)
# A member that lost its leader cancels the watch instead of going quiet.
_WATCH_METADATA = (("hasleader", "true"),)

ResultT = TypeVar("ResultT")


_SERVER_ERRORS = (exceptions.Etcd3Exception, grpc.RpcError, TimeoutError)


class EtcdControl:
    """Implements `cluster.control.ControlPlane`; make one with `connect`."""

    def __init__(self, url: str, metrics: ServiceMetrics, log: Logger, call_timeout_s: float) -> None:
        self._servers = [_parse_server(part) for part in url.split(",")]
        self._next_server = 0
        self.metrics = metrics
        self._log = log
        self._call_timeout_s = call_timeout_s
        self._executor = ThreadPoolExecutor(CALL_THREADS_MAX, thread_name_prefix="etcd")
        self._client_lock = threading.Lock()
        self._client: MultiEndpointEtcd3Client | None = None
        self._connected = False
        self._watches: set[_Watch] = set()
        self._closed = False

    @classmethod
    async def connect(
        cls,
        url: str,
        *,
        metrics: ServiceMetrics,
        log: Logger,
        timeout_s: float,
        call_timeout_s: float = CALL_S_MAX,
    ) -> "EtcdControl":
        """A control plane that answered once. `url` may be several, separated by commas, each
        `http://host:port`.

        Raises DisconnectedError where no server answers within `timeout_s`, ConfigError for a bad URL.
        """
        control = cls(url, metrics, log, call_timeout_s)
        try:
            async with asyncio.timeout(timeout_s):
                await control._reach()
        except TimeoutError as error:
            raise DisconnectedError(f"no etcd answers at {url} within {timeout_s:g} s") from error
        finally:
            if not control.connected:
                await control.close()
        return control

    async def _reach(self) -> None:
        while not self._connected:
            try:
                await self.get("/")
            except DisconnectedError:
                await asyncio.sleep(WATCH_RETRY_S)

    @property
    def connected(self) -> bool:
        return self._connected

    async def get(self, key: str) -> bytes | None:
        def call(client: MultiEndpointEtcd3Client) -> bytes | None:
            value: bytes | None = client.get(key)[0]
            return value

        return await self._call("get", call)

    async def get_versioned(self, key: str) -> Versioned | None:
        def call(client: MultiEndpointEtcd3Client) -> Versioned | None:
            value, metadata = client.get(key)
            return None if value is None else Versioned(value, metadata.mod_revision)

        return await self._call("get", call)

    async def get_prefix(self, prefix: str) -> dict[str, bytes]:
        listing = await self._call("get_prefix", lambda client: _list(client, prefix)[1])
        return listing.entries

    async def put(self, key: str, value: bytes, lease: Lease | None = None) -> None:
        lease_id = _lease_id(lease)

        def call(client: MultiEndpointEtcd3Client) -> None:
            with _lease_of(key):
                client.put(key, value, lease=lease_id)

        await self._call("put", call)

    async def put_if_absent(self, key: str, value: bytes, lease: Lease | None = None) -> bytes:
        lease_id = _lease_id(lease)

        def call(client: MultiEndpointEtcd3Client) -> bytes:
            ops = client.transactions
            with _lease_of(key):
                won, answers = client.transaction(
                    compare=[ops.version(key) == 0],
                    success=[ops.put(key, value, lease_id)],
                    failure=[ops.get(key)],
                )
            return value if won else answers[0][0][0]

        return await self._call("put_if_absent", call)

    async def put_at(self, key: str, value: bytes, revision: int) -> int | None:
        def call(client: MultiEndpointEtcd3Client) -> int | None:
            ops = client.transactions
            won, answers = client.transaction(
                compare=[ops.mod(key) == revision],
                success=[ops.put(key, value), ops.get(key)],
                failure=[],
            )
            # The get is of the same transaction: it sees this put and no later one.
            return int(answers[1][0][1].mod_revision) if won else None

        return await self._call("put_at", call)

    async def delete(self, key: str) -> None:
        await self._call("delete", lambda client: client.delete(key))

    async def grant_lease(self, ttl_s: float) -> Lease:
        lease = await self._call("grant_lease", lambda client: client.lease(math.ceil(ttl_s)))
        return _EtcdLease(self, lease.id, float(lease.ttl))

    def watch_prefix(self, prefix: str) -> AsyncIterator[WatchEvent]:
        return self._watch(prefix)

    async def close(self) -> None:
        self._closed = True
        watches = tuple(self._watches)
        for watch in watches:
            watch.stop()
        with self._client_lock:
            client, self._client = self._client, None
        if client is not None:
            client.close()
        self._executor.shutdown(wait=False)
        for watch in watches:
            await asyncio.to_thread(watch.join, CLOSE_S_MAX)
        self._set_connected(False)

    async def keep_alive(self, lease_id: int) -> bool:
        def call(client: MultiEndpointEtcd3Client) -> bool:
            return any(answer.TTL > 0 for answer in client.refresh_lease(lease_id))

        return await self._call("keep_alive", call)

    async def revoke(self, lease_id: int) -> None:
        def call(client: MultiEndpointEtcd3Client) -> None:
            try:
                client.revoke_lease(lease_id)
            except grpc.RpcError as error:
                if error.code() != grpc.StatusCode.NOT_FOUND:
                    raise

        await self._call("revoke", call)

    async def _call(self, operation: str, call: Callable[[MultiEndpointEtcd3Client], ResultT]) -> ResultT:
        """Run `call` on a thread; any trouble with the servers becomes DisconnectedError."""
        loop = asyncio.get_running_loop()
        started_s = loop.time()
        outcome = "error"
        try:
            if self._closed:
                raise DisconnectedError("the control plane's client is closed")
            # The client's own deadline comes first; this one bounds the wait for a free thread.
            pending = loop.run_in_executor(self._executor, self._run, call)
            async with asyncio.timeout(2 * self._call_timeout_s):
                result = await pending
            outcome = "ok"
            self._set_connected(True)
            return result
        except _SERVER_ERRORS as error:
            self._set_connected(False)
            raise DisconnectedError(f"etcd: {operation} failed: {_describe(error)}") from error
        finally:
            elapsed_s = loop.time() - started_s
            self.metrics.control_call_s.labels(operation, outcome).observe(elapsed_s)

    def _run(self, call: Callable[[MultiEndpointEtcd3Client], ResultT]) -> ResultT:
        with self._client_lock:
            client = self._client or self.new_client()
            self._client = client
        try:
            return call(client)
        except _SERVER_ERRORS:
            with self._client_lock:
                # Not closed here: other threads may be using it; it goes with its last user.
                if self._client is client:
                    self._client = None
            raise

    def new_client(self) -> MultiEndpointEtcd3Client:
        """Of the next server, where there are several; connects when first used."""
        host, port = self._servers[self._next_server % len(self._servers)]
        self._next_server += 1
        endpoint = Endpoint(host, port, secure=False, time_retry=0.0, opts=_CHANNEL_OPTIONS)
        return MultiEndpointEtcd3Client([endpoint], timeout=self._call_timeout_s)

    def _set_connected(self, connected: bool) -> None:
        self.metrics.control_connected.set(connected)
        if connected != self._connected:
            self._connected = connected
            if not connected and not self._closed:
                self._log.warning("control plane disconnected")

    async def _watch(self, prefix: str) -> AsyncGenerator[WatchEvent, None]:
        watch = _Watch(prefix, self.new_client, asyncio.get_running_loop(), self.metrics, self._log)
        self._watches.add(watch)
        watch.start()
        try:
            while (event := await watch.next_event()) is not None:
                yield event
        finally:
            watch.stop()
            self._watches.discard(watch)


class _EtcdLease:
    def __init__(self, control: EtcdControl, lease_id: int, ttl_s: float) -> None:
        self._control = control
        self.lease_id = lease_id
        self._ttl_s = ttl_s

    @property
    def ttl_s(self) -> float:
        return self._ttl_s

    async def keep_alive(self) -> bool:
        return await self._control.keep_alive(self.lease_id)

    async def revoke(self) -> None:
        await self._control.revoke(self.lease_id)


def _lease_id(lease: Lease | None) -> int | None:
    assert lease is None or isinstance(lease, _EtcdLease), "a lease of another control plane"
    return None if lease is None else lease.lease_id


@contextlib.contextmanager
def _lease_of(key: str) -> Iterator[None]:
    """Nothing but the lease of a put can be what is not found."""
    try:
        yield
    except grpc.RpcError as error:
        if error.code() == grpc.StatusCode.NOT_FOUND:
            raise LeaseLostError(f"the lease for {key} is gone") from error
        raise


class _Watch:
    """One prefix watched by one thread: list, watch from the next revision, over again after trouble."""

    def __init__(
        self,
        prefix: str,
        new_client: Callable[[], MultiEndpointEtcd3Client],
        loop: asyncio.AbstractEventLoop,
        metrics: ServiceMetrics,
        log: Logger,
    ) -> None:
        self._prefix = prefix
        self._new_client = new_client
        self._loop = loop
        self._metrics = metrics
        self._log = log
        self._events: deque[WatchEvent] = deque()
        self._overflowed = False
        self._arrived = asyncio.Event()
        self._stopped = threading.Event()
        self._stream_lock = threading.Lock()
        self._stream: Any = None
        self._thread = threading.Thread(target=self._run, name=f"etcd-watch {prefix}", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stopped.set()
        self._cancel_stream()
        self._arrived.set()

    def join(self, timeout_s: float) -> None:
        self._thread.join(timeout_s)

    async def next_event(self) -> WatchEvent | None:
        """None once stopped."""
        while not self._stopped.is_set():
            if self._events:
                return self._events.popleft()
            self._arrived.clear()
            await self._arrived.wait()
        return None

    def _run(self) -> None:
        while not self._stopped.is_set():
            client = self._new_client()
            try:
                self._list_and_follow(client)
            except _SERVER_ERRORS as error:
                if not self._stopped.is_set():
                    self._log.warning("watch interrupted", prefix=self._prefix, error=_describe(error))
            except Exception as error:
                # This thread must not end without a word: the registry would stand still for good.
                if not self._stopped.is_set():
                    self._log.exception("watch failed", error, prefix=self._prefix)
            finally:
                client.close()
            self._metrics.control_watch_restarts.inc()
            self._stopped.wait(WATCH_RETRY_S)

    def _list_and_follow(self, client: MultiEndpointEtcd3Client) -> None:
        """Return when the server ended the watch (compaction, leader lost); raise when it went away."""
        revision, listing = _list(client, self._prefix)
        self._hand_over(listing)
        key = utils.to_bytes(self._prefix)
        create = etcdrpc.WatchCreateRequest(
            key=key, range_end=utils.prefix_range_end(key), start_revision=revision + 1
        )
        asking = _OneRequest(etcdrpc.WatchRequest(create_request=create))
        stream = etcdrpc.WatchStub(client.channel).Watch(asking, metadata=_WATCH_METADATA)
        with self._stream_lock:
            self._stream = stream
        if self._stopped.is_set():
            stream.cancel()
        try:
            for response in stream:
                if response.canceled or response.compact_revision:
                    return
                for event in response.events:
                    self._hand_over(_watch_event(event))
        finally:
            stream.cancel()
            asking.end()

    def _hand_over(self, event: WatchEvent) -> None:
        # The loop is closed only at the process's end, when nobody watches any more.
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._take, event)

    def _take(self, event: WatchEvent) -> None:
        if isinstance(event, Listing):
            self._events.clear()
            self._overflowed = False
        elif self._overflowed or len(self._events) >= EVENTS_MAX:
            # What is lost here the next listing brings back.
            self._overflowed = True
            self._cancel_stream()
            return
        self._events.append(event)
        self._arrived.set()

    def _cancel_stream(self) -> None:
        with self._stream_lock:
            if self._stream is not None:
                self._stream.cancel()


class _OneRequest:
    """A request stream that stays open: gRPC ends a watch whose requests have ended."""

    def __init__(self, request: Any) -> None:
        self._requests = [request]
        self._ended = threading.Event()

    def __iter__(self) -> "_OneRequest":
        return self

    def __next__(self) -> Any:
        if self._requests:
            return self._requests.pop()
        self._ended.wait()
        raise StopIteration

    def end(self) -> None:
        self._ended.set()


def _list(client: MultiEndpointEtcd3Client, prefix: str) -> tuple[int, Listing]:
    """The revision of the listing and the listing."""
    response = client.get_prefix_response(prefix)
    keys = [kv.key.decode("utf-8", "replace") for kv in response.kvs]
    entries = {key: kv.value for key, kv in zip(keys, response.kvs, strict=True)}
    revisions = {key: kv.mod_revision for key, kv in zip(keys, response.kvs, strict=True)}
    return response.header.revision, Listing(entries, revisions)


def _watch_event(event: Any) -> WatchEvent:
    key = event.kv.key.decode("utf-8", "replace")
    if event.type == event.DELETE:
        return Deleted(key)
    return Put(key, event.kv.value, event.kv.mod_revision)


def _describe(error: BaseException) -> str:
    if isinstance(error, grpc.RpcError):
        return f"{error.code().name}: {error.details()}"
    return str(error) or type(error).__name__


def _parse_server(url: str) -> tuple[str, int]:
    try:
        parts = urlsplit(url)
        port = parts.port or ETCD_PORT
    except ValueError:
        raise _malformed(url) from None
    if parts.scheme != "http" or not parts.hostname or parts.username or parts.path.strip("/"):
        raise _malformed(url)
    return parts.hostname, port


def _malformed(url: str) -> ConfigError:
    return ConfigError(f"etcd_url: {without_credentials(url)!r} must have the form http://host:port")
