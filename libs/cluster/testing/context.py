"""A ServiceContext over fakes, for tests of a service's parts without its process."""

from cluster.context import ServiceConfig, ServiceContext
from cluster.logs import Level, Logger
from cluster.metrics import ServiceMetrics
from cluster.registry import Registry
from cluster.testing.bus import FakeBroker, FakeBus
from cluster.testing.control import FakeStore
from kvindex.core import InstanceId
from policy.core import Role

START_S_MAX = 5.0


async def fake_context(
    instance: str,
    roles: tuple[Role, ...],
    *,
    broker: FakeBroker | None = None,
    store: FakeStore | None = None,
    config: ServiceConfig | None = None,
    incarnation: int = 1,
) -> ServiceContext:
    """Several with the same broker and store make a cluster. Close its `registry` and `bus` afterwards."""
    metrics = ServiceMetrics()
    log = Logger(Level.ERROR)
    control = (store or FakeStore()).control()
    registry = Registry(control, metrics, log, grace_s=1.0)
    await registry.start(timeout_s=START_S_MAX)
    return ServiceContext(
        instance=InstanceId(instance),
        incarnation=incarnation,
        roles=roles,
        config=config or ServiceConfig(),
        bus=FakeBus(broker or FakeBroker(), instance, incarnation, metrics, log),
        control=control,
        registry=registry,
        metrics=metrics,
        log=log,
        cluster_seed=bytes(32),
        http_url="http://127.0.0.1:0",
    )
