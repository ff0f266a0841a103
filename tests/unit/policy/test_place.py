from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.views import (
    BLOCK_TOKENS,
    C1,
    COST,
    D1,
    D2,
    P1,
    P2,
    coupled,
    decode,
    instance,
    prefill,
    queued,
    request,
    running,
    snapshot,
    view_of,
)

from kvindex.core import InstanceId, InstanceMatch
from policy.choice import AdmissionMode, PlacementLimits, Strategy
from policy.core import CostCoefficients, InstanceState, Placement, Rejection, RejectReason, Role
from policy.load_sums import reserved_blocks
from policy.place import place
from policy.view import ClusterView, InstanceView, with_placement

pytestmark = pytest.mark.unit

LIMITS = PlacementLimits()
PAIR = (prefill("p1"), prefill("p2"), decode("d1"), decode("d2"))


def placed(decision: Placement | Rejection) -> Placement:
    assert isinstance(decision, Placement), decision
    return decision


def rejected(decision: Placement | Rejection) -> Rejection:
    assert isinstance(decision, Rejection), decision
    return decision


def match(name: InstanceId, blocks: int) -> InstanceMatch:
    return InstanceMatch(name, blocks)


class TestStudyNoteExample:
    """4 prefill, 2 decode, 32,768 tokens at 2,000 token/s, 0.5 s of queue each, 320 kB a token at 100 GB/s
    (DESIGN §8)."""

    BLOCK_BYTES = 16 * 320_000
    COST = CostCoefficients(0.0, 1 / 2000, 0.0, 0.0, 0.001, 0.0, 0.0, 100e9)
    HELD = (("p1", 1200, 7.284), ("p2", 600, 12.084), ("p3", 0, 16.884), ("p4", 800, 10.484))

    def prefill_queued_for_half_a_second(self, name: str):
        return prefill(name, queued(f"before-{name}", 1000), cost=self.COST, block_bytes=self.BLOCK_BYTES)

    def decodes(self):
        busy = decode("d1", *(running(f"a{i}") for i in range(6)), cost=self.COST)
        return busy, decode("d2", *(running(f"b{i}") for i in range(3)), cost=self.COST)

    @pytest.mark.parametrize(("name", "blocks", "ttft_s"), HELD)
    def test_ttft_of_each_prefill(self, name, blocks, ttft_s):
        view = view_of(self.prefill_queued_for_half_a_second(name), *self.decodes())
        decision = place(
            view, request(prompt_tokens=32768), (match(InstanceId(name), blocks),), LIMITS, now_s=0.0
        )
        assert placed(decision).predicted_ttft_ms == pytest.approx(ttft_s * 1e3)

    @pytest.mark.parametrize(("name", "ttft_s"), [("p2", 7.31472), ("p3", 7.34544), ("p4", 7.30448)])
    def test_ttft_of_each_prefill_with_the_blocks_of_p1(self, name, ttft_s):
        """The note's P4 with P1's blocks: 0.5 + 400 blocks moved in 0.02 + 6.784."""
        matches = tuple(match(InstanceId(held), blocks) for held, blocks, _ in self.HELD if blocks)
        source = decode("p1", free=0, cost=self.COST, block_bytes=self.BLOCK_BYTES)
        view = view_of(self.prefill_queued_for_half_a_second(name), source, self.decodes()[1])
        won = placed(place(view, request(prompt_tokens=32768), matches, LIMITS, now_s=0.0))
        assert won.predicted_ttft_ms == pytest.approx(ttft_s * 1e3)
        assert (won.prefill, won.source, won.prefix_blocks) == (name, P1, 1200)

    @pytest.mark.parametrize(
        "strategy", [Strategy.CACHE_AWARE, Strategy.KVCACHE_CENTRIC, Strategy.JOINT], ids=str
    )
    def test_p1_and_d2_win_within_the_targets(self, strategy):
        limits = PlacementLimits(strategy=strategy)
        prefills = (self.prefill_queued_for_half_a_second(name) for name, _, _ in self.HELD)
        matches = tuple(match(InstanceId(name), blocks) for name, blocks, _ in self.HELD if blocks)
        asked = request(prompt_tokens=32768, ttft_ms_max=10_000, tbt_ms_max=100)
        won = placed(place(view_of(*prefills, *self.decodes()), asked, matches, limits, now_s=0.0))
        assert (won.prefill, won.decode, won.source, won.prefix_blocks) == ("p1", "d2", "p1", 1200)

    def test_the_others_alone_are_rejected(self):
        prefills = (self.prefill_queued_for_half_a_second(name) for name in ("p2", "p3", "p4"))
        matches = (match(P2, 600), match(InstanceId("p4"), 800))
        asked = request(prompt_tokens=32768, ttft_ms_max=10_000)
        decision = place(view_of(*prefills, *self.decodes()), asked, matches, LIMITS, now_s=0.0)
        assert rejected(decision).reason is RejectReason.TTFT
        assert "10.484" in rejected(decision).detail


class TestPrefillChoice:
    def test_prefix_beats_an_equal_queue(self):
        won = placed(place(view_of(*PAIR), request(), (match(P2, 50),), LIMITS, 0.0))
        assert (won.prefill, won.source, won.prefix_blocks) == (P2, P2, 50)

    def test_a_long_queue_is_left_and_its_prefix_taken_along(self):
        view = view_of(prefill("p1", queued("q", 5000)), *PAIR[1:])
        won = placed(place(view, request(), (match(P1, 20),), LIMITS, 0.0))
        assert (won.prefill, won.source, won.prefix_blocks) == (P2, P1, 20)

    @pytest.mark.parametrize(
        ("prompt_tokens", "held", "used"), [(32, 2, 1), (33, 2, 2), (48, 9, 2), (16, 1, 0), (1, 0, 0)]
    )
    def test_the_last_token_is_always_computed(self, prompt_tokens, held, used):
        won = placed(
            place(view_of(*PAIR), request(prompt_tokens=prompt_tokens), (match(P1, held),), LIMITS, 0)
        )
        assert won.prefix_blocks <= used
        assert won.prefill != P1 or won.prefix_blocks == used

    def test_time_since_the_snapshot_shortens_the_queue(self):
        view = view_of(prefill("p1", queued("q", 1000)), decode("d1"))
        early, late = (placed(place(view, request(), (), LIMITS, now_s)) for now_s in (0.0, 0.5))
        assert early.predicted_ttft_ms - late.predicted_ttft_ms == pytest.approx(500)

    def test_an_unknown_cost_is_assumed(self):
        view = view_of(instance("p1", Role.PREFILL), instance("d1", Role.DECODE))
        assert placed(place(view, request(), (), LIMITS, 0.0)).predicted_ttft_ms > 0

    def test_silent_instances_are_the_last_resort(self):
        view = view_of(
            prefill("p1", heard_at_s=0.0), prefill("p2", queued("q", 9000), heard_at_s=99.0), *PAIR[2:]
        )
        assert placed(place(view, request(), (), LIMITS, 100.0)).prefill == P2
        assert placed(place(view, request(excluded=(P2,)), (), LIMITS, 100.0)).prefill == P1


class TestDecodeChoice:
    def test_least_step_time(self):
        view = view_of(*PAIR[:2], decode("d1", running("a"), running("b")), decode("d2"))
        assert placed(place(view, request(), (), LIMITS, 0.0)).decode == D2

    def test_among_equals_the_one_that_holds_the_prefix(self):
        for holder in (D1, D2):
            won = {
                placed(place(view_of(*PAIR), request(f"r{i}"), (match(holder, 60),), LIMITS, 0.0)).decode
                for i in range(20)
            }
            assert won == {holder}

    def test_needs_room_in_blocks(self):
        view = view_of(*PAIR[:2], decode("d1", free=10), decode("d2", running("a"), free=64))
        assert placed(place(view, request(), (), LIMITS, 0.0)).decode == D2

    def test_held_blocks_take_no_room(self):
        view = view_of(prefill("p1"), decode("d1", free=5))
        assert isinstance(place(view, request(), (), LIMITS, 0.0), Rejection)
        assert placed(place(view, request(), (match(D1, 60),), LIMITS, 0.0)).decode == D1

    def test_queued_prefills_count_for_their_decode(self):
        busy = prefill("p1", *(queued(f"q{i}", 10, "d1") for i in range(4)))
        assert placed(place(view_of(busy, *PAIR[1:]), request(), (), LIMITS, 0.0)).decode == D2

    def test_no_room_anywhere_is_overloaded_and_says_when_to_come_again(self):
        view = view_of(prefill("p1"), decode("d1", *(running(f"a{i}") for i in range(10)), free=3))
        rejection = rejected(place(view, request(), (), LIMITS, 0.0))
        assert rejection.reason is RejectReason.OVERLOADED
        # Of 64 tokens at most half are expected, and each has 10 of them.
        assert rejection.retry_after_s == pytest.approx(22 * (0.03 + 10 * 0.01 + 1000 * 1e-6))


class TestCoupled:
    def test_alone_it_does_both(self):
        won = placed(place(view_of(coupled("c1")), request(), (), LIMITS, 0.0))
        assert (won.prefill, won.decode) == (C1, C1)

    def test_each_of_several_keeps_its_own(self):
        view = view_of(*(coupled(f"c{i}") for i in range(4)))
        for i in range(20):
            won = placed(place(view, request(f"r{i}"), (), LIMITS, 0.0))
            assert won.prefill == won.decode

    def test_a_much_less_loaded_decode_is_worth_the_transfer(self):
        crowded = coupled("c1")
        load = replace(crowded.load, running=tuple(running(f"a{i}") for i in range(20)))
        view = view_of(replace(crowded, load=load), decode("d1"))
        won = placed(place(view, request(), (), LIMITS, 0.0))
        assert (won.prefill, won.decode) == (C1, D1)


class TestAdmission:
    def test_ttft_target(self):
        view = view_of(prefill("p1", queued("q", 2000)), decode("d1"))
        rejection = rejected(place(view, request(ttft_ms_max=2500), (), LIMITS, 0.0))
        assert rejection.reason is RejectReason.TTFT
        assert LIMITS.retry_after_s_min <= rejection.retry_after_s <= LIMITS.retry_after_s_max
        assert isinstance(place(view, request(ttft_ms_max=3500), (), LIMITS, 0.0), Placement)

    def test_deadline_is_a_ttft_target(self):
        view = view_of(prefill("p1", queued("q", 2000)), decode("d1"))
        assert rejected(place(view, request(deadline_s=1.0), (), LIMITS, 0.0)).reason is RejectReason.TTFT

    def test_tbt_target(self):
        view = view_of(prefill("p1"), decode("d1", *(running(f"a{i}") for i in range(10))))
        assert rejected(place(view, request(tbt_ms_max=100), (), LIMITS, 0.0)).reason is RejectReason.TBT
        assert isinstance(place(view, request(tbt_ms_max=200), (), LIMITS, 0.0), Placement)

    def test_a_placement_says_what_decode_holds_it_to_once_more(self):
        view, limits = view_of(*PAIR), replace(LIMITS, tbt_ms_default=300.0, target_share=0.9)
        for asked, held_to_ms in (
            (request(tbt_ms_max=200), 200),
            (request(), 300),
            (request(tbt_ms_max=200, resumed=True), None),
        ):
            assert placed(place(view, asked, (), limits, 0.0)).tbt_ms_max == held_to_ms
        assert placed(place(view, request(), (), LIMITS, 0.0)).tbt_ms_max is None

    def test_spreading_never_misses_a_target_that_can_be_met(self):
        slower = replace(COST, prefill_per_token_s=1.05e-3)
        view = view_of(prefill("p1"), prefill("p2", cost=slower), decode("d1"))
        for i in range(20):
            asked = request(f"r{i}", ttft_ms_max=1020)
            assert placed(place(view, asked, (), LIMITS, 0.0)).prefill == P1

    def test_a_resumed_request_is_not_turned_away_for_load(self):
        full = view_of(prefill("p1", queued("q", 9000)), decode("d1", running("a"), free=0))
        asked = request(ttft_ms_max=10, tbt_ms_max=1, deadline_s=1)
        assert isinstance(place(full, asked, (), LIMITS, 0.0), Rejection)
        assert isinstance(place(full, replace(asked, resumed=True), (), LIMITS, 0.0), Placement)

    def test_no_instance(self):
        for view, asked, role in (
            (view_of(), request(), "prefill"),
            (view_of(decode("d1")), request(), "prefill"),
            (view_of(prefill("p1")), request(), "decode"),
            (view_of(*PAIR), request(model="other"), "prefill"),
            (view_of(*PAIR), request(prompt_tokens=70_000), "prefill"),
        ):
            rejection = rejected(place(view, asked, (), LIMITS, 0.0))
            assert rejection.reason is RejectReason.NO_INSTANCE
            assert role in rejection.detail


class TestSharing:
    def test_idle_equals_share_sequential_load(self):
        won = [placed(place(view_of(*PAIR), request(f"r{i}"), (), LIMITS, 0.0)) for i in range(200)]
        for counts in (Counter(p.prefill for p in won), Counter(p.decode for p in won)):
            assert len(counts) == 2
            assert min(counts.values()) > 60

    def test_bookings_share_a_burst_evenly(self):
        view = view_of(*PAIR)
        won = []
        for i in range(16):
            placement = placed(place(view, request(f"r{i}"), (), LIMITS, 0.0))
            view = with_placement(view, placement, 1000, 0.0)
            won.append(placement)
        assert Counter(p.prefill for p in won) == {P1: 8, P2: 8}
        assert max(Counter(p.decode for p in won).values()) <= 9


NAMES = [f"i{n}" for n in range(6)]


@st.composite
def views(draw: st.DrawFn) -> ClusterView:
    known = []
    for name in draw(st.lists(st.sampled_from(NAMES), unique=True)):
        roles = draw(st.sampled_from([(Role.PREFILL,), (Role.DECODE,), (Role.PREFILL, Role.DECODE)]))
        load = snapshot(
            name,
            queued=tuple(
                queued(f"q{name}{i}", draw(st.integers(1, 5000)), draw(st.sampled_from(NAMES)))
                for i in range(draw(st.integers(0, 3)))
            ),
            running=tuple(running(f"a{name}{i}") for i in range(draw(st.integers(0, 8)))),
            blocks_free=draw(st.integers(0, 200)),
            state=draw(st.sampled_from(list(InstanceState))),
            cost=draw(st.sampled_from([COST, None])),
        )
        known.append(
            instance(
                name,
                *roles,
                load=draw(st.sampled_from([load, None])),
                model=draw(st.sampled_from(["smollm2", "other"])),
                fingerprint=draw(st.sampled_from(["f0", "f1"])),
                blocks=draw(st.integers(1, 200)),
                heard_at_s=draw(st.floats(0, 100)),
            )
        )
    return view_of(*known)


def serves(candidate: InstanceView, role: Role, prompt_tokens: int, samples: int) -> bool:
    return (
        role in candidate.roles
        and (candidate.model, candidate.fingerprint) == (request().model, request().fingerprint)
        and not candidate.draining
        and candidate.blocks >= reserved_blocks(prompt_tokens, BLOCK_TOKENS, samples)
    )


@given(
    view=views(),
    prompt_tokens=st.integers(1, 2000),
    excluded=st.lists(st.sampled_from(NAMES), max_size=3),
    matches=st.dictionaries(st.sampled_from(NAMES), st.integers(1, 200)),
    ttft_ms_max=st.none() | st.floats(1, 10_000),
    tbt_ms_max=st.none() | st.floats(1, 500),
    resumed=st.booleans(),
    samples=st.integers(1, 4),
    priority=st.integers(-2, 2),
    strategy=st.sampled_from(Strategy),
    admission=st.sampled_from(AdmissionMode),
)
def test_a_placement_keeps_every_promise(
    view,
    prompt_tokens,
    excluded,
    matches,
    ttft_ms_max,
    tbt_ms_max,
    resumed,
    samples,
    priority,
    strategy,
    admission,
):
    limits = PlacementLimits(strategy=strategy, admission=admission)
    asked = request(
        prompt_tokens=prompt_tokens,
        excluded=tuple(excluded),
        ttft_ms_max=ttft_ms_max,
        tbt_ms_max=tbt_ms_max,
        resumed=resumed,
        samples=samples,
        priority=priority,
    )
    held = tuple(match(InstanceId(name), blocks) for name, blocks in matches.items())
    decision = place(view, asked, held, limits, 100.0)

    reordered = ClusterView(dict(reversed(view.instances.items())), view.bookings)
    assert place(reordered, asked, held[::-1], limits, 100.0) == decision
    assert (decision.request_id, decision.attempt) == (asked.request_id, asked.attempt)
    if isinstance(decision, Rejection):
        assert decision.detail
        assert LIMITS.retry_after_s_min <= decision.retry_after_s <= LIMITS.retry_after_s_max
        asks = admission is not AdmissionMode.NONE and not resumed
        assert asks or decision.reason is RejectReason.NO_INSTANCE
        return
    for name, role in ((decision.prefill, Role.PREFILL), (decision.decode, Role.DECODE)):
        used = view.instances[name]
        assert role in used.roles
        assert (used.model, used.fingerprint) == (asked.model, asked.fingerprint)
        assert not used.draining
        if name in excluded:
            free = [other for other in view.instances.values() if other.instance not in excluded]
            assert not any(serves(other, role, prompt_tokens, samples) for other in free)
        assert used.blocks >= reserved_blocks(prompt_tokens, BLOCK_TOKENS, samples)
    assert decision.prefix_blocks * BLOCK_TOKENS < prompt_tokens
    assert (decision.source is None) == (decision.prefix_blocks == 0)
    assert decision.prefix_blocks <= matches.get(decision.source or "", 0)
    assert decision.output_tokens_expected is not None
    assert 1 <= decision.output_tokens_expected <= asked.output_tokens_max
    if strategy not in (Strategy.KVCACHE_CENTRIC, Strategy.JOINT):
        assert decision.source in (None, decision.prefill)
    if not resumed and admission is not AdmissionMode.NONE:
        assert ttft_ms_max is None or decision.predicted_ttft_ms <= ttft_ms_max * (1 + 1e-9)
        assert tbt_ms_max is None or decision.predicted_tbt_ms <= tbt_ms_max * (1 + 1e-9)
