"""Hot prefixes are copied by the one kvmeta that has the duty, once to each target."""

import asyncio
from collections import Counter
from dataclasses import dataclass, field, replace

import pytest
from tests.support.eventually import eventually
from tests.support.records import registry, worker
from tests.support.views import FINGERPRINT, P1, P2, snapshot

from cluster import keys, subjects
from cluster.cluster_config import ClusterConfig
from cluster.duty import Duty
from cluster.logs import Level, Logger
from cluster.messages import MatchRequest, PrefixHeat, PrefixHeats, Replicate, Replicated
from cluster.metrics import ServiceMetrics
from cluster.testing import FakeBroker, FakeBus, FakeStore
from kvindex.core import BlockAction, BlockEvent, InstanceId, Tier
from kvindex.directory import Directory
from kvmeta import replication
from kvmeta.matcher import Matcher
from kvmeta.metrics import KvmetaMetrics
from kvmeta.replication import DUTY, ReplicationSettings, Replicator, configured
from policy.core import Role
from policy.heat import HeatCounter
from policy.replicate import ReplicationLimits

pytestmark = pytest.mark.unit

P3 = InstanceId("p3")
PREFIX = b"".join(bytes([number]) * 16 for number in range(1, 6))
PROMPT = PREFIX + b"z" * 16
LIMITS = ReplicationLimits(requests_min=6, copies_max=3, bytes_per_s=1e9, burst_bytes=1e9)
SETTINGS = ReplicationSettings(LIMITS, interval_s=0.02, window_s=30.0, deadline_s=1.0, pause_s=60.0)
WORKERS = registry(*(worker(name, Role.PREFILL) for name in ("p1", "p2", "p3")))
ASK_TIMEOUT_S = 5.0


@dataclass
class Kvmeta:
    """Matcher and replicator as the app puts them together, with a clock that can be moved on."""

    name: str
    broker: FakeBroker
    store: FakeStore
    settings: ReplicationSettings = SETTINGS
    later_s: float = 0.0

    def __post_init__(self) -> None:
        self.bus: FakeBus = self.broker.bus(self.name)
        self.control = self.store.control()
        self.metrics = ServiceMetrics()
        self.directory = Directory()
        self.heat, metrics = HeatCounter(), KvmetaMetrics(self.metrics.registry)
        log = Logger(Level.ERROR)
        self.matcher = Matcher(self.directory, self.heat, metrics, self.clock)
        self.duty = Duty(DUTY, InstanceId(self.name), self.control, log, ttl_s=0.3)
        self.replicator = Replicator(
            self.bus, self.directory, self.heat, self.duty, self.settings, metrics, log, self.clock
        )

    def clock(self) -> float:
        return asyncio.get_running_loop().time() + self.later_s

    async def start(self) -> None:
        self.directory.apply(P1, BlockEvent(BlockAction.STORED, PREFIX, Tier.DRAM))
        self.replicator.registry_changed(WORKERS)
        await self.bus.subscribe(subjects.KVMETA_MATCH, self.matcher.match, queue=subjects.KVMETA_QUEUE)
        await self.replicator.start()

    def value(self, name: str, **labels: str) -> float:
        return self.metrics.registry.get_sample_value(f"moonpool_kvmeta_{name}", labels) or 0.0

    async def rounds(self, number: int) -> None:
        """So many more rounds of the duty's holder have passed."""
        wanted = self.value("replication_rounds_total") + number
        await eventually(lambda: self.value("replication_rounds_total") >= wanted)


@dataclass
class Stage:
    broker: FakeBroker = field(default_factory=FakeBroker)
    store: FakeStore = field(default_factory=FakeStore)
    kvmetas: list[Kvmeta] = field(default_factory=list)
    orders: list[tuple[str, Replicate]] = field(default_factory=list)
    heats: list[PrefixHeats] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.conductor = self.broker.bus("conductor-1")
        self.workers = {name: self.broker.bus(name) for name in WORKERS}
        self.answers = {name: Replicated(5, 5 * 700_000) for name in WORKERS}
        self.gate = asyncio.Event()
        self.gate.set()

    async def listen(self) -> None:
        async def hear(received):
            self.heats.append(received.body)

        await self.conductor.subscribe(subjects.KVMETA_HEAT, hear)
        for name, bus in self.workers.items():
            await bus.subscribe(subjects.instance(name), self._replicated_at(name))

    def _replicated_at(self, name: InstanceId):
        async def replicated(received):
            assert isinstance(received.body, Replicate)
            self.orders.append((name, received.body))
            await self.gate.wait()
            return self.answers[name]

        return replicated

    async def kvmeta(self, name: str, **fields: object) -> Kvmeta:
        made = Kvmeta(name, self.broker, self.store, **fields)
        self.kvmetas.append(made)
        await made.start()
        return made

    async def tell_loads(self, **changes: object) -> None:
        for name, bus in self.workers.items():
            load = replace(snapshot(name, blocks_free=100), **changes)
            await bus.publish(subjects.load(name), load)

    async def ask(self, times: int) -> None:
        for _ in range(times):
            await self.conductor.request(subjects.KVMETA_MATCH, MatchRequest(PROMPT), timeout_s=ASK_TIMEOUT_S)

    async def holder(self) -> Kvmeta:
        await eventually(lambda: any(kvmeta.duty.held for kvmeta in self.kvmetas))
        (holder,) = (kvmeta for kvmeta in self.kvmetas if kvmeta.duty.held)
        return holder

    def targets(self) -> list[str]:
        return sorted(name for name, _ in self.orders)


@pytest.fixture
async def stage():
    made = Stage()
    await made.listen()
    yield made
    made.gate.set()
    for kvmeta in made.kvmetas:
        await kvmeta.replicator.close()


async def test_two_kvmetas_send_a_hot_prefix_exactly_once_to_each_target(stage: Stage):
    """Each answers half of the matches: only both together make the prefix hot."""
    for name in ("kvmeta-1", "kvmeta-2"):
        await stage.kvmeta(name)
    holder = await stage.holder()
    await stage.tell_loads()
    await stage.ask(LIMITS.requests_min)
    await eventually(lambda: len(stage.orders) == 2)
    await stage.ask(10 * LIMITS.requests_min)
    await holder.rounds(5)
    assert stage.targets() == [P2, P3]
    expected = Replicate(FINGERPRINT, P1, PREFIX, SETTINGS.deadline_s)
    assert [order for _, order in stage.orders] == [expected, expected]
    assert holder.value("replications_total", outcome="done") == 2
    assert holder.value("replicated_bytes_total") == 10 * 700_000
    other = next(kvmeta for kvmeta in stage.kvmetas if kvmeta is not holder)
    assert other.value("replication_rounds_total") == 0
    assert (holder.value("replication_duty"), other.value("replication_duty")) == (1, 0)


async def test_what_few_ask_for_is_not_copied(stage: Stage):
    kvmeta = await stage.kvmeta("kvmeta-1")
    await stage.holder()
    await stage.tell_loads()
    await stage.ask(LIMITS.requests_min - 1)
    await kvmeta.rounds(5)
    assert stage.orders == []


async def test_another_threshold_counts_for_what_was_asked_before_it_was_set(stage: Stage):
    kvmeta = await stage.kvmeta("kvmeta-1")
    await stage.holder()
    await stage.tell_loads()
    await stage.ask(LIMITS.requests_min - 1)
    await kvmeta.rounds(3)
    assert stage.orders == []
    kvmeta.replicator.configure(ClusterConfig(replication_requests_min=LIMITS.requests_min - 1))
    await eventually(lambda: len(stage.orders) == 2)


async def test_another_window_counts_anew(stage: Stage):
    kvmeta = await stage.kvmeta("kvmeta-1")
    await stage.holder()
    await stage.tell_loads()
    await stage.ask(LIMITS.requests_min - 1)
    await eventually(lambda: len(stage.heats) == 1)
    await kvmeta.rounds(1)
    kvmeta.replicator.configure(ClusterConfig(replication_window_s=5.0))
    await stage.ask(LIMITS.requests_min - 1)
    await eventually(lambda: len(stage.heats) == 2)
    await kvmeta.rounds(3)
    assert stage.orders == []
    kvmeta.replicator.configure(ClusterConfig(replication_window_s=5.0, replication_copies_max=2))
    await stage.ask(2)
    await eventually(lambda: len(stage.orders) == 1)


def test_the_cluster_goes_before_the_process_and_leaves_the_rest_alone():
    config = ClusterConfig(replication_requests_min=9, replication_window_s=7.0, replication_copies_max=5)
    changed = replace(SETTINGS, limits=replace(LIMITS, requests_min=9, copies_max=5), window_s=7.0)
    assert configured(SETTINGS, config) == changed
    assert configured(SETTINGS, ClusterConfig(strategy="random")) == SETTINGS


async def test_the_next_holder_goes_on_with_what_it_has_summed(stage: Stage):
    for name in ("kvmeta-1", "kvmeta-2"):
        await stage.kvmeta(name)
    first = await stage.holder()
    await stage.ask(LIMITS.requests_min)
    await first.rounds(3)
    assert stage.orders == []
    first.control.cut()
    second = next(kvmeta for kvmeta in stage.kvmetas if kvmeta is not first)
    await eventually(lambda: second.duty.held)
    assert not first.duty.held
    await stage.tell_loads()
    await eventually(lambda: len(stage.orders) == 2)
    await second.rounds(3)
    assert stage.targets() == [P2, P3]
    assert first.value("replications_total", outcome="done") == 0


async def test_who_loses_the_duty_gives_up_what_it_waits_for_and_begins_nothing(stage: Stage):
    stage.gate.clear()
    kvmeta = await stage.kvmeta("kvmeta-1", settings=replace(SETTINGS, deadline_s=60.0))
    await stage.holder()
    await stage.tell_loads()
    await stage.ask(LIMITS.requests_min)
    await eventually(lambda: len(stage.orders) == 2)
    kvmeta.control.cut()
    await eventually(lambda: kvmeta.value("replications_total", outcome="failed") == 2)
    assert not kvmeta.duty.held
    rounds = kvmeta.value("replication_rounds_total")
    kvmeta.later_s += 2 * SETTINGS.pause_s
    for _ in range(3):
        heats = len(stage.heats)
        await stage.ask(2 * LIMITS.requests_min)
        await eventually(lambda heats=heats: len(stage.heats) > heats)
    assert kvmeta.value("replication_rounds_total") == rounds
    assert len(stage.orders) == 2
    assert keys.duty(DUTY).startswith("/moonpool/v1/duty/")


async def test_the_duty_is_left_to_others_at_once(stage: Stage):
    first, second = [await stage.kvmeta(name) for name in ("kvmeta-1", "kvmeta-2")]
    holder = await stage.holder()
    await holder.replicator.close()
    assert keys.duty(DUTY) not in stage.store.entries
    await eventually(lambda: (second if holder is first else first).duty.held)
    assert holder.value("replication_duty") == 0


@pytest.mark.parametrize(
    ("answer", "outcome"),
    [(Replicated(3, 0, "no room"), "partial"), (PrefixHeats(()), "failed"), (None, "failed")],
    ids=["only a part", "nonsense", "no answer"],
)
async def test_what_failed_is_tried_again_after_a_while(
    stage: Stage, answer, outcome, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(replication, "REPLY_SLACK_S", 0.01)
    stage.answers[P2] = answer
    settings = replace(SETTINGS, deadline_s=0.05, limits=replace(LIMITS, copies_max=2))
    kvmeta = await stage.kvmeta("kvmeta-1", settings=settings)
    await stage.holder()
    await stage.tell_loads()
    await stage.ask(LIMITS.requests_min)
    await eventually(lambda: kvmeta.value("replications_total", outcome=outcome) == 1)
    # Another target gets the copy instead.
    await eventually(lambda: Counter(stage.targets()) == {P2: 1, P3: 1})
    await kvmeta.rounds(3)
    assert len(stage.orders) == 2
    kvmeta.later_s += SETTINGS.pause_s + 1.0
    stage.answers[P2] = Replicated(5, 0)
    await stage.tell_loads()
    await stage.ask(LIMITS.requests_min)
    await eventually(lambda: Counter(stage.targets())[P2] == 2)


async def test_bandwidth_is_bounded(stage: Stage):
    """A copy is 5 blocks of 700,000 bytes. In a standing world the budget allows for none at the start."""
    settings = replace(SETTINGS, limits=replace(LIMITS, bytes_per_s=1.0, burst_bytes=5 * 700_000))
    kvmeta = await stage.kvmeta("kvmeta-1", settings=settings)
    await stage.holder()
    await stage.tell_loads()
    await stage.ask(LIMITS.requests_min)
    await kvmeta.rounds(3)
    assert stage.orders == []
    for copies in (1, 2):
        kvmeta.later_s += 5 * 700_000
        await stage.tell_loads()
        await stage.ask(LIMITS.requests_min)
        await eventually(lambda copies=copies: len(stage.orders) == copies)
        await kvmeta.rounds(3)
        assert len(stage.orders) == copies


async def test_no_copy_without_room(stage: Stage):
    kvmeta = await stage.kvmeta("kvmeta-1")
    await stage.holder()
    await stage.tell_loads(blocks_free=4, blocks_cached=1)
    await stage.ask(LIMITS.requests_min)
    await kvmeta.rounds(3)
    assert stage.orders == []


async def test_heat_waits_while_the_bus_is_away(stage: Stage):
    """Nothing of what was counted before is lost, nor told late as if it had been asked for then."""
    for name in ("kvmeta-1", "kvmeta-2"):
        await stage.kvmeta(name)
    holder = await stage.holder()
    (other,) = (kvmeta for kvmeta in stage.kvmetas if kvmeta is not holder)
    await stage.tell_loads()
    other.bus.disconnect()
    for _ in range(LIMITS.requests_min):
        other.heat.count(PROMPT, 5, other.clock())
    await holder.rounds(3)
    other.bus.reconnect()
    assert stage.heats == []
    await eventually(lambda: len(stage.orders) == 2)
    assert stage.heats == [PrefixHeats((PrefixHeat(PREFIX, LIMITS.requests_min),))]


async def test_nonsense_is_refused_and_the_rest_counted(stage: Stage):
    await stage.kvmeta("kvmeta-1")
    await stage.holder()
    await stage.tell_loads()
    stranger = stage.broker.bus("stranger")
    for bad in (PrefixHeats((PrefixHeat(b"short", 100),)), MatchRequest(PREFIX)):
        await stranger.publish(subjects.KVMETA_HEAT, bad)
    await stranger.publish(subjects.load(P1), snapshot("p2"))
    await stranger.publish(subjects.KVMETA_HEAT, PrefixHeats((PrefixHeat(PREFIX, 100),)))
    await eventually(lambda: len(stage.orders) == 2)
