"""Instances that hold blocks and compute nothing, for `moonpool bench kvmeta-restart` and `bench decisions`:
real pools behind real reporters on a real bus, registered as workers are, in one process."""

import io
import random
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

from cluster import keys
from cluster.bus import Bus
from cluster.control import ControlPlane
from cluster.logs import Level, Logger
from cluster.messages import InstanceRecord
from cluster.metrics import ServiceMetrics
from cluster.nats_bus import NatsBus
from cluster.wire import encode_record
from kvhash import HASH_BYTES, BlockHash
from kvindex.core import InstanceId
from kvpool import BlockPool
from policy.core import Role
from worker.pool_reporter import PoolReporter

INCARNATION = 1
CONNECT_S_MAX = 10.0
NOWHERE = "http://127.0.0.1:1"


@dataclass(frozen=True, slots=True)
class Holder:
    """One instance with its chains, each of which it holds whole."""

    record: InstanceRecord
    chains: tuple[bytes, ...]
    bus: Bus

    @property
    def instance(self) -> InstanceId:
        return self.record.instance


def decode_record(number: int, blocks: int) -> InstanceRecord:
    """What an instance registers that serves no model."""
    instance = InstanceId(f"decode-{number}")
    return InstanceRecord(instance, INCARNATION, (Role.DECODE,), "127.0.0.1", NOWHERE, blocks=blocks)


@asynccontextmanager
async def running_holders(
    nats_url: str,
    control: ControlPlane,
    instances: int,
    blocks: int,
    chain_blocks: int,
    record: Callable[[int, int], InstanceRecord] = decode_record,
) -> AsyncIterator[list[Holder]]:
    """`instances` that hold `blocks` each, in chains of `chain_blocks`; they answer as long as this lasts.

    `record(number, blocks)`: what each registers.
    """
    rng = random.Random(1)
    holders = []
    async with AsyncExitStack() as stack:
        for number in range(instances):
            registered = record(number, blocks)
            instance = registered.instance
            pool = BlockPool(blocks)
            chains = tuple(
                _store_chain(pool, rng, min(chain_blocks, blocks - first))
                for first in range(0, blocks, chain_blocks)
            )
            # What happened before it registered was never published: only the inventory tells of it.
            pool.take_events()
            log = Logger(Level.ERROR, io.StringIO())
            bus = await NatsBus.connect(
                nats_url, instance, INCARNATION, metrics=ServiceMetrics(), log=log, timeout_s=CONNECT_S_MAX
            )
            stack.push_async_callback(bus.close)
            reporter = PoolReporter(bus, pool, log)
            await reporter.start()
            stack.push_async_callback(reporter.close)
            await control.put(keys.instance(instance), encode_record(registered))
            holders.append(Holder(registered, chains, bus))
        yield holders


def asked_prompts(holders: Sequence[Holder], prompts: int, seed: int) -> list[tuple[InstanceId, bytes]]:
    """(who holds it, packed hashes): chains of all holders, in turn."""
    rng = random.Random(seed)
    chosen = [holders[number % len(holders)] for number in range(prompts)]
    return [(holder.instance, rng.choice(holder.chains)) for holder in chosen]


def _store_chain(pool: BlockPool, rng: random.Random, blocks: int) -> bytes:
    packed = rng.randbytes(HASH_BYTES * blocks)
    block_ids = pool.allocate(blocks)
    parent: BlockHash | None = None
    for place, block_id in enumerate(block_ids):
        block_hash = BlockHash(packed[HASH_BYTES * place : HASH_BYTES * (place + 1)])
        pool.store(block_id, block_hash, parent)
        parent = block_hash
    pool.release(block_ids)
    return packed
