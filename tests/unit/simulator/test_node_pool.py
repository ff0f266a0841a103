"""The pool of a simulated instance: two prefix-closed tiers, which lose nothing for which there is room."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.simulated_clusters import ROUND_COST, ROUND_NODE, round_setup

from kvindex.core import InstanceId, Tier, TierRun
from policy.evict import UNKNOWN_USE, EvictionOrder
from simulator.cluster import simulate_cluster
from simulator.node_pool import HeldPrefix, NodePool
from simulator.results import Served
from simulator.setup import ClusterSetup
from simulator.trace import TracedRequest

pytestmark = pytest.mark.unit

ENOUGH = 1000


def pool(memory_blocks: int, ssd_blocks: int, order: EvictionOrder = EvictionOrder.LRU) -> NodePool:
    shape = replace(ROUND_NODE, pool_blocks=memory_blocks, ssd_blocks=ssd_blocks, eviction=order)
    return NodePool(shape, 512)


def runs_of(tiers: NodePool, block_ids: Sequence[int]) -> tuple[TierRun, ...]:
    match = tiers.match(InstanceId("one"), block_ids)
    return () if match is None else match.runs


def test_what_goes_from_memory_lies_on_ssd_and_comes_up_when_it_is_used() -> None:
    tiers = pool(3, 6)
    tiers.use((1, 2, 3), UNKNOWN_USE)
    assert runs_of(tiers, (1, 2, 3, 4)) == (TierRun(Tier.DRAM, 3),)
    tiers.use((7, 8), UNKNOWN_USE)
    assert runs_of(tiers, (1, 2, 3, 4)) == (TierRun(Tier.DRAM, 1), TierRun(Tier.SSD, 2))
    assert (tiers.hits((1, 2, 3, 4)), tiers.memory_hits((1, 2, 3, 4))) == (3, 1)
    tiers.use((1, 2, 3), UNKNOWN_USE)
    assert runs_of(tiers, (1, 2, 3)) == (TierRun(Tier.DRAM, 3),)
    assert runs_of(tiers, (7, 8)) == (TierRun(Tier.SSD, 2),)
    assert tiers.evicted_blocks == 0
    tiers.check_integrity()


def test_without_ssd_what_goes_is_gone() -> None:
    tiers = pool(3, 0)
    tiers.use((1, 2, 3), UNKNOWN_USE)
    tiers.use((7, 8), UNKNOWN_USE)
    assert runs_of(tiers, (1, 2, 3)) == (TierRun(Tier.DRAM, 1),)
    assert tiers.evicted_blocks == 2


# Chains of a tree: what a block follows is told by its id.
chains = st.lists(st.integers(0, 2), min_size=1, max_size=6).map(
    lambda branches: tuple(
        sum((branch + 1) * 4**depth for depth, branch in enumerate(branches[: length + 1]))
        for length in range(len(branches))
    )
)


@given(
    st.lists(st.tuples(chains, st.sampled_from(["use", "use", "hold", "release"])), max_size=40),
    st.integers(1, 8),
    st.sampled_from([0, 1, 5, ENOUGH]),
    st.sampled_from(EvictionOrder),
)
def test_tiers_are_prefix_closed_and_lose_nothing_that_has_room(
    steps: Sequence[tuple[tuple[int, ...], str]], memory_blocks: int, ssd_blocks: int, order: EvictionOrder
) -> None:
    tiers = pool(memory_blocks, ssd_blocks, order)
    used: set[tuple[int, ...]] = set()
    holds: list[tuple[tuple[int, ...], HeldPrefix]] = []
    for chain, what in steps:
        if what == "use":
            tiers.use(chain, UNKNOWN_USE)
            used |= {chain[:length] for length in range(1, 1 + min(memory_blocks, len(chain)))}
        elif what == "hold":
            found = chain[: tiers.hits(chain)]
            holds.append((found, tiers.hold(found)))
        elif holds:
            tiers.release(holds.pop(0)[1])
        for found, _ in holds:
            assert tiers.hits(found) == len(found), "a held prefix went"
        runs = runs_of(tiers, chain)
        assert sum(run.blocks for run in runs) == tiers.hits(chain)
        assert sum(run.blocks for run in runs if run.tier is Tier.DRAM) == tiers.memory_hits(chain)
        assert tiers.memory_blocks <= memory_blocks
        if ssd_blocks == ENOUGH and not holds and what == "use":
            assert all(tiers.hits(known) == len(known) for known in used)
    for _, held in holds:
        tiers.release(held)
    tiers.check_integrity()


def served(requests: Sequence[TracedRequest], setup: ClusterSetup) -> list[Served]:
    run = simulate_cluster(requests, setup)
    assert all(result.served is not None for result in run.results)
    return [result.served for result in run.results if result.served is not None]


def ssd_setup(**changes: object) -> ClusterSetup:
    """DRAM for two blocks; the SSD reads two blocks in 0.1024 s, ten times as fast as they are computed."""
    cost = replace(ROUND_COST, ssd_fixed_s=0.001, ssd_bytes_per_s=1e10)
    node = replace(ROUND_NODE, cost=cost, pool_blocks=2, ssd_blocks=100)
    return round_setup(node=node, **changes)


def prompt(arrived_ms: int, *block_ids: int) -> TracedRequest:
    return TracedRequest(arrived_ms, 512 * len(block_ids), 1, block_ids)


def test_a_prefix_on_ssd_is_read_before_the_compute() -> None:
    requests = [prompt(0, 1, 2, 3), prompt(10_000, 4, 5, 6), prompt(20_000, 1, 2, 3)]
    last = served(requests, ssd_setup())[2]
    assert last.cached_tokens == 1024
    assert last.ttft_s == pytest.approx(0.001 + 0.1024 + 0.512)
    assert last.predicted_ttft_s == pytest.approx(last.ttft_s)


def test_reads_share_an_ssd() -> None:
    seen = [prompt(0, 1, 2, 3), prompt(10_000, 4, 5, 6), prompt(20_000, 7, 8, 9)]
    together = [prompt(30_000, 1, 2, 3), prompt(30_000, 4, 5, 6)]
    first, second = served([*seen, *together], ssd_setup())[3:]
    # Both come at half the rate; then one step computes a block of each.
    assert (first.cached_tokens, second.cached_tokens) == (1024, 1024)
    assert first.ttft_s == pytest.approx(0.001 + 2 * 0.1024 + 0.512, abs=1e-3)
    assert second.ttft_s == pytest.approx(0.001 + 2 * 0.1024 + 2 * 0.512, abs=1e-3)


def test_a_prefix_on_the_ssd_of_another_is_read_there_sent_and_stays_up() -> None:
    """Both instances compute something else, so the first prompt's blocks sink; then its holder is busy for
    long, by the first seed that has it so."""
    cost = replace(ROUND_COST, ssd_fixed_s=0.001, ssd_bytes_per_s=1e10, transfer_bytes_per_s=1e10)
    node = replace(ROUND_NODE, cost=cost, pool_blocks=2, ssd_blocks=100, card_bytes_per_s=1e10)
    first, sinking = prompt(0, 1, 2, 3), [prompt(5_000, 4, 5, 6), prompt(5_000, 7, 8, 9)]
    long, again = prompt(10_000, *range(100, 120)), prompt(11_000, 1, 2, 3)
    runs = (
        served([first, *sinking, long, again], round_setup(prefill=2, node=node, seed=seed))
        for seed in range(20)
    )
    run = next(run for run in runs if run[3].prefill == run[0].prefill)
    assert run[1].prefill != run[2].prefill
    assert run[4].prefill != run[0].prefill
    assert run[4].cached_tokens == 1024
    assert run[4].ttft_s == pytest.approx(0.001 + 0.1024 + 0.1024 + 0.512)
    assert run[4].predicted_ttft_s == pytest.approx(run[4].ttft_s)
