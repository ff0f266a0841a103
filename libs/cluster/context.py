"""What a service is given and what it must offer: the two sides of the lifecycle in `cluster.service`.

Knows no service and starts nothing.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from aiohttp import web

from cluster.bus import Bus, Handler
from cluster.control import ControlPlane
from cluster.logs import LEVELS, Logger
from cluster.messages import InstanceRecord, ModelInfo
from cluster.metrics import ServiceMetrics
from cluster.registry import Registry
from kvindex.core import InstanceId
from policy.core import LoadSnapshot, Role


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceConfig:
    """The settings of every service; each has a subclass with its own."""

    nats_url: str = field(
        default="nats://127.0.0.1:4222",
        metadata={"help": "NATS server, or several separated by commas; may carry user:password@"},
    )
    etcd_url: str = field(
        default="http://127.0.0.1:2379", metadata={"help": "etcd server, or several separated by commas"}
    )
    host: str = field(default="127.0.0.1", metadata={"help": "where others reach this process"})
    bind: str = field(default="127.0.0.1", metadata={"help": "address that the process listens on"})
    http_port: int = field(
        default=0, metadata={"help": "port of HTTP; 0 takes a free one", "min": 0, "max": 65535}
    )
    log_level: str = field(
        default="info", metadata={"help": "least level that is logged", "choices": tuple(LEVELS)}
    )
    connect_s_max: float = field(
        default=30.0,
        metadata={"help": "seconds to wait for NATS and etcd at start", "min": 0.1, "max": 3600.0},
    )
    drain_s_max: float = field(
        default=30.0,
        metadata={"help": "seconds that running requests get to end at stop", "min": 0.0, "max": 3600.0},
    )
    lease_ttl_s: float = field(
        default=5.0,
        metadata={"help": "seconds a silent process stays registered", "min": 1.0, "max": 600.0},
    )
    cluster_secret: str = field(
        default="",
        repr=False,
        metadata={
            "help": "what instances prove to each other before they exchange KV: at least 16 bytes, for all "
            "instances the same"
        },
    )
    instance: str = field(
        default="", metadata={"help": "name in the cluster; empty: the role and eight random digits"}
    )


class ServiceContext:
    """What a service works with. `http_url` and all else is final before the service is built."""

    def __init__(
        self,
        *,
        instance: InstanceId,
        incarnation: int,
        roles: tuple[Role, ...],
        config: ServiceConfig,
        bus: Bus,
        control: ControlPlane,
        registry: Registry,
        metrics: ServiceMetrics,
        log: Logger,
        cluster_seed: bytes,
        http_url: str,
    ) -> None:
        self.instance = instance
        self.incarnation = incarnation
        self.roles = roles
        self.config = config
        self.bus = bus
        self.control = control
        self.registry = registry
        self.metrics = metrics
        self.log = log
        self.cluster_seed = cluster_seed
        self.http_url = http_url
        self.load_change = asyncio.Event()
        self.failure: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    def record(
        self, *, model: ModelInfo | None = None, blocks: int = 0, transfer: str | None = None
    ) -> InstanceRecord:
        """What this instance registers."""
        return InstanceRecord(
            instance=self.instance,
            incarnation=self.incarnation,
            roles=self.roles,
            host=self.config.host,
            http_url=self.http_url,
            model=model,
            blocks=blocks,
            transfer=transfer,
        )

    def load_changed(self) -> None:
        """Have the load published soon; cheap, call it at every change."""
        self.load_change.set()

    def fail(self, reason: str) -> None:
        """The service cannot go on (its engine died): it stops without draining, with status 1."""
        if not self.failure.done():
            self.failure.set_result(reason)


class ServiceApp(Protocol):
    """A service as the lifecycle drives it: built, started, registered, drained, closed."""

    async def start(self) -> InstanceRecord:
        """Ready to serve when it returns; `ServiceContext.record` makes what it returns.

        It may raise: then `close` follows and the process ends with status 1.
        """

    def load(self) -> LoadSnapshot:
        """The load now. The lifecycle sets `state` while it drains."""

    def handlers(self) -> Mapping[type, Handler]:
        """What arrives on the instance's own subject, by the class of the body, as of after `start`."""

    def routes(self) -> Iterable[web.RouteDef]:
        """HTTP routes beside the lifecycle's own."""

    async def drain(self, deadline_s: float) -> None:
        """Take nothing new; return when all that runs has ended, or after `deadline_s` seconds."""

    async def close(self) -> None:
        """Let go of everything; called once, whatever happened before."""


Build = Callable[[ServiceContext], ServiceApp | Awaitable[ServiceApp]]
"""Makes the service; what takes long in that, such as allocating files, belongs into what is awaited."""
