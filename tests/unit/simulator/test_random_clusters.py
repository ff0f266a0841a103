"""Any small cluster and any small trace: every request ends once, no block and no token is lost, whoever
fails, joins or comes back, however many conductors decide.

`simulate_cluster` itself checks that nothing is left at the end: blocks, flows, readers and requests.
"""

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.simulated_clusters import ROUND_NODE, round_setup
from tests.support.traces import trace_of

from policy.choice import AdmissionMode, PlacementLimits, Strategy
from policy.evict import EvictionOrder
from policy.replicate import ReplicationLimits
from simulator.cluster import simulate_cluster
from simulator.results import summary
from simulator.setup import ClusterSetup, NodeFailure, NodeJoin
from simulator.trace import TracedRequest

pytestmark = pytest.mark.unit

prompts = st.lists(st.integers(0, 1), min_size=1, max_size=6)
times_s = st.one_of(st.floats(1e-6, 0.01), st.floats(0.01, 8.0), st.sampled_from([0.512, 1.024, 1.28]))
arrivals = st.tuples(prompts, st.integers(0, 700), st.sampled_from([0, 0, 0, 400, 3_000]))


@st.composite
def traces(draw: st.DrawFn) -> list[TracedRequest]:
    requests = draw(st.lists(arrivals, min_size=1, max_size=14))
    at_ms, traced = 0, []
    made = trace_of([prompt for prompt, _, _ in requests], [tokens for _, tokens, _ in requests])
    for request, (_, _, wait_ms) in zip(made, requests, strict=True):
        at_ms += wait_ms
        rest = draw(st.integers(0, 511))
        traced.append(replace(request, arrived_ms=at_ms, input_tokens=request.input_tokens - rest))
    return traced


@st.composite
def setups(draw: st.DrawFn) -> ClusterSetup:
    prefill, decode, coupled = draw(
        st.sampled_from([(1, 1, 0), (3, 1, 0), (1, 3, 0), (2, 2, 0), (0, 0, 1), (0, 0, 3), (1, 1, 1)])
    )
    node = replace(
        ROUND_NODE,
        device_blocks=draw(st.sampled_from([9, 12, 40])),
        pool_blocks=draw(st.sampled_from([1, 7, 40])),
        ssd_blocks=draw(st.sampled_from([0, 0, 3, 60])),
        eviction=draw(st.sampled_from(EvictionOrder)),
        prefill_step_tokens_max=draw(st.sampled_from([64, 512, 4096])),
        prefill_requests_max=draw(st.integers(1, 4)),
        batch_requests_max=draw(st.integers(1, 8)),
        queue_requests_max=draw(st.sampled_from([1, 20])),
    )
    placement = PlacementLimits(
        strategy=draw(st.sampled_from(Strategy)), admission=draw(st.sampled_from(AdmissionMode))
    )
    setup = round_setup(
        prefill=prefill,
        decode=decode,
        coupled=coupled,
        node=node,
        placement=placement,
        ttft_s_max=draw(st.sampled_from([2.0, 1000.0])),
        tbt_s_max=draw(st.sampled_from([0.0125, 1000.0])),
        message_s=draw(st.sampled_from([0.0, 0.001])),
        seed=draw(st.integers(0, 3)),
        conductors=draw(st.sampled_from([1, 1, 3])),
        lost_after_s=draw(st.sampled_from([0.001, 5.0])),
        replacements_in_flight_max=draw(st.sampled_from([1, 16])),
        replication=draw(st.booleans()),
        replication_limits=ReplicationLimits(requests_min=2, bytes_per_s=1e9, burst_bytes=1e9),
    )
    return replace(setup, **draw(lives(setup)))


@st.composite
def lives(draw: st.DrawFn, setup: ClusterSetup) -> dict[str, object]:
    """Joins and failures of any instances at times when something happens."""
    joins, failures = [], []
    for instance, _ in setup.instances:
        at_s = 0.0
        if draw(st.sampled_from([False, False, False, True])):
            at_s = draw(times_s)
            joins.append(NodeJoin(instance, at_s))
        for _ in range(draw(st.sampled_from([0, 0, 1, 2]))):
            fails_at_s = at_s + draw(times_s)
            at_s = fails_at_s + draw(times_s)
            back_at_s = draw(st.sampled_from([None, at_s, at_s]))
            failures.append(NodeFailure(instance, fails_at_s, back_at_s))
            if back_at_s is None:
                break
    return {"joins": tuple(joins), "failures": tuple(failures)}


@settings(max_examples=200, deadline=None)
@given(traces(), setups())
def test_every_request_ends_once(requests: Sequence[TracedRequest], setup: ClusterSetup) -> None:
    ended: list[int] = []
    run = simulate_cluster(requests, setup, ended.append)
    assert ended == list(range(1, len(requests) + 1))
    assert [result.index for result in run.results] == list(range(len(requests)))
    for result, request in zip(run.results, requests, strict=True):
        assert (result.served is None) == (result.rejected is not None)
        if result.served is not None:
            compute_s = (request.input_tokens - result.served.cached_tokens) * 1e-3
            assert result.served.ttft_s >= compute_s - 1e-9
            assert 0 <= result.served.cached_tokens < request.input_tokens
            steps_s = (result.output_tokens - 1) * 0.011
            assert result.served.done_at_s >= result.arrived_s + result.served.ttft_s + steps_s - 1e-6 or (
                run.preempted or result.losses  # A recompute samples a token without a step.
            )
        assert result.losses < result.attempts + (result.served is None)
        assert result.losses or not result.resumed
        assert result.losses or not result.recomputed_tokens
    assert all(before.at_s < after.at_s for before, after in zip(run.load, run.load[1:], strict=False))
    told = summary(run.results, setup.ttft_s_max, setup.tbt_s_max)
    assert told.served + sum(told.rejected.values()) == len(requests)


@settings(max_examples=20, deadline=None)
@given(traces(), setups())
def test_the_same_seed_gives_the_same_run(requests: Sequence[TracedRequest], setup: ClusterSetup) -> None:
    assert simulate_cluster(requests, setup) == simulate_cluster(requests, setup)
