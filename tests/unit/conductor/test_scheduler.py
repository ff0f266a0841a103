import asyncio
from collections import Counter
from dataclasses import replace
from functools import partial

import pytest
from tests.support.eventually import Clock, eventually
from tests.support.records import gateway, registry, worker
from tests.support.views import D1, D2, P1, P2, queued, request, snapshot

from cluster import subjects
from cluster.delivery import RawMessage
from cluster.errors import RetryableError
from cluster.logs import Level, Logger
from cluster.messages import Decision, MatchReply, MatchRequest
from cluster.metrics import ServiceMetrics
from cluster.testing import FakeBroker, FakeBus
from cluster.wire import encode
from conductor.cluster_state import ClusterState, Recorder
from conductor.config import ConductorConfig
from conductor.metrics import ConductorMetrics
from conductor.policy_limits import PolicyLimits
from conductor.scheduler import FRESH_LOAD_WAITS_MAX, Scheduler
from kvindex.core import InstanceMatch, Tier, TierRun
from policy.choice import PlacementLimits
from policy.core import EndedRequest, Placement, Rejection, RejectReason, RequestId, Role
from policy.predict import outlook

pytestmark = pytest.mark.unit

HASHES = bytes(range(16)) * 62
QUAD = registry(
    worker("p1", Role.PREFILL),
    worker("p2", Role.PREFILL),
    worker("d1", Role.DECODE),
    worker("d2", Role.DECODE),
    gateway("g1"),
)
ASK_TIMEOUT_S = 5.0
_LIMITS = PlacementLimits()


class Conductor:
    """State and scheduler on a bus of their own, as the app puts them together."""

    def __init__(
        self,
        broker: FakeBroker,
        name: str,
        clock: Clock,
        match_timeout_ms: float = 2000,
        recorder: Recorder | None = None,
        limits: PlacementLimits = _LIMITS,
    ) -> None:
        self.bus: FakeBus = broker.bus(name)
        self.metrics = ServiceMetrics()
        log = Logger(Level.ERROR)
        self.state = ClusterState(
            self.bus, log, clock, booking_ttl_s=10.0, describe_timeout_s=1.0, recorder=recorder
        )
        self.limits = PolicyLimits(limits)
        self.scheduler = Scheduler(
            self.bus,
            self.state,
            self.limits.deciding,
            ConductorMetrics(self.metrics.registry),
            log,
            clock,
            match_timeout_ms=match_timeout_ms,
            placed=self.limits.placed,
        )

    async def start(self, subject: str = subjects.SCHEDULE) -> None:
        await self.state.start()
        self.state.registry_changed(QUAD)
        await self.state.described()
        await self.bus.subscribe(
            subject,
            self.scheduler.schedule,
            queue=subjects.CONDUCTOR_QUEUE,
            concurrency_max=ConductorConfig().decisions_in_flight_max,
        )

    def count(self, name: str, value: str, label: str = "outcome") -> float:
        return self.metrics.registry.get_sample_value(f"moonpool_conductor_{name}_total", {label: value}) or 0


class Stage:
    """A broker with one conductor, something to ask from, and a kvmeta that answers as told."""

    def __init__(self, recorder: Recorder | None = None) -> None:
        self.clock = Clock()
        self.broker = FakeBroker()
        self.gateway = self.broker.bus("g1")
        self.kvmeta = self.broker.bus("kvmeta-1")
        self.workers: dict[str, FakeBus] = {}
        self.conductor = Conductor(self.broker, "conductor-1", self.clock, recorder=recorder)
        self.asked_of_kvmeta: list[bytes] = []

    async def answer_matches(self, *matches: InstanceMatch) -> None:
        async def match(received):
            assert isinstance(received.body, MatchRequest)
            self.asked_of_kvmeta.append(received.body.block_hashes)
            return MatchReply(matches)

        await self.kvmeta.subscribe(subjects.KVMETA_MATCH, match, queue=subjects.KVMETA_QUEUE)

    async def ask(self, asked, subject: str = subjects.SCHEDULE):
        return await self.gateway.request(subject, asked, timeout_s=ASK_TIMEOUT_S)

    async def tell_load(self, load) -> None:
        if load.instance not in self.workers:
            self.workers[load.instance] = self.broker.bus(load.instance)
        await self.workers[load.instance].publish(subjects.load(load.instance), load)

    async def decisions(self) -> list[Decision]:
        heard: list[Decision] = []

        async def hear(received):
            heard.append(received.body)

        await self.gateway.subscribe(subjects.DECISION, hear, concurrency_max=1)
        return heard


@pytest.fixture
async def stage() -> Stage:
    made = Stage()
    await made.conductor.start()
    return made


async def test_places_by_what_kvmeta_knows(stage: Stage):
    await stage.answer_matches(InstanceMatch(P2, 50))
    placement = await stage.ask(request(block_hashes=HASHES))
    assert isinstance(placement, Placement)
    assert (placement.prefill, placement.source, placement.prefix_blocks) == (P2, P2, 50)
    assert stage.asked_of_kvmeta == [HASHES]
    assert stage.conductor.count("matches", "answered") == 1
    assert stage.conductor.count("decisions", "placed") == 1


async def test_nobody_is_turned_away_for_a_load_that_is_over(stage: Stage):
    """Both queues were long; what comes while the request waits for its answer says that they are not."""
    view = stage.conductor.state.current
    for name in ("p1", "p2"):
        await stage.tell_load(snapshot(name, queued=(queued("long", 1_000_000),)))
    await eventually(lambda: all(view().instances[name].load for name in (P1, P2)))
    stage.clock.now_s += 0.1
    asking = asyncio.create_task(stage.ask(request(ttft_ms_max=5000.0)))
    await eventually(lambda: stage.conductor.scheduler.in_flight)
    await stage.tell_load(snapshot("p1"))
    assert not asking.done()
    await stage.tell_load(snapshot("p2"))
    assert isinstance(await asking, Placement)
    assert stage.conductor.count("decisions", "placed") == 1
    assert stage.conductor.count("decisions", "ttft") == 0


async def test_a_load_that_goes_on_or_is_not_told_turns_away(stage: Stage):
    for name in ("p1", "p2"):
        await stage.tell_load(snapshot(name, queued=(queued("long", 1_000_000),)))
    await eventually(lambda: stage.conductor.state.current().instances[P2].load is not None)
    for after_s in (0.0, 0.1):
        stage.clock.now_s += after_s
        rejection = await stage.ask(request(f"late-{after_s}", ttft_ms_max=5000.0))
        assert isinstance(rejection, Rejection)
        assert rejection.reason is RejectReason.TTFT
    assert stage.conductor.count("decisions", "ttft") == 2


async def test_a_crowd_that_cannot_be_served_leaves_places_to_decide_others(stage: Stage):
    """All wait for loads that do not come; who can be placed is placed meanwhile."""
    for name in ("p1", "p2"):
        await stage.tell_load(snapshot(name, queued=(queued("long", 1_000_000),)))
    await eventually(lambda: all(stage.conductor.state.current().instances[name].load for name in (P1, P2)))
    stage.clock.now_s += 0.1
    crowd = [
        asyncio.create_task(stage.ask(request(f"r{number}", ttft_ms_max=1.0)))
        for number in range(4 * FRESH_LOAD_WAITS_MAX)
    ]
    await eventually(lambda: stage.conductor.scheduler.in_flight == FRESH_LOAD_WAITS_MAX)
    assert isinstance(await stage.ask(request("patient", deadline_s=1e6)), Placement)
    assert not all(asked.done() for asked in crowd)
    answers = await asyncio.gather(*crowd)
    assert {type(answer) for answer in answers} == {Rejection}


async def test_targets_that_cannot_be_met_set_no_price_for_others(stage: Stage):
    """They are refused, which costs nobody anything: whoever names them could do so all day."""
    adaptive = PlacementLimits(adaptive=True)
    conductor = stage.conductor = Conductor(stage.broker, "conductor-2", stage.clock, limits=adaptive)
    await conductor.start(subjects.SCHEDULE_STANDBY)
    ask = partial(stage.ask, subject=subjects.SCHEDULE_STANDBY)
    assert isinstance(await ask(request("honest", attempt=0, ttft_ms_max=10_000.0)), Placement)
    for moment in range(4):
        stage.clock.now_s += 0.01
        for name in ("p1", "p2"):
            await stage.tell_load(snapshot(name, queued=(queued("work", 300),)))
        names = [f"r{moment}-{number}" for number in range(60)]
        refused = await asyncio.gather(*(ask(request(name, attempt=0, ttft_ms_max=1.0)) for name in names))
        assert {type(answer) for answer in refused} == {Rejection}
    assert conductor.limits.tuned().work_price == 1.0


async def test_a_prefix_of_another_instance_is_used_and_told(stage: Stage):
    """D1 holds it, and prefill reads it there: source and length are in the answer, the booking, the
    decision and the metrics."""
    heard = await stage.decisions()
    matches = (InstanceMatch(D1, 60, (TierRun(Tier.DRAM, 40), TierRun(Tier.SSD, 20))), InstanceMatch(P1, 10))
    await stage.answer_matches(*matches)
    placement = await stage.ask(request("far", block_hashes=HASHES))
    assert (placement.source, placement.prefix_blocks) == (D1, 60)
    booking = stage.conductor.state.current().bookings["far"]
    assert (booking.new_tokens, booking.prefix_tokens) == (40, 960)
    await eventually(lambda: heard)
    assert (heard[0].placement, heard[0].matches) == (placement, matches)

    await stage.answer_matches(InstanceMatch(P2, 50))
    await stage.ask(request("near", block_hashes=HASHES))
    await stage.ask(request("new"))
    for source, blocks in (("remote", 60), ("own", 50), ("none", 0)):
        assert stage.conductor.count("prefixes", source, "source") == 1
        assert stage.conductor.count("prefix_blocks", source, "source") == blocks


async def test_never_asks_for_the_block_of_the_last_token(stage: Stage):
    await stage.answer_matches()
    await stage.ask(request(prompt_tokens=992, block_hashes=HASHES))
    assert stage.asked_of_kvmeta == [HASHES[: 61 * 16]]


async def test_no_full_block_asks_nobody(stage: Stage):
    await stage.answer_matches()
    assert isinstance(await stage.ask(request(prompt_tokens=16, block_hashes=HASHES[:16])), Placement)
    assert stage.asked_of_kvmeta == []


async def test_places_without_prefixes_where_no_kvmeta_listens(stage: Stage):
    placement = await stage.ask(request(block_hashes=HASHES))
    assert isinstance(placement, Placement)
    assert placement.prefix_blocks == 0
    assert stage.conductor.count("matches", "no_responder") == 1


async def test_places_without_prefixes_where_kvmeta_is_too_slow():
    stage = Stage()
    stage.conductor = Conductor(stage.broker, "conductor-1", stage.clock, match_timeout_ms=10)
    await stage.conductor.start()
    released = asyncio.Event()

    async def hang(received):
        await released.wait()

    await stage.kvmeta.subscribe(subjects.KVMETA_MATCH, hang, queue=subjects.KVMETA_QUEUE)
    assert isinstance(await stage.ask(request(block_hashes=HASHES)), Placement)
    assert stage.conductor.count("matches", "timeout") == 1
    released.set()


async def test_places_without_prefixes_where_kvmeta_fails(stage: Stage):
    async def fail(received):
        raise RuntimeError("broken")

    await stage.kvmeta.subscribe(subjects.KVMETA_MATCH, fail, queue=subjects.KVMETA_QUEUE)
    assert isinstance(await stage.ask(request(block_hashes=HASHES)), Placement)
    assert stage.conductor.count("matches", "failed") == 1


async def test_no_instance_for_the_model(stage: Stage):
    rejection = await stage.ask(request(model="other"))
    assert isinstance(rejection, Rejection)
    assert rejection.reason is RejectReason.NO_INSTANCE
    assert stage.conductor.count("decisions", "no_instance") == 1


async def test_a_burst_is_shared_by_its_bookings(stage: Stage):
    placements = await asyncio.gather(*(stage.ask(request(f"r{i}")) for i in range(8)))
    assert Counter(placement.prefill for placement in placements) == {P1: 4, P2: 4}
    assert {placement.decode for placement in placements} == {D1, D2}


async def test_a_booking_ends_with_the_snapshot_that_lists_it(stage: Stage):
    placement = await stage.ask(request("r"))
    assert list(stage.conductor.state.current().bookings) == ["r"]
    await stage.tell_load(snapshot(placement.prefill, queued=(queued("r", 1000, placement.decode),)))
    await eventually(lambda: not stage.conductor.state.current().bookings)
    backlog = outlook(stage.conductor.state.current(), stage.clock()).backlog(placement.prefill)
    assert backlog.requests == 1


async def test_a_booking_ends_with_the_snapshot_in_which_its_request_has_ended(stage: Stage):
    """It came and went between two snapshots: neither lists it as queued or running."""
    placement = await stage.ask(request("r"))
    await stage.tell_load(snapshot(placement.decode))
    await stage.tell_load(
        replace(snapshot(placement.decode), ended=(EndedRequest(RequestId("r"), 1, 7),), ended_total=1)
    )
    await eventually(lambda: not stage.conductor.state.current().bookings)


async def test_quick_requests_one_after_another_find_room_in_a_small_pool(stage: Stage):
    """There is room for one at each decode, and no snapshot ever shows one of them under way."""
    for name in (D1, D2):
        await stage.tell_load(replace(snapshot(name), blocks_free=70))
    await eventually(lambda: all(stage.conductor.state.current().instances[name].load for name in (D1, D2)))
    for i in range(8):
        placement = await stage.ask(request(f"r{i}"))
        assert isinstance(placement, Placement), placement
        done = EndedRequest(RequestId(f"r{i}"), 1, 7)
        await stage.tell_load(
            replace(snapshot(placement.decode), blocks_free=70, ended=(done,), ended_total=i + 1)
        )
        await eventually(lambda: not stage.conductor.state.current().bookings)


async def test_bookings_count_samples_here_and_at_other_conductors(stage: Stage):
    second = Conductor(stage.broker, "conductor-2", stage.clock)
    await second.start(subjects.SCHEDULE_STANDBY)
    await stage.ask(request("r", samples=3, priority=2))
    await eventually(lambda: second.state.current().bookings)
    for conductor in (stage.conductor, second):
        booking = conductor.state.current().bookings["r"]
        assert (booking.samples, booking.priority, booking.output_tokens_expected) == (3, 2, 32)


async def test_a_booking_runs_out(stage: Stage):
    await stage.ask(request("r"))
    stage.clock.now_s += 9.9
    assert list(stage.conductor.state.current().bookings) == ["r"]
    stage.clock.now_s += 0.2
    assert not stage.conductor.state.current().bookings


async def test_load_decides(stage: Stage):
    await stage.tell_load(snapshot("p1", queued=(queued("a", 20_000),)))
    await eventually(lambda: stage.conductor.state.current().instances[P1].load)
    placements = [await stage.ask(request(f"r{i}")) for i in range(4)]
    assert {placement.prefill for placement in placements} == {P2}


async def test_publishes_each_decision_with_its_inputs(stage: Stage):
    heard = await stage.decisions()
    matches = (InstanceMatch(P2, 50),)
    await stage.answer_matches(*matches)
    placement = await stage.ask(request("a", block_hashes=HASHES))
    rejection = await stage.ask(request("b", model="other"))
    await eventually(lambda: len(heard) == 2)
    assert heard[0] == Decision("a", 1, 1000, 64, HASHES[-16:], matches, placement=placement)
    assert heard[1] == Decision("b", 1, 1000, 64, b"", (), rejection=rejection)


async def test_conductors_book_each_others_placements(stage: Stage):
    second = Conductor(stage.broker, "conductor-2", stage.clock)
    await second.start(subjects.SCHEDULE_STANDBY)
    for i in range(4):
        await stage.ask(request(f"r{i}"))
    await eventually(lambda: len(second.state.current().bookings) == 4)
    assert second.state.current().bookings == stage.conductor.state.current().bookings
    assert isinstance(await stage.ask(request("s"), subjects.SCHEDULE_STANDBY), Placement)
    await eventually(lambda: "s" in stage.conductor.state.current().bookings)


async def test_a_decision_that_cannot_be_published_still_stands(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
):
    async def refuse(*_, **__):
        raise RetryableError("full")

    monkeypatch.setattr(stage.conductor.bus, "publish", refuse)
    assert isinstance(await stage.ask(request()), Placement)


@pytest.mark.parametrize(
    "bad",
    [
        request(prompt_tokens=0),
        request(output_tokens_max=0),
        request(attempt=-1),
        request(samples=0),
        request(block_hashes=b"short"),
        request(prompt_tokens=31, block_hashes=HASHES[:32]),
        request(prompt_tokens=1_000_000, block_hashes=bytes(16 * 16_385)),
    ],
)
async def test_bad_requests_are_refused_and_the_conductor_lives_on(stage: Stage, bad):
    with pytest.raises(RetryableError, match="must be"):
        await stage.ask(bad)
    assert isinstance(await stage.ask(request()), Placement)
    assert stage.conductor.scheduler.in_flight == 0


async def test_a_load_snapshot_of_somebody_else_is_refused(stage: Stage):
    await stage.gateway.publish(subjects.load(P1), snapshot("p1", queued=(queued("a", 20_000),)))
    await stage.tell_load(snapshot("p2"))
    await eventually(lambda: stage.conductor.state.current().instances[P2].load)
    assert stage.conductor.state.current().instances[P1].load is None


async def test_new_instances_are_asked_for_their_load():
    stage = Stage()
    told = replace(snapshot("p1", queued=(queued("a", 5),)), requests=7)
    worker_bus = stage.broker.bus("p1")

    async def describe(received):
        return told

    await worker_bus.subscribe(subjects.instance(P1), describe)
    await stage.conductor.start()
    assert stage.conductor.state.current().instances[P1].load == told
    assert "g1" not in stage.conductor.state.current().instances


async def test_a_removed_instance_gets_nothing(stage: Stage):
    left = {name: record for name, record in QUAD.items() if name not in (P1, D2)}
    stage.conductor.state.registry_changed(left)
    placements = [await stage.ask(request(f"r{i}")) for i in range(6)]
    assert {(placement.prefill, placement.decode) for placement in placements} == {(P2, D1)}


async def test_a_snapshot_that_makes_no_sense_costs_nobody_a_placement(stage: Stage):
    """A bandwidth of nothing would be divided by for every request."""
    senseless = encode(snapshot("p1"), P1, 1, 9, 0.0).replace(
        b'"transfer_bytes_per_s":1000000000.0', b'"transfer_bytes_per_s":0.0'
    )
    assert b'"transfer_bytes_per_s":0.0' in senseless
    stage.broker.send(RawMessage(subjects.load(P1), senseless, None, None))
    await stage.tell_load(snapshot("p2"))
    await eventually(lambda: stage.conductor.state.current().instances[P2].load)
    assert isinstance(await stage.ask(request(excluded=(P2,))), Placement)
