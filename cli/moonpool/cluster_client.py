"""The command's own connection to bus and control plane: it asks, and never registers as an instance."""

import asyncio
import io
import secrets
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass

from cluster import keys, subjects
from cluster.bus import Bus
from cluster.control import ControlPlane, Deleted, Listing, Put
from cluster.errors import ConfigError, MoonpoolError, ProtocolError
from cluster.logs import Level, Logger
from cluster.messages import Describe, InstanceRecord
from cluster.metrics import ServiceMetrics
from cluster.wire import decode_record
from kvindex.core import InstanceId
from moonpool.errors import CommandError, UsageError
from policy.core import LoadSnapshot

INCARNATION = 1
"""Of a client whose id is never used twice."""


@dataclass(frozen=True, slots=True)
class ClusterAddresses:
    nats_url: str
    etcd_url: str


@dataclass(frozen=True, slots=True)
class DescribedInstance:
    """A registered instance; `load` is None where it did not answer in time."""

    record: InstanceRecord
    load: LoadSnapshot | None


@asynccontextmanager
async def control_plane(etcd_url: str, *, timeout_s: float) -> AsyncIterator[ControlPlane]:
    from cluster.etcd_control import EtcdControl

    try:
        control = await EtcdControl.connect(
            etcd_url, metrics=ServiceMetrics(), log=_quiet_log(), timeout_s=timeout_s
        )
    except ConfigError as error:
        raise UsageError(str(error)) from error
    except MoonpoolError as error:
        raise CommandError(str(error)) from error
    try:
        yield control
    finally:
        await control.close()


@asynccontextmanager
async def bus(nats_url: str, *, timeout_s: float) -> AsyncIterator[Bus]:
    from cluster.nats_bus import NatsBus

    instance = InstanceId(f"cli-{secrets.token_hex(4)}")
    try:
        connected = await NatsBus.connect(
            nats_url, instance, INCARNATION, metrics=ServiceMetrics(), log=_quiet_log(), timeout_s=timeout_s
        )
    except ConfigError as error:
        raise UsageError(str(error)) from error
    except MoonpoolError as error:
        raise CommandError(str(error)) from error
    try:
        yield connected
    finally:
        await connected.close()


async def describe_all(addresses: ClusterAddresses, *, timeout_s: float) -> list[DescribedInstance]:
    """Every registered instance, by id, each asked for its load and given `timeout_s` to answer.

    Raises CommandError where bus or control plane cannot be reached.
    """
    async with (
        control_plane(addresses.etcd_url, timeout_s=timeout_s) as control,
        bus(addresses.nats_url, timeout_s=timeout_s) as connection,
    ):
        try:
            entries = await control.get_prefix(keys.INSTANCES)
        except MoonpoolError as error:
            raise CommandError(f"cannot list the instances: {error}") from error
        records = sorted(_records(entries), key=lambda record: record.instance)
        loads = await asyncio.gather(
            *(_describe(connection, record.instance, timeout_s) for record in records)
        )
    return [DescribedInstance(record, load) for record, load in zip(records, loads, strict=True)]


async def registered(control: ControlPlane) -> AsyncIterator[Mapping[InstanceId, InstanceRecord]]:
    """All registered instances, again after every change. It has no end; the caller bounds the wait."""
    present: dict[str, bytes] = {}
    async for event in control.watch_prefix(keys.INSTANCES):
        match event:
            case Listing(entries):
                present = dict(entries)
            case Put(key, value):
                present[key] = value
            case Deleted(key):
                present.pop(key, None)
        yield {record.instance: record for record in _records(present)}


def _records(entries: Mapping[str, bytes]) -> list[InstanceRecord]:
    """What others wrote there is not ours to trust: a malformed record is left out."""
    records = []
    for value in entries.values():
        with suppress(ProtocolError):
            records.append(decode_record(value, InstanceRecord))
    return records


async def _describe(connection: Bus, instance: InstanceId, timeout_s: float) -> LoadSnapshot | None:
    try:
        reply = await connection.request(subjects.instance(instance), Describe(), timeout_s=timeout_s)
    except MoonpoolError:
        return None
    return reply if isinstance(reply, LoadSnapshot) else None


def _quiet_log() -> Logger:
    """The command says what is wrong in one line of its own; the libraries' lines go nowhere."""
    return Logger(Level.ERROR, io.StringIO())
