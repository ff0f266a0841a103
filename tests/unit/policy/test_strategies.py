"""The five strategies by what each looks at, through `policy.place`."""

from collections import Counter
from dataclasses import replace

import pytest
from tests.support.views import P1, P2, decode, prefill, queued, request, running, view_of

from kvindex.core import InstanceId, InstanceMatch
from policy.choice import AdmissionMode, PlacementLimits, Strategy
from policy.core import Placement, Rejection, RejectReason
from policy.place import place

pytestmark = pytest.mark.unit

P3 = InstanceId("p3")
DECODES = (decode("d1"), decode("d2"))


def chosen(strategy: Strategy, *prefills, matches=(), name: str = "r", **fields) -> Placement:
    limits = PlacementLimits(strategy=strategy, **fields)
    decision = place(view_of(*prefills, *DECODES), request(name), matches, limits, 0.0)
    assert isinstance(decision, Placement), decision
    return decision


def held(**blocks: int) -> tuple[InstanceMatch, ...]:
    return tuple(InstanceMatch(InstanceId(name), count) for name, count in blocks.items())


class TestWhatEachLooksAt:
    def test_random_looks_at_nothing_but_the_name(self):
        busy = prefill("p1", queued("q", 50_000))
        won = Counter(
            chosen(Strategy.RANDOM, busy, prefill("p2"), matches=held(p2=60), name=f"r{i}").prefill
            for i in range(200)
        )
        assert min(won[P1], won[P2]) > 70
        again = [chosen(Strategy.RANDOM, prefill("p1"), prefill("p2"), name="r7") for _ in range(3)]
        assert len(set(again)) == 1

    def test_random_moves_no_request_of_an_instance_that_stays(self):
        """Rendezvous: a further instance takes only what becomes its own."""
        for i in range(50):
            two = chosen(Strategy.RANDOM, prefill("p1"), prefill("p2"), name=f"r{i}").prefill
            three = chosen(Strategy.RANDOM, prefill("p1"), prefill("p2"), prefill("p3"), name=f"r{i}").prefill
            assert three in (two, P3)

    def test_load_balance_takes_the_shorter_queue_though_the_other_would_be_sooner(self):
        won = chosen(
            Strategy.LOAD_BALANCE, prefill("p1"), prefill("p2", queued("q", 100)), matches=held(p2=62)
        )
        assert (won.prefill, won.prefix_blocks) == (P1, 0)

    def test_load_balance_still_uses_what_it_finds(self):
        won = chosen(
            Strategy.LOAD_BALANCE, prefill("p1"), prefill("p2", queued("q", 100)), matches=held(p1=9)
        )
        assert (won.prefill, won.source, won.prefix_blocks) == (P1, P1, 9)

    def test_cache_aware_weighs_queue_against_own_prefix_and_fetches_nothing(self):
        short = (prefill("p1"), prefill("p2", queued("q", 100)))
        assert chosen(Strategy.CACHE_AWARE, *short, matches=held(p2=62)).prefill == P2
        long = (prefill("p1"), prefill("p2", queued("q", 5000)))
        won = chosen(Strategy.CACHE_AWARE, *long, matches=held(p2=62))
        assert (won.prefill, won.source, won.prefix_blocks) == (P1, None, 0)

    @pytest.mark.parametrize("strategy", [Strategy.KVCACHE_CENTRIC, Strategy.JOINT])
    def test_these_fetch_from_a_busy_holder(self, strategy):
        won = chosen(strategy, prefill("p1"), prefill("p2", queued("q", 5000)), matches=held(p2=62))
        assert (won.prefill, won.source, won.prefix_blocks) == (P1, P2, 62)


class TestBalancingThreshold:
    """p1 is free and holds 20 blocks, p2 is busy and holds 40."""

    PREFILLS = (prefill("p1"), prefill("p2", queued("q", 5000)))

    def won(self, **limits) -> Placement:
        return chosen(Strategy.KVCACHE_CENTRIC, *self.PREFILLS, matches=held(p1=20, p2=40), **limits)

    @pytest.mark.parametrize(("threshold", "source"), [(1.0, P2), (2.0, P2), (2.01, P1), (100.0, P1)])
    def test_ratio_of_best_to_own(self, threshold, source):
        assert self.won(kvcache_balancing_threshold=threshold).source == source

    @pytest.mark.parametrize(("share", "source"), [(0.31, P1), (0.33, P2), (1.0, P2)])
    def test_the_notes_share_of_the_prompt(self, share, source):
        """20 blocks are 320 of 1000 tokens: at least that share is enough to look no further."""
        assert self.won(kvcache_local_share_min=share).source == source

    def test_nothing_cached_looks_further_whatever_the_threshold(self):
        won = chosen(
            Strategy.KVCACHE_CENTRIC,
            *self.PREFILLS,
            matches=held(p2=40),
            kvcache_balancing_threshold=1e9,
        )
        assert (won.prefill, won.source) == (P1, P2)

    def test_the_local_candidate_is_always_there(self):
        """Moving costs more than it saves: the note's text would know no other way."""
        slow = replace(DECODES[0].load.cost, transfer_bytes_per_s=1e6)
        prefills = (prefill("p1", cost=slow), prefill("p2", queued("q", 5000), cost=slow))
        won = chosen(Strategy.KVCACHE_CENTRIC, *prefills, matches=held(p1=20, p2=40))
        assert (won.prefill, won.source, won.prefix_blocks) == (P1, P1, 20)


class TestTargets:
    @pytest.mark.parametrize("strategy", list(Strategy))
    def test_the_clusters_targets_hold_where_a_request_names_none(self, strategy):
        view = view_of(prefill("p1", queued("q", 2000)), *DECODES)
        limits = PlacementLimits(strategy=strategy, ttft_ms_default=2500)
        decision = place(view, request(), (), limits, 0.0)
        assert isinstance(decision, Rejection)
        assert decision.reason is RejectReason.TTFT
        assert isinstance(place(view, request(ttft_ms_max=4000), (), limits, 0.0), Placement)

    def test_tbt_default(self):
        view = view_of(prefill("p1"), decode("d1", *(running(f"a{i}") for i in range(10))))
        decision = place(view, request(), (), PlacementLimits(tbt_ms_default=100), 0.0)
        assert isinstance(decision, Rejection)
        assert decision.reason is RejectReason.TBT


class TestModes:
    FULL = view_of(
        prefill("p1", queued("q", 2000)), decode("d1", *(running(f"a{i}") for i in range(10)), free=0)
    )

    def test_none_refuses_nothing_that_could_run(self):
        asked = request(ttft_ms_max=1, tbt_ms_max=1)
        for mode in AdmissionMode:
            decision = place(self.FULL, asked, (), PlacementLimits(admission=mode), 0.0)
            assert isinstance(decision, Placement) == (mode is AdmissionMode.NONE)

    def test_a_snapshot_does_not_see_what_is_on_its_way(self):
        view = view_of(prefill("p1", *(queued(f"q{i}", 10) for i in range(10))), decode("d1"))
        asked = request(tbt_ms_max=100)
        for mode, reason in ((AdmissionMode.SNAPSHOT, None), (AdmissionMode.PREDICTIVE, RejectReason.TBT)):
            decision = place(view, asked, (), PlacementLimits(admission=mode), 0.0)
            assert (decision.reason if isinstance(decision, Rejection) else None) is reason
