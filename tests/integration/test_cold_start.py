"""A prefill instance joins warm traffic: it does its share soon, hot prefixes are copied to it, and it is not
flooded meanwhile. Real services and workers with timed engines."""

import asyncio
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
from tests.support.loose_stack import LooseStack
from tests.support.scrape import metrics
from tests.support.timed_stack import send, served, timed_stack

from cluster import subjects
from cluster.bus import Received
from kvindex.core import InstanceId
from moonpool.cluster_client import bus
from moonpool.replay.records import Outcome
from moonpool.replay.schedule import ScheduledRequest
from policy.core import LoadSnapshot
from simulator.trace import TRACE_BLOCK_TOKENS

pytestmark = [pytest.mark.integration, pytest.mark.timeout(180)]

PEERS = ("prefill-0", "prefill-1")
NEWCOMER = "prefill-2"
PREFIXES = 6
"""Of TRACE_BLOCK_TOKENS tokens each; every request begins with one of them."""
PROMPT_TOKENS = TRACE_BLOCK_TOKENS + 64
OUTPUT_TOKENS = 4
PREFILL_TOKEN_S = 0.0015
"""A request takes 0.1 s where its prefix is cached, and 0.9 s where it is not."""
RATE_PER_S = 13.0
"""Two thirds of what two warm instances can do; cold, they could do an eighth of it."""
TTFT_S = 2.0
JOIN_S_MAX = 60.0
WARM_S = 3.0
"""Before the newcomer is started; that takes some seconds more."""
WATCHED_S = 8.0
"""After it has joined."""
WINDOW_S = 3.0
"""In which what instances serve is compared."""
SHARE = 0.9
SETTLED_SHARE_MIN = 0.5
"""Of its peers', in the last window."""
QUEUE_FACTOR_MAX, QUEUE_SLACK = 3, 2
KVMETA_FLAGS = (
    *("--heat-interval-s", "0.2", "--replication-requests-min", "4"),
    *("--replication-copies-max", "8", "--replication-in-flight-max", "4"),
)


@dataclass(frozen=True, slots=True)
class Seen:
    """One load snapshot."""

    at_s: float
    served: float
    """Prompts that are in its cache or computed, so far."""
    queued: int


class Watch:
    """What instances tell of themselves, as it comes."""

    def __init__(self) -> None:
        self.seen: dict[InstanceId, list[Seen]] = {}
        self.changed = asyncio.Event()

    def take(self, received: Received) -> None:
        load = received.body
        assert isinstance(load, LoadSnapshot)
        tokens = load.prefill_tokens_total + load.cached_tokens_total
        seen = Seen(asyncio.get_running_loop().time(), tokens / PROMPT_TOKENS, len(load.queued))
        self.seen.setdefault(load.instance, []).append(seen)
        self.changed.set()

    async def wait_for(self, name: str) -> float:
        """When the first snapshot of `name` came."""
        async with asyncio.timeout(JOIN_S_MAX):
            while InstanceId(name) not in self.seen:
                self.changed.clear()
                await self.changed.wait()
        return self.seen[InstanceId(name)][0].at_s

    def served_between(self, name: str, from_s: float, until_s: float) -> float:
        return self._served_at(name, until_s) - self._served_at(name, from_s)

    def queued_max(self, name: str, from_s: float) -> int:
        return max((seen.queued for seen in self.seen[InstanceId(name)] if seen.at_s >= from_s), default=0)

    def _served_at(self, name: str, at_s: float) -> float:
        seen = self.seen.get(InstanceId(name), [])
        return max((one.served for one in seen if one.at_s <= at_s), default=0.0)

    def share_of_peers(self, until_s: float) -> float:
        """What the newcomer served in the window that ends then, to what its peers did in the mean."""
        from_s = until_s - WINDOW_S
        peers = sum(self.served_between(name, from_s, until_s) for name in PEERS) / len(PEERS)
        return self.served_between(NEWCOMER, from_s, until_s) / max(1.0, peers)


def requests(lasts_s: float) -> list[ScheduledRequest]:
    rng = random.Random(7)
    made, due_s = [], 0.0
    while (due_s := due_s + rng.expovariate(RATE_PER_S)) < lasts_s:
        blocks = (rng.randrange(PREFIXES), rng.getrandbits(62))
        made.append(ScheduledRequest(len(made) + 1, due_s, blocks, PROMPT_TOKENS, OUTPUT_TOKENS))
    return made


def start(stack: LooseStack) -> None:
    names = ("gateway-0", "conductor-0", "decode-0")
    stack.launch("kvmeta-0", *KVMETA_FLAGS)
    for name in names:
        stack.launch(name)
    for name in PEERS:
        stack.launch(name, *prefill_flags())
    for name in ("kvmeta-0", *names, *PEERS):
        stack.wait_ready(name)


def prefill_flags() -> Sequence[str]:
    return ("--prefill-token-s", str(PREFILL_TOKEN_S), "--prefill-fixed-s", "0.004")


async def test_who_joins_does_its_share_soon_and_is_not_flooded(tmp_path: Path) -> None:
    with timed_stack(tmp_path) as stack:
        start(stack)
        watch = Watch()
        async with bus(stack.addresses.nats_url, timeout_s=JOIN_S_MAX) as ear:
            await ear.follow(subjects.LOAD_ALL, watch.take)
            loop = asyncio.get_running_loop()
            enough = asyncio.Event()
            sent = requests(WARM_S + JOIN_S_MAX + WATCHED_S)
            load = asyncio.create_task(send(stack.url("gateway-0"), sent, enough))
            began_s = loop.time()
            await asyncio.wait({load}, timeout=WARM_S)
            stack.launch(NEWCOMER, *prefill_flags())
            joined_s = await watch.wait_for(NEWCOMER)
            await asyncio.wait({load}, timeout=WATCHED_S)
            ended_s = loop.time()
            enough.set()
            records = await load
        copied = metrics(stack.url("kvmeta-0")).value("moonpool_kvmeta_replications_total", outcome="done")

        windows_s = [joined_s + WINDOW_S + step / 4 for step in range(int(4 * (WATCHED_S - WINDOW_S)) + 1)]
        reached = [at_s - joined_s for at_s in windows_s if watch.share_of_peers(at_s) >= SHARE]
        last_share = watch.share_of_peers(ended_s)
        after = [
            record
            for record in records
            if record.sent_s >= joined_s - began_s and record.outcome is not Outcome.INTERRUPTED
        ]
        in_time = sum((record.ttft_s or 0.0) <= TTFT_S for record in served(after)) / max(1, len(after))
        queues = {name: watch.queued_max(name, joined_s) for name in (*PEERS, NEWCOMER)}
        print(
            f"\njoined after {joined_s - began_s:.1f} s; {SHARE:.0%} of its peers' rate within "
            f"{reached[0] if reached else float('nan'):.2f} s (window {WINDOW_S:g} s), {last_share:.0%} at "
            f"the end; {copied:.0f} copies; longest queues {queues}; {in_time:.1%} within {TTFT_S:g} s"
        )
        assert reached, [round(watch.share_of_peers(at_s), 2) for at_s in windows_s]
        assert last_share >= SETTLED_SHARE_MIN
        assert copied >= PREFIXES / 2
        assert queues[NEWCOMER] <= QUEUE_FACTOR_MAX * max(queues[name] for name in PEERS) + QUEUE_SLACK
