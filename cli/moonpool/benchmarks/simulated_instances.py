"""Instances on which requests are placed and that compute nothing, for `moonpool bench decisions`: their
loads say what a busy instance's would, their pools are real, all in one process."""

import asyncio
import random
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, suppress
from itertools import count

from cluster import subjects
from cluster.bus import Received
from cluster.control import ControlPlane
from cluster.errors import ProtocolError
from cluster.messages import Describe, InstanceRecord, ModelInfo
from kvhash import BLOCK_TOKENS, HASH_BYTES
from kvindex.core import InstanceId
from moonpool.benchmarks.simulated_holders import INCARNATION, NOWHERE, Holder, running_holders
from policy.core import (
    ENDED_LISTED_MAX,
    CostCoefficients,
    EndedRequest,
    InstanceState,
    LoadSnapshot,
    Placement,
    RequestId,
    Role,
    RunningRequest,
    ScheduleRequest,
)

LOAD_INTERVAL_S = 0.1
"""As often as a busy instance tells its load."""
RUNNING = 8
"""Requests that each decode instance says it runs."""
KV_TOKENS = 1024
OUTPUT_TOKENS = 64
CHAINS = 16
"""Prompts that each instance holds."""
BLOCKS = 1 << 20
"""What each says it has: room is no matter here."""
KNOWN_SHARE = 0.5
"""Of the requests, those whose prompt some instance holds."""
DEADLINE_S = 600.0
MODEL = ModelInfo(
    name="stub",
    fingerprint="stub",
    context_tokens_max=1 << 20,
    block_tokens=BLOCK_TOKENS,
    block_bytes=1 << 20,
    layers=32,
    dtype="bfloat16",
)
COST = CostCoefficients(
    prefill_fixed_s=0.01,
    prefill_per_token_s=1e-4,
    prefill_per_token_pair_s=1e-9,
    step_fixed_s=0.01,
    step_per_request_s=5e-4,
    step_per_kv_token_s=1e-7,
    transfer_fixed_s=1e-3,
    transfer_bytes_per_s=1e10,
)


class SimulatedInstances:
    """`running_instances` makes them."""

    def __init__(self, holders: Sequence[Holder], prompt_blocks: int) -> None:
        self._holders = holders
        self._prompt_blocks = prompt_blocks
        self._ended: dict[InstanceId, list[EndedRequest]] = {holder.instance: [] for holder in holders}
        self._ended_total = dict.fromkeys(self._ended, 0)

    def requests(self, seed: int = 1) -> Iterator[ScheduleRequest]:
        """Without end; half of them with a prompt that one instance holds."""
        rng = random.Random(seed)
        chains = [chain for holder in self._holders for chain in holder.chains]
        for number in count():
            known = rng.random() < KNOWN_SHARE
            hashes = rng.choice(chains) if known else rng.randbytes(HASH_BYTES * self._prompt_blocks)
            yield ScheduleRequest(
                request_id=RequestId(f"bench-{number}"),
                attempt=0,
                model=MODEL.name,
                fingerprint=MODEL.fingerprint,
                # One token beyond the full blocks: all of them may come from a cache.
                prompt_tokens=self._prompt_blocks * BLOCK_TOKENS + 1,
                output_tokens_max=OUTPUT_TOKENS,
                block_hashes=hashes,
                deadline_s=DEADLINE_S,
            )

    def take(self, placement: Placement) -> None:
        """It came, and has ended when the next load is told: what is booked for it is no longer to come."""
        ended = EndedRequest(placement.request_id, placement.attempt, OUTPUT_TOKENS)
        for instance in (placement.prefill, placement.decode):
            self._ended[instance].append(ended)
            self._ended_total[instance] += 1

    async def tell_loads(self) -> None:
        """All of them, again and again, until cancelled; one after the other, as they come in a cluster."""
        pause_s = LOAD_INTERVAL_S / len(self._holders)
        while True:
            for holder in self._holders:
                await holder.bus.publish(subjects.load(holder.instance), self.load(holder.record))
                await asyncio.sleep(pause_s)

    def load(self, record: InstanceRecord) -> LoadSnapshot:
        ended = self._ended[record.instance]
        del ended[:-ENDED_LISTED_MAX]
        running = tuple(
            RunningRequest(RequestId(f"{record.instance}-{number}"), 0, KV_TOKENS, 1, OUTPUT_TOKENS, True)
            for number in range(RUNNING if Role.DECODE in record.roles else 0)
        )
        return LoadSnapshot(
            instance=record.instance,
            roles=record.roles,
            state=InstanceState.SERVING,
            running=running,
            requests=len(running),
            blocks=record.blocks,
            blocks_free=record.blocks,
            cost=COST,
            ended=tuple(ended),
            ended_total=self._ended_total[record.instance],
        )

    async def listen(self) -> None:
        """Answer conductors that ask for a load."""
        for holder in self._holders:
            await holder.bus.subscribe(subjects.instance(holder.instance), self._described)

    async def _described(self, received: Received) -> LoadSnapshot:
        if not isinstance(received.body, Describe):
            raise ProtocolError(f"{received.envelope.kind} is not for a stub")
        name = received.subject.rpartition(".")[2]
        return self.load(next(holder.record for holder in self._holders if holder.instance == name))


@asynccontextmanager
async def running_instances(
    nats_url: str, control: ControlPlane, instances: int, prompt_blocks: int
) -> AsyncIterator[SimulatedInstances]:
    """Half of them prefill, half decode; they hold prompts and tell their loads as long as this lasts."""
    blocks = CHAINS * prompt_blocks
    async with running_holders(nats_url, control, instances, blocks, prompt_blocks, _record) as holders:
        simulated = SimulatedInstances(holders, prompt_blocks)
        await simulated.listen()
        telling = asyncio.create_task(simulated.tell_loads())
        try:
            yield simulated
        finally:
            telling.cancel()
            with suppress(asyncio.CancelledError):
                await telling


def _record(number: int, _: int) -> InstanceRecord:
    role = Role.DECODE if number % 2 else Role.PREFILL
    instance = InstanceId(f"{role}-{number // 2}")
    return InstanceRecord(instance, INCARNATION, (role,), "127.0.0.1", NOWHERE, MODEL, blocks=BLOCKS)
