"""What docs/reproduction.md says of the paper's figures, on the first requests of each trace: the orders, and
shares within wide bounds. The whole traces are run by hand, with the commands that the document names."""

from dataclasses import replace
from functools import cache

import pytest
from tests.support.traces import published_trace

from policy.choice import AdmissionMode, PlacementLimits, Strategy
from policy.evict import EvictionOrder
from simulator.cache import CacheKind, simulate_cache
from simulator.cluster import simulate_cluster
from simulator.datasets import DatasetName, dataset_requests
from simulator.planning import Planner, SearchLimits, Split
from simulator.reference_hardware import POOL_TOKENS, reference_cost
from simulator.results import Summary, TbtMeasure, summary
from simulator.setup import ClusterSetup, NodeShape
from simulator.trace import TRACE_BLOCK_TOKENS, TracedRequest, distinct_blocks, read_trace

pytestmark = pytest.mark.sim

EFFICIENCY = 0.6
"""The one value of docs/reproduction.md."""
NODE = NodeShape(cost=reference_cost(EFFICIENCY))
WHOLE_PROMPTS = replace(NODE, coupled_step_tokens_max=200_000)
"""A coupled instance as it was then: a prompt is computed in one step, and decodes wait."""
EVERYBODY = PlacementLimits(admission=AdmissionMode.NONE)


@cache
def trace(name: str) -> list[TracedRequest]:
    return read_trace(published_trace(name))


def told(requests: list[TracedRequest], setup: ClusterSetup) -> Summary:
    run = simulate_cluster(requests, setup)
    return summary(run.results, setup.ttft_s_max, setup.tbt_s_max)


def test_whole_prompts_in_one_step_miss_the_time_between_tokens_and_apart_they_do_not() -> None:
    requests = trace("conversation")[:400]
    apart = told(requests, ClusterSetup(prefill=2, decode=2, node=NODE, placement=EVERYBODY, speedup=0.4))
    coupled = ClusterSetup(coupled=4, node=NODE, placement=EVERYBODY, speedup=0.4)
    in_parts = told(requests, coupled)
    whole = told(requests, replace(coupled, node=WHOLE_PROMPTS))
    assert apart.tbt_in_target == apart.served
    assert whole.tbt_in_target < 0.95 * whole.served
    assert whole.tbt_in_target < in_parts.tbt_in_target


@pytest.mark.parametrize(("name", "paper"), [("conversation", 0.41), ("synthetic", 0.46)])
def test_three_million_tokens_hit_less_than_half_of_what_could_be_hit(name: str, paper: float) -> None:
    requests = trace(name)
    capacity = POOL_TOKENS // TRACE_BLOCK_TOKENS
    some = simulate_cache(requests, CacheKind.PLAIN, EvictionOrder.LRU, capacity)
    most = simulate_cache(requests, CacheKind.PLAIN, EvictionOrder.LRU, distinct_blocks(requests))
    assert some.hit_rate / most.hit_rate == pytest.approx(paper, rel=0.15)


def test_prefill_and_decode_apart_serve_more_than_whole_prompts_together() -> None:
    """ArXiv's statistics, both judged by the mean time between tokens."""
    requests = dataset_requests(DatasetName.ARXIV, 400, 1.0, 0)
    setup = ClusterSetup(
        coupled=1,
        placement=EVERYBODY,
        ttft_s_max=8.0,
        tbt_s_max=0.0725,
        tbt_measure=TbtMeasure.MEAN,
    )
    apart = Planner(requests, setup, lambda gpus: NODE, SearchLimits(), _quietly)
    balanced = replace(setup, placement=replace(EVERYBODY, strategy=Strategy.LOAD_BALANCE))
    together = Planner(requests, balanced, lambda gpus: WHOLE_PROMPTS, SearchLimits(), _quietly)
    served = apart.trial(Split(8, prefill=3, decode=1), 3.7).attainment
    assert served >= 0.98
    assert together.trial(Split(8, coupled=4), 3.7).attainment < served - 0.05


def test_where_one_decode_has_to_do_early_rejection_serves_more() -> None:
    requests = trace("conversation")[:600]
    setup = ClusterSetup(prefill=5, decode=1, node=NODE, speedup=2.0)
    everybody, snapshot = (
        told(requests, replace(setup, placement=PlacementLimits(admission=admission)))
        for admission in (AdmissionMode.NONE, AdmissionMode.SNAPSHOT)
    )
    assert everybody.requests - everybody.served > 0
    assert snapshot.in_targets > 1.2 * everybody.in_targets


def test_by_the_roofline_prefill_is_what_lacks() -> None:
    """The paper finds the best split near one to one: here decodes have room to spare, see the document."""
    requests = trace("synthetic")[:300]
    setup = ClusterSetup(coupled=1, placement=EVERYBODY, ttft_s_max=10.0)
    planner = Planner(requests, setup, lambda gpus: NODE, SearchLimits(), _quietly)
    splits = [Split(8, prefill=prefill, decode=8 - prefill) for prefill in (1, 4)]
    few, even = (planner.fixed(split, 0.5).goodput_per_gpu_s for split in splits)
    assert even > 1.3 * few


def _quietly(split: Split, speedup: float) -> None:
    pass
