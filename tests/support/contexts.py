"""A service's context over the in-memory bus and control plane."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from cluster import keys
from cluster.context import ServiceConfig, ServiceContext
from cluster.logs import Level, Logger
from cluster.messages import InstanceRecord
from cluster.metrics import ServiceMetrics
from cluster.registry import Registry
from cluster.testing import FakeBroker, FakeStore
from cluster.wire import encode_record
from kvindex.core import InstanceId
from policy.core import Role

LISTED_S_MAX = 5.0


def register(store: FakeStore, *records: InstanceRecord) -> None:
    for record in records:
        store.put(keys.instance(record.instance), encode_record(record), None)


def deregister(store: FakeStore, name: str) -> None:
    store.delete(keys.instance(InstanceId(name)))


@asynccontextmanager
async def service_context(
    broker: FakeBroker, store: FakeStore, name: str, roles: Role | tuple[Role, ...], config: ServiceConfig
) -> AsyncIterator[ServiceContext]:
    """As the lifecycle makes it, with a registry that is listed already."""
    bus, control = broker.bus(name), store.control()
    metrics, log = ServiceMetrics(), Logger(Level.ERROR)
    registry = Registry(control, metrics, log, grace_s=1.0)
    await registry.start(timeout_s=LISTED_S_MAX)
    try:
        yield ServiceContext(
            instance=InstanceId(name),
            incarnation=1,
            roles=roles if isinstance(roles, tuple) else (roles,),
            config=config,
            bus=bus,
            control=control,
            registry=registry,
            metrics=metrics,
            log=log,
            cluster_seed=b"seed",
            http_url="http://127.0.0.1:1",
        )
    finally:
        await registry.close()
        await bus.close()
        await control.close()
