"""A gateway's place taken by a test: it says which instance computes, decodes, and has the prefix."""

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager

from tests.support.workers import GATEWAY, Ear, packed

from cluster import keys
from cluster.logs import Level, Logger
from cluster.messages import Accepted, InstanceRecord, Submit, Work
from cluster.metrics import ServiceMetrics
from cluster.nats_bus import NatsBus
from cluster.wire import decode_record, encode_record
from kvindex.core import InstanceId
from moonpool.cluster_client import ClusterAddresses, control_plane
from policy.core import RequestId, Role, SamplingParams

CONNECT_S_MAX = 20.0
LEASE_S = 120.0
DEADLINE_S = 60.0


class BusGateway:
    """Registered, so that nobody takes its requests for those of a lost one."""

    def __init__(self, ear: Ear, records: Mapping[InstanceId, InstanceRecord]) -> None:
        self.ear = ear
        self.records = records

    @property
    def fingerprint(self) -> str:
        return next(record.model.fingerprint for record in self.records.values() if record.model)

    @property
    def block_bytes(self) -> int:
        return next(record.model.block_bytes for record in self.records.values() if record.model)

    async def submit(
        self,
        name: str,
        prompt: list[int],
        tokens: int,
        *,
        at: tuple[str, str],
        source: str | None = None,
        prefix_blocks: int = 0,
    ) -> None:
        """A greedy request `name`, computed and decoded `at` these, with a prefix of `source`'s blocks."""
        work = Work(
            request_id=RequestId(name),
            attempt=0,
            gateway=GATEWAY,
            fingerprint=self.fingerprint,
            sampling=SamplingParams(tokens),
            prompt_tokens=len(prompt),
            prompt_token_ids=packed(prompt),
            prompt_parts=0,
            output_token_ids=b"",
            deadline_s=DEADLINE_S,
        )
        prefill, decode = at
        held_by = InstanceId(source) if source is not None else None
        answer = await self.ear.ask(prefill, Submit(work, InstanceId(decode), held_by, prefix_blocks))
        assert answer == Accepted(work.request_id, 0), answer

    async def answer(self, name: str) -> list[int]:
        """All its tokens, once there are no more."""
        await self.ear.wait_finish(name)
        return self.ear.answer(name)


@asynccontextmanager
async def bus_gateway(addresses: ClusterAddresses) -> AsyncIterator[BusGateway]:
    bus = await NatsBus.connect(
        addresses.nats_url,
        GATEWAY,
        1,
        metrics=ServiceMetrics(),
        log=Logger(Level.ERROR),
        timeout_s=CONNECT_S_MAX,
    )
    async with control_plane(addresses.etcd_url, timeout_s=CONNECT_S_MAX) as control:
        entries = await control.get_prefix(keys.INSTANCES)
        records = [decode_record(value, InstanceRecord) for value in entries.values()]
        lease = await control.grant_lease(LEASE_S)
        ours = InstanceRecord(GATEWAY, 1, (Role.GATEWAY,), "127.0.0.1", "http://127.0.0.1:1")
        await control.put(keys.instance(GATEWAY), encode_record(ours), lease)
        ear = Ear(bus)
        await ear.start()
        try:
            yield BusGateway(ear, {record.instance: record for record in records})
        finally:
            await lease.revoke()
            await bus.close()
