"""Simulated instances that fail, come back and join, in times computed by hand: a token takes 1 ms to compute
and 1 ms to send, a step 10 ms and 1 ms for each sequence."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
from tests.support.simulated_clusters import ROUND_COST, ROUND_NODE, round_setup

from kvindex.core import InstanceId
from policy.choice import PlacementLimits
from simulator.cluster import LOST, SimulatedRun, simulate_cluster
from simulator.results import RequestResult, Served
from simulator.setup import ClusterSetup, NodeFailure, NodeJoin, SetupError
from simulator.trace import TracedRequest

pytestmark = pytest.mark.unit

STEP_S = 0.011
SENT_S = 1.024 / 4
"""The last layer of 1,024 tokens, which is sent after all is computed."""


def traced(arrived_ms: int, output_tokens: int, *block_ids: int) -> TracedRequest:
    return TracedRequest(arrived_ms, 512 * len(block_ids), output_tokens, block_ids)


def failure(instance: str, at_s: float, back_at_s: float | None = None) -> NodeFailure:
    return NodeFailure(InstanceId(instance), at_s, back_at_s)


def served(result: RequestResult) -> Served:
    assert result.served is not None, result.rejected
    return result.served


def run_of(requests: Sequence[TracedRequest], **changes: object) -> SimulatedRun:
    return simulate_cluster(requests, round_setup(**{"backoff_s": 0.0} | changes))


def test_a_decode_fails_and_its_request_goes_on_at_another_after_the_silence() -> None:
    """It decodes from 1.28 s on; by 3 s, 156 steps of 11 ms are done: 157 tokens are out. Prefill holds the
    two blocks of its prompt, so only those tokens are computed."""
    (alone,) = run_of([traced(0, 400, 1, 2)], decode=2).results
    name = served(alone).decode
    run = run_of([traced(0, 400, 1, 2)], decode=2, failures=(failure(name, 3.0),), lost_after_s=5.0)
    (result,) = run.results
    steps = int((3.0 - 1.28) / STEP_S)
    tokens = 1 + steps
    computed = 1024 + tokens - 2 * 512
    assert (result.losses, result.resumed, result.attempts) == (1, 1, 2)
    assert result.recomputed_tokens == computed
    other = served(result)
    assert other.decode != name
    assert other.ttft_s == pytest.approx(1.024)
    # While the new tokens are computed as many are sent; the cached ones after that.
    sampled_s = 3.0 + 5.0 + computed * 1e-3
    handed_over_s = sampled_s + 1.024
    assert other.done_at_s == pytest.approx(handed_over_s + (400 - tokens - 1) * STEP_S)
    # The pause, up to the next token of prefill, and the first one of decode are among the longest 40 gaps.
    pause_s = sampled_s - (1.28 + steps * STEP_S)
    longest_s = [pause_s, 1.024 + STEP_S, SENT_S + STEP_S, *37 * [STEP_S]]
    assert other.tbt_s == pytest.approx(sum(longest_s) / 40)


def test_no_token_is_lost_or_repeated_whenever_a_decode_fails() -> None:
    """`simulate_cluster` counts them; the pause is what the failure took."""
    patient = {"placement_attempts_max": 1000, "backoff_s": 0.05}
    for at_s in (0.5, 1.0, 1.1, 1.28, 1.285, 2.0, 5.6):
        run = run_of([traced(0, 400, 1, 2)], failures=(failure("decode-1", at_s, at_s + 0.5),), **patient)
        (result,) = run.results
        assert served(result).done_at_s > 1.28 + 399 * STEP_S + 0.5


def test_prefill_goes_on_without_a_source_that_fails_while_it_is_read() -> None:
    cost = replace(ROUND_COST, transfer_bytes_per_s=1e10)
    node = replace(ROUND_NODE, cost=cost, card_bytes_per_s=1e10)
    long = traced(10_000, 1, 1, 2, *range(10, 30))
    requests = [traced(0, 1, 1, 2), long, traced(11_000, 2, 1, 2, 3)]
    holder = served(run_of(requests, prefill=2, node=node).results[0]).prefill
    run = run_of(requests, prefill=2, node=node, failures=(failure(holder, 11.05),))
    third = run.results[2]
    # Of 0.1024 s of reading 0.05 s are over; then all of it is computed.
    assert served(third).ttft_s == pytest.approx(0.05 + 1.536)
    assert served(third).cached_tokens == 0
    assert run.results[1].losses == 1
    assert served(run.results[1]).ttft_s > 5.0


def test_what_is_queued_at_a_prefill_that_fails_is_placed_again_oldest_first() -> None:
    node = replace(ROUND_NODE, prefill_step_tokens_max=1024)
    requests = [traced(place, 1, 2 * place, 2 * place + 1) for place in range(4)]
    run = run_of(requests, node=node, failures=(failure("prefill-0", 0.5, 2.0),))
    ends_s = [served(result).done_at_s for result in run.results]
    assert ends_s == pytest.approx([2.0 + 1.024 * (place + 1) for place in range(4)], abs=0.01)
    assert [result.resumed for result in run.results] == 4 * [0]
    assert [result.losses for result in run.results] == 4 * [1]


def test_one_that_streamed_and_finds_no_instance_is_lost() -> None:
    run = run_of([traced(0, 400, 1, 2)], failures=(failure("decode-1", 2.0),))
    assert [result.rejected for result in run.results] == [LOST]


def test_one_that_is_placed_on_an_instance_whose_failure_nobody_noticed_yet_goes_elsewhere() -> None:
    failures = (failure("prefill-0", 1.0), failure("decode-2", 1.0))
    requests = [traced(2_000 + place, 3, 2 * place, 2 * place + 1) for place in range(8)]
    run = run_of([traced(0, 1, 98, 99), *requests], prefill=2, decode=2, failures=failures)
    assert {served(result).prefill for result in run.results[1:]} == {"prefill-1"}
    assert {served(result).decode for result in run.results[1:]} == {"decode-3"}
    assert max(result.attempts for result in run.results) > 1
    assert max(served(result).ttft_s for result in run.results[1:]) < 8 * 1.024 + 0.5


def test_an_instance_that_comes_back_holds_nothing_and_takes_its_share() -> None:
    requests = [traced(0, 1, 1, 2), traced(20_000, 1, 1, 2)]
    run = run_of(requests, failures=(failure("prefill-0", 10.0, 15.0),))
    assert [served(result).cached_tokens for result in run.results] == [0, 0]
    assert run_of(requests).results[1].served is not None
    kept = served(run_of(requests, failures=(failure("decode-1", 10.0, 15.0),)).results[1])
    assert kept.cached_tokens == 512


def test_an_instance_that_joins_is_used_from_then_on() -> None:
    requests = [traced(1_000 * place, 1, 2 * place, 2 * place + 1) for place in range(20)]
    run = run_of(requests, prefill=2, joins=(NodeJoin(InstanceId("prefill-1"), 10.0),))
    joined = [served(result).prefill == "prefill-1" for result in run.results]
    assert not any(joined[:10])
    assert sum(joined[10:]) == 5


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"failures": (failure("prefill-7", 1.0),)}, "failures: 'prefill-7' is no instance, there are "),
        ({"failures": (failure("prefill-0", 2.0, 1.0),)}, "back at 1.0 s, after it failed"),
        ({"failures": (failure("prefill-0", 1.0), failure("prefill-0", 2.0))}, "is not there to fail"),
        ({"failures": (failure("prefill-0", -1.0),)}, "is not there to fail"),
        ({"joins": 2 * (NodeJoin(InstanceId("prefill-0"), 1.0),)}, "comes twice"),
        ({"joins": (NodeJoin(InstanceId("prefill-0"), float("nan")),)}, "at nan s"),
        (
            {
                "joins": (NodeJoin(InstanceId("prefill-0"), 3.0),),
                "failures": (failure("prefill-0", 1.0, 2.0),),
            },
            "is not there to fail",
        ),
        ({"conductors": 0}, "conductors"),
        ({"lost_after_s": 0.0}, "lost_after_s"),
    ],
)
def test_lives_that_cannot_be_are_named(changes: dict[str, object], named: str) -> None:
    with pytest.raises(SetupError, match=named):
        round_setup(**changes)


def test_a_setup_names_its_instances() -> None:
    names = [instance for instance, _ in ClusterSetup(prefill=1, decode=1, coupled=1).instances]
    assert names == ["prefill-0", "decode-1", "coupled-2"]
    assert PlacementLimits().silence_s_max == ClusterSetup(coupled=1).lost_after_s
