"""What `joint` weighs beside the first token: computing under load, what comes after in mixed clusters."""

from dataclasses import replace

import pytest
from tests.support.views import (
    BLOCK_TOKENS,
    C1,
    COST,
    P1,
    coupled,
    decode,
    prefill,
    queued,
    request,
    running,
    snapshot,
    view_of,
)
from tests.support.views import instance as registered

from kvindex.core import InstanceId, InstanceMatch, Tier, TierRun
from policy.choice import PlacementLimits, Strategy
from policy.core import Placement, QueuedRequest, Role
from policy.place import place
from policy.view import ClusterView, InstanceView

pytestmark = pytest.mark.unit

LIMITS = PlacementLimits()
SLOW = replace(COST, transfer_bytes_per_s=30e6)
"""Sending a prompt's KV takes half as long again as computing it."""


def placed(view: ClusterView, limits: PlacementLimits = LIMITS, **fields: object) -> Placement:
    decision = place(view, request(**fields), (), limits, 0.0)
    assert isinstance(decision, Placement), decision
    return decision


def decoding(name: str, sequences: int) -> InstanceView:
    """A coupled instance that decodes so many."""
    others = tuple(running(f"{name}{n}") for n in range(sequences))
    load = snapshot(name, running=others, blocks_free=4096, cost=SLOW)
    return registered(name, Role.PREFILL, Role.DECODE, load=load)


class TestStraight:
    """Prefill and decode instances, and one that does both."""

    def mixed(self, sequences: int = 0, **fields: object) -> ClusterView:
        return view_of(prefill("p1", **fields), decode("d1"), decoding("c1", sequences))

    def test_a_short_prompt_without_reuse_goes_straight_to_where_it_is_decoded(self):
        """In all, though prefill's queue is as empty: its KV need not be sent."""
        found = placed(self.mixed(cost=SLOW), prompt_tokens=200, tbt_ms_max=500)
        assert (found.prefill, found.decode) == (C1, C1)

    def test_not_where_it_would_be_decoded_elsewhere_all_the_same(self):
        """Steps are longer there: its KV would have to be sent too."""
        views = [self.mixed(sequences, cost=SLOW) for sequences in (0, 3)]
        asks = [{"name": f"r{n}", "prompt_tokens": 200, "tbt_ms_max": 500} for n in range(20)]
        straight, not_straight = ([placed(view, **ask).prefill for ask in asks] for view in views)
        assert set(straight) == {C1}
        assert set(not_straight) == {P1, C1}

    def test_a_long_one_does_not_where_it_would_keep_decodes_waiting(self):
        found = placed(self.mixed(sequences=2, cost=SLOW), prompt_tokens=4000, tbt_ms_max=500)
        assert found.prefill == P1
        assert placed(self.mixed(cost=SLOW), prompt_tokens=4000, tbt_ms_max=500).prefill == C1

    def test_without_a_target_a_step_may_take_twice_as_long(self):
        """A step takes about 60 ms there."""
        busy = view_of(
            prefill("p1", cost=SLOW), decode("d1", *(running(f"d{n}") for n in range(2))), decoding("c1", 2)
        )
        assert placed(busy, prompt_tokens=50).prefill == C1
        assert placed(busy, prompt_tokens=4000).prefill == P1

    def test_reuse_elsewhere_is_worth_more(self):
        blocks = 180 // BLOCK_TOKENS
        held = InstanceMatch(P1, blocks, (TierRun(Tier.DRAM, blocks),))
        found = place(
            view_of(prefill("p1"), decode("d1"), decoding("c1", 8)),
            request(prompt_tokens=blocks * BLOCK_TOKENS + 1, tbt_ms_max=500),
            (held,),
            LIMITS,
            0.0,
        )
        assert isinstance(found, Placement)
        assert found.source == P1

    def test_a_longer_queue_is_not_worth_it(self):
        """Where sending is quick."""
        slow = view_of(
            prefill("p1"),
            decode("d1"),
            replace(
                coupled("c1"), load=snapshot("c1", queued=(_queued(3000),), blocks_free=4096), load_seq=2
            ),
        )
        assert placed(slow, prompt_tokens=200, tbt_ms_max=500).prefill == P1

    def test_others_do_not_ask(self):
        view = self.mixed(sequences=2, cost=SLOW)
        for strategy in (Strategy.LOAD_BALANCE, Strategy.CACHE_AWARE, Strategy.KVCACHE_CENTRIC):
            limits = PlacementLimits(strategy=strategy)
            chosen = {
                placed(view, limits, name=f"r{n}", prompt_tokens=4000, tbt_ms_max=500).prefill
                for n in range(20)
            }
            assert chosen == {P1, C1}

    def test_the_target_for_the_first_token_goes_first(self):
        """Straight would be worth more and come too late."""
        busy = replace(
            coupled("c1"), load=snapshot("c1", queued=(_queued(190),), blocks_free=4096), load_seq=2
        )
        view = view_of(prefill("p1", cost=replace(SLOW, transfer_bytes_per_s=1e6)), decode("d1"), busy)
        assert placed(view, prompt_tokens=200, tbt_ms_max=500).prefill == C1
        assert placed(view, prompt_tokens=200, tbt_ms_max=500, ttft_ms_max=250).prefill == P1


class TestComputeWeight:
    """p1 holds the prefix and has a queue; p2 is free and would have to compute it again."""

    PREFIX = 1600 // BLOCK_TOKENS
    MATCH = InstanceMatch(P1, PREFIX, (TierRun(Tier.DRAM, PREFIX),))

    def chosen(self, weight: float, queue_tokens: int, **fields: object) -> InstanceId:
        far = replace(COST, transfer_bytes_per_s=1e6)
        view = view_of(
            prefill("p1", *([_queued(queue_tokens)] if queue_tokens else []), cost=far),
            prefill("p2", cost=far),
            decode("d1"),
        )
        limits = PlacementLimits(compute_weight=weight)
        decision = place(view, request(prompt_tokens=2000, **fields), (self.MATCH,), limits, 0.0)
        assert isinstance(decision, Placement)
        return decision.prefill

    def test_rather_waits_than_computes_again(self):
        assert self.chosen(1.0, 2000) == InstanceId("p2")
        assert self.chosen(2.0, 2000) == P1
        assert self.chosen(2.0, 4000) == InstanceId("p2")

    def test_not_past_the_target(self):
        assert self.chosen(2.0, 2000, ttft_ms_max=2200) == InstanceId("p2")

    def test_predictions_stay_what_they_are(self):
        for weight in (1.0, 2.0):
            limits = PlacementLimits(compute_weight=weight)
            found = placed(view_of(prefill("p1"), decode("d1")), limits, prompt_tokens=2000)
            assert found.predicted_ttft_ms == pytest.approx(10 + 2000 + 2e6 * 1e-8 * 1e3)


def _queued(tokens: int) -> QueuedRequest:

    return queued("q", tokens)
