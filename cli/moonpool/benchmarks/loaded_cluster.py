"""A cluster at work for `moonpool bench place`: half of its instances prefill, half decode, all with load.

Decisions and load snapshots go on to change it, as they do while a conductor decides.
"""

import random
from collections.abc import Sequence
from dataclasses import replace
from itertools import cycle

from kvhash import BLOCK_TOKENS
from kvindex.core import InstanceId
from policy.core import (
    InstanceState,
    LoadSnapshot,
    Placement,
    QueuedRequest,
    RequestId,
    Role,
    RunningRequest,
    ScheduleRequest,
)
from policy.cost import ASSUMED_COST
from policy.view import ClusterView, InstanceView, expire, with_load, with_placement

MODEL, FINGERPRINT = "bench", "f0"
BLOCKS = 65_536
BLOCK_BYTES = 5 << 20
"""Of a 70B model."""
KV_TOKENS_MAX = 8192
OUTPUT_TOKENS_MAX = 512
BOOKINGS = 64
"""Decisions that no load snapshot shows yet."""
DECISION_S = 1e-3
"""From one decision to the next, on the cluster's clock."""


class LoadedCluster:
    """The view of a conductor that places request after request."""

    def __init__(self, names: Sequence[InstanceId], queued: int, running: int, seed: int) -> None:
        """`queued` requests wait at each prefill, `running` ones hold blocks at each decode."""
        self._rng = random.Random(seed)
        self._decodes = names[1::2]
        self._decisions = 0
        self.now_s = 0.0
        loads = {
            name: self._load(name, *((0, running) if number % 2 else (queued, 0)))
            for number, name in enumerate(names)
        }
        self.view = ClusterView({name: _registered(load, self.now_s) for name, load in loads.items()})
        for seq, load in enumerate(loads.values(), 1):
            self.view = with_load(self.view, load, 1, seq, self.now_s)
        self._snapshots = cycle(tuple(loads.values()))

    def request(self, block_hashes: bytes, prompt_tokens: int) -> ScheduleRequest:
        """The next one to be placed: always of this prompt, never of the same name."""
        self._decisions += 1
        return ScheduleRequest(
            request_id=RequestId(f"request-{self._decisions}"),
            attempt=1,
            model=MODEL,
            fingerprint=FINGERPRINT,
            prompt_tokens=prompt_tokens,
            output_tokens_max=OUTPUT_TOKENS_MAX,
            block_hashes=block_hashes,
            deadline_s=600.0,
        )

    def book(self, placement: Placement, prompt_tokens: int) -> None:
        """What a conductor does after a decision; the bookings of BOOKINGS decisions ago run out."""
        self.now_s += DECISION_S
        self.view = with_placement(self.view, placement, prompt_tokens, self.now_s)
        self.view = expire(self.view, self.now_s, (BOOKINGS - 0.5) * DECISION_S)

    def next_snapshot(self) -> LoadSnapshot:
        """What one of the instances, each in its turn, would say now: its load as it was, told anew."""
        snapshot = next(self._snapshots)
        return replace(snapshot, requests=snapshot.requests + 1)

    def fold(self, snapshot: LoadSnapshot) -> None:
        known = self.view.instances[snapshot.instance]
        self.view = with_load(self.view, snapshot, 1, known.load_seq + 1, self.now_s)

    def _load(self, name: InstanceId, queued: int, running: int) -> LoadSnapshot:
        return LoadSnapshot(
            instance=name,
            roles=(Role.DECODE if running else Role.PREFILL,),
            state=InstanceState.SERVING,
            queued=tuple(self._queued(name, count) for count in range(queued)),
            running=tuple(self._running(name, count) for count in range(running)),
            blocks=BLOCKS,
            blocks_free=BLOCKS // 2,
            cost=ASSUMED_COST,
        )

    def _queued(self, name: InstanceId, number: int) -> QueuedRequest:
        tokens = self._rng.randrange(1, KV_TOKENS_MAX)
        decode = self._rng.choice(self._decodes)
        return QueuedRequest(RequestId(f"{name}-queued-{number}"), 1, decode, tokens, 0, OUTPUT_TOKENS_MAX)

    def _running(self, name: InstanceId, number: int) -> RunningRequest:
        tokens = self._rng.randrange(1, KV_TOKENS_MAX)
        output_tokens = self._rng.randrange(1, OUTPUT_TOKENS_MAX)
        request = RequestId(f"{name}-running-{number}")
        return RunningRequest(request, 1, tokens, output_tokens, OUTPUT_TOKENS_MAX, True)


def _registered(load: LoadSnapshot, now_s: float) -> InstanceView:
    return InstanceView(
        instance=load.instance,
        incarnation=1,
        roles=load.roles,
        host="host",
        model=MODEL,
        fingerprint=FINGERPRINT,
        blocks=load.blocks,
        block_bytes=BLOCK_BYTES,
        block_tokens=BLOCK_TOKENS,
        heard_at_s=now_s,
    )
