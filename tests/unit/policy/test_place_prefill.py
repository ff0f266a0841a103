"""From whose cached prefix a prefill starts: its own, another's, none; and how much of it."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.views import (
    BLOCK_TOKENS,
    COST,
    D1,
    P1,
    P2,
    decode,
    instance,
    prefill,
    queued,
    request,
    snapshot,
    view_of,
)

from kvindex.core import InstanceId, InstanceMatch, Tier, TierRun
from policy import place_prefill
from policy.choice import PlacementLimits
from policy.columns import Floats, PrefillColumns
from policy.core import CostCoefficients, InstanceState, Placement, Role
from policy.cost import prefill_s, ssd_read_s, transfer_s
from policy.place import place
from policy.prefixes import SOURCES_MAX, memory_blocks_of
from policy.view import InstanceView

pytestmark = pytest.mark.unit

LIMITS = PlacementLimits()
BLOCK_BYTES = 1_000_000
FREE_COST = CostCoefficients(0.0, 1e-3, 0.0, 0.01, 0.0, 0.0, 0.0, 1e9, ssd_fixed_s=0.0, ssd_bytes_per_s=1e9)
"""A block is computed in 16 ms, moved in 1 ms and read from SSD in 1 ms."""


def held(name: str, dram_blocks: int, ssd_blocks: int = 0) -> InstanceMatch:
    runs = ((Tier.DRAM, dram_blocks), (Tier.SSD, ssd_blocks))
    return InstanceMatch(
        InstanceId(name),
        dram_blocks + ssd_blocks,
        tuple(TierRun(tier, blocks) for tier, blocks in runs if blocks),
    )


def chosen(*instances: InstanceView, matches: tuple[InstanceMatch, ...] = (), **fields: object) -> Placement:
    asked = {"prompt_tokens": 1601, **fields}
    decision = place(view_of(*instances, decode("d9")), request(**asked), matches, LIMITS, 0.0)
    assert isinstance(decision, Placement), decision
    return decision


def slow_ssd(bytes_per_s: float, fixed_s: float = 0.0) -> CostCoefficients:
    return replace(FREE_COST, ssd_fixed_s=fixed_s, ssd_bytes_per_s=bytes_per_s)


def alone(name: str = "p1", cost: CostCoefficients = FREE_COST, **fields: object) -> InstanceView:
    return prefill(name, cost=cost, block_bytes=BLOCK_BYTES, **fields)


def holder(name: str = "d1", cost: CostCoefficients = FREE_COST, **fields: object) -> InstanceView:
    return decode(name, cost=cost, block_bytes=BLOCK_BYTES, **fields)


class TestOwnPrefix:
    def test_ssd_blocks_cost_their_reading(self):
        won = chosen(alone(), matches=(held("p1", 40, 50),))
        assert (won.source, won.prefix_blocks) == (P1, 90)
        assert won.predicted_ttft_ms == pytest.approx(50 * 1.0 + 161)

    def test_an_ssd_slower_than_recompute_is_left_out(self):
        won = chosen(alone(cost=slow_ssd(50e6)), matches=(held("p1", 40, 50),))
        assert (won.source, won.prefix_blocks) == (P1, 40)
        assert won.predicted_ttft_ms == pytest.approx(961)

    def test_all_on_a_slow_ssd_is_recomputed(self):
        won = chosen(alone(cost=slow_ssd(50e6)), matches=(held("p1", 0, 50),))
        assert (won.source, won.prefix_blocks) == (None, 0)

    def test_the_fixed_part_of_an_ssd_read_decides_about_short_runs(self):
        for blocks, used in ((3, 40), (4, 44)):
            won = chosen(alone(cost=slow_ssd(1e9, fixed_s=0.05)), matches=(held("p1", 40, blocks),))
            assert won.prefix_blocks == used

    def test_untold_tiers_count_as_memory(self):
        assert memory_blocks_of(InstanceMatch(P1, 7)) == 7

    def test_what_comes_after_ssd_counts_as_ssd(self):
        runs = (TierRun(Tier.DEVICE, 2), TierRun(Tier.DRAM, 3), TierRun(Tier.SSD, 1), TierRun(Tier.DRAM, 4))
        assert memory_blocks_of(InstanceMatch(P1, 10, runs)) == 5


class TestRemotePrefix:
    def test_the_rest_comes_from_a_decode(self):
        won = chosen(alone(), holder(), matches=(held("d1", 90), held("p1", 40)))
        assert (won.prefill, won.source, won.prefix_blocks) == (P1, D1, 90)
        assert won.predicted_ttft_ms == pytest.approx(50 + 161)

    def test_own_ssd_and_the_sources_ssd_are_both_read(self):
        won = chosen(alone(), holder(), matches=(held("d1", 60, 30), held("p1", 40, 10)))
        assert (won.source, won.prefix_blocks) == (D1, 90)
        assert won.predicted_ttft_ms == pytest.approx(10 + 30 + 40 + 161)

    def test_only_the_tier_that_pays_is_read(self):
        won = chosen(alone(), holder(cost=slow_ssd(50e6)), matches=(held("d1", 60, 30), held("p1", 40)))
        assert (won.source, won.prefix_blocks) == (D1, 60)
        assert won.predicted_ttft_ms == pytest.approx(20 + 641)

    def test_a_shorter_prefix_in_memory_may_beat_a_longer_one_on_ssd(self):
        won = chosen(
            alone(), holder("d1", slow_ssd(40e6)), holder("d2"), matches=(held("d1", 0, 90), held("d2", 80))
        )
        assert (won.source, won.prefix_blocks) == ("d2", 80)

    def test_a_source_with_no_more_than_the_own_prefix_is_of_no_use(self):
        won = chosen(alone(), holder(), matches=(held("d1", 40), held("p1", 40)))
        assert (won.source, won.prefix_blocks) == (P1, 40)

    def test_a_slow_network_is_left_alone(self):
        slow = replace(FREE_COST, transfer_bytes_per_s=50e6)
        won = chosen(alone(), holder(cost=slow), matches=(held("d1", 90), held("p1", 40)))
        assert (won.source, won.prefix_blocks) == (P1, 40)

    def test_the_last_token_is_always_computed(self):
        won = chosen(alone(), holder(), matches=(held("d1", 2, 1),), prompt_tokens=48)
        assert (won.source, won.prefix_blocks) == (D1, 2)

    @pytest.mark.parametrize(
        "unfit",
        [
            holder(heard_at_s=-LIMITS.silence_s_max - 1),
            holder(fingerprint="other"),
            replace(holder(), load=snapshot("d1", state=InstanceState.DRAINING, cost=FREE_COST)),
            holder("d2"),
        ],
        ids=["silent", "other model", "draining", "unknown"],
    )
    def test_nobody_reads_from_the_unfit(self, unfit):
        won = chosen(alone(), unfit, matches=(held("d1", 90), held("p1", 40)))
        assert (won.source, won.prefix_blocks) == (P1, 40)

    def test_nobody_reads_from_the_excluded(self):
        won = chosen(alone(), holder(), matches=(held("d1", 90),), excluded=(D1,))
        assert won.source is None

    def test_the_longest_are_considered(self):
        names = [f"d{number}" for number in range(9)]
        matches = tuple(held(name, 20 + 10 * number) for number, name in enumerate(names[:8]))
        won = chosen(alone(), *(holder(name) for name in names[:8]), matches=matches)
        assert (won.source, won.prefix_blocks) == ("d7", 90)

    def test_work_is_bounded_however_many_hold_a_prefix(self, monkeypatch: pytest.MonkeyPatch):
        """Of 64 prefills and 64 decodes each holds another length in two tiers."""
        predictions = 0

        def counted(cost: PrefillColumns, new_tokens: Floats, prefix_tokens: Floats) -> Floats:
            nonlocal predictions
            predictions += new_tokens.size
            return prefill_s(cost, new_tokens, prefix_tokens)

        monkeypatch.setattr(place_prefill, "prefill_s", counted)
        names = [f"{kind}{number}" for kind in "pd" for number in range(64)]
        matches = tuple(held(name, 1 + number % 50, 1 + number % 41) for number, name in enumerate(names))
        chosen(*(alone(name) if name[0] == "p" else holder(name) for name in names), matches=matches)
        assert 64 < predictions <= 64 * (1 + 2 + 2 * SOURCES_MAX)

    def test_equal_sources_share_the_reading(self):
        holders = [f"d{number}" for number in range(8)]
        matches = tuple(held(name, 90) for name in holders)
        instances = [alone(), *(holder(name) for name in holders)]
        sources = {
            place(view_of(*instances), request(f"r{i}"), matches, LIMITS, 0.0).source for i in range(100)
        }
        assert sources == set(holders)

    def test_an_idle_instance_that_holds_the_prefix_goes_before_one_that_fetches_it(self):
        for i in range(20):
            won = chosen(alone("p1"), alone("p2"), matches=(held("p2", 90),), name=f"r{i}")
            assert (won.prefill, won.source) == (P2, P2)

    def test_where_the_holder_is_busy_an_idle_one_fetches(self):
        busy = prefill("p1", queued("q", 5000), cost=FREE_COST, block_bytes=BLOCK_BYTES)
        won = chosen(busy, alone("p2"), matches=(held("p1", 90),))
        assert (won.prefill, won.source, won.prefix_blocks) == (P2, P1, 90)


class TestBreakEven:
    """320 kB a token: 3.2 µs at 100 GB/s, against 500 µs at 2,000 token/s (DESIGN §8)."""

    def placed_at(self, bytes_per_s: float) -> Placement:
        cost = CostCoefficients(0.0, 1 / 2000, 0.0, 0.01, 0.0, 0.0, 0.0, bytes_per_s)
        instances = (
            prefill("p1", cost=cost, block_bytes=BLOCK_TOKENS * 320_000),
            decode("d1", cost=cost, block_bytes=BLOCK_TOKENS * 320_000),
        )
        decision = place(view_of(*instances), request(prompt_tokens=32_769), (held("d1", 2048),), LIMITS, 0.0)
        assert isinstance(decision, Placement)
        return decision

    def test_moving_is_156_times_faster_than_computing(self):
        moved = self.placed_at(100e9)
        assert (moved.source, moved.prefix_blocks) == (D1, 2048)
        moved_s = moved.predicted_ttft_ms / 1e3 - 1 / 2000
        assert moved_s / 32_768 == pytest.approx(3.2e-6)
        assert (32_768 / 2000) / moved_s == pytest.approx(156.25)

    def test_it_stops_where_the_network_is_that_much_slower(self):
        assert self.placed_at(100e9 / 156.2).source == D1
        assert self.placed_at(100e9 / 156.3).source is None


costs = st.builds(
    CostCoefficients,
    prefill_fixed_s=st.floats(0, 0.05),
    prefill_per_token_s=st.floats(1e-6, 1e-2),
    prefill_per_token_pair_s=st.floats(0, 1e-5),
    step_fixed_s=st.just(0.01),
    step_per_request_s=st.just(0.0),
    step_per_kv_token_s=st.just(0.0),
    transfer_fixed_s=st.floats(0, 0.05),
    transfer_bytes_per_s=st.floats(1e6, 1e11),
    ssd_fixed_s=st.floats(0, 0.05),
    ssd_bytes_per_s=st.floats(1e6, 1e10),
)
extents = st.tuples(st.integers(0, 40), st.integers(0, 40))
others = st.lists(st.tuples(costs, extents), max_size=SOURCES_MAX)


@given(cost=costs, own=extents, others=others, prompt_tokens=st.integers(1, 700))
def test_no_other_prefix_is_faster(cost, own, others, prompt_tokens):
    """Against every source and every length, not only where tiers end."""
    names = [f"d{number}" for number in range(len(others))]
    extents_by_name = {"p1": own, **{name: other[1] for name, other in zip(names, others, strict=True)}}
    costs_by_name = {"p1": cost, **{name: other[0] for name, other in zip(names, others, strict=True)}}
    matches = tuple(held(name, *extent) for name, extent in extents_by_name.items() if sum(extent))
    instances = [alone("p1", cost), *(holder(name, costs_by_name[name]) for name in names)]
    won = chosen(*instances, matches=matches, prompt_tokens=prompt_tokens)

    def ttft_s(name: str | None, blocks: int) -> float:
        kept = min(blocks, own_blocks) if name is not None else 0
        fetch_s = ssd_read_s(cost, max(0, kept - own[0]) * BLOCK_BYTES)
        if name is not None and blocks > kept:
            on_ssd = max(0, blocks - max(kept, extents_by_name[name][0]))
            fetch_s += transfer_s(costs_by_name[name], (blocks - kept) * BLOCK_BYTES)
            fetch_s += ssd_read_s(costs_by_name[name], on_ssd * BLOCK_BYTES)
        prefix_tokens = blocks * BLOCK_TOKENS
        return fetch_s + prefill_s(cost, prompt_tokens - prefix_tokens, prefix_tokens)

    usable = (prompt_tokens - 1) // BLOCK_TOKENS
    own_blocks = min(sum(own), usable)
    predicted_s = won.predicted_ttft_ms / 1e3
    assert predicted_s == pytest.approx(ttft_s(won.source, won.prefix_blocks))
    assert predicted_s <= ttft_s(None, 0) * (1 + 1e-9)
    for name, extent in extents_by_name.items():
        for blocks in range(1, min(sum(extent), usable) + 1):
            assert predicted_s <= ttft_s(name, blocks) * (1 + 1e-9)


@given(
    held_by=st.dictionaries(st.integers(0, 30), extents, max_size=30),
    prefills=st.integers(1, 8),
    prompt_tokens=st.integers(1, 2000),
)
def test_never_beyond_the_match_and_always_the_same(held_by, prefills, prompt_tokens):
    instances = [
        instance(
            f"i{number}",
            Role.PREFILL if number < prefills else Role.DECODE,
            load=snapshot(f"i{number}", blocks_free=4096, cost=COST),
            block_bytes=BLOCK_BYTES,
        )
        for number in range(31)
    ]
    matches = tuple(held(f"i{number}", *extent) for number, extent in held_by.items() if sum(extent))
    asked = request(prompt_tokens=prompt_tokens)
    won = place(view_of(*instances), asked, matches, LIMITS, 0.0)
    assert isinstance(won, Placement)
    assert won == place(view_of(*instances[::-1]), asked, matches[::-1], LIMITS, 0.0)
    assert won.prefix_blocks * BLOCK_TOKENS < prompt_tokens
    assert (won.source is None) == (won.prefix_blocks == 0)
    blocks_held = {match.instance: match.prefix_blocks for match in matches}
    assert won.prefix_blocks <= blocks_held.get(won.source or "", 0)
    if won.source not in (None, won.prefill):
        assert won.prefix_blocks > min(blocks_held.get(won.prefill, 0), (prompt_tokens - 1) // BLOCK_TOKENS)
