"""Scenarios of the simulated cluster whose times are computed by hand: a token takes 1 ms to compute and 1 ms
to send, a step 10 ms and 1 ms for each sequence."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
from tests.support.simulated_clusters import ROUND_COST, ROUND_NODE, round_setup

from policy.choice import AdmissionMode, PlacementLimits
from simulator.cluster import REFUSED, TOO_LONG, SimulatedRun, simulate_cluster
from simulator.results import Served, TbtMeasure, tail_mean_s, tbt_of
from simulator.setup import ClusterSetup, SetupError
from simulator.trace import TracedRequest

pytestmark = pytest.mark.unit

SENT_S = 1.024 / 4
"""The last layer of 1,024 tokens, which is sent after all is computed."""
COUPLED = {"prefill": 0, "decode": 0, "coupled": 1}


def traced(arrived_ms: int, output_tokens: int, *block_ids: int) -> TracedRequest:
    return TracedRequest(arrived_ms, 512 * len(block_ids), output_tokens, block_ids)


def served(run: SimulatedRun) -> list[Served]:
    assert all(result.served is not None for result in run.results)
    return [result.served for result in run.results if result.served is not None]


def ttfts_s(requests: Sequence[TracedRequest], setup: ClusterSetup) -> list[float]:
    return [one.ttft_s for one in served(simulate_cluster(requests, setup))]


def test_a_lone_request_is_prefilled_sent_and_decoded() -> None:
    (one,) = served(simulate_cluster([traced(0, 4, 1, 2)], round_setup()))
    assert one.ttft_s == one.predicted_ttft_s == pytest.approx(1.024)
    # Its first gap is the longest of three: the rest of the handover and a step.
    assert one.tbt_s == pytest.approx(SENT_S + 0.011)
    assert one.done_at_s == pytest.approx(1.024 + SENT_S + 3 * 0.011)


def test_messages_take_their_time() -> None:
    """To the conductor; back and to prefill; to decode and back for the blocks; the first token. Then the
    commit."""
    (one,) = served(simulate_cluster([traced(0, 2, 1, 2)], round_setup(message_s=0.01)))
    assert one.ttft_s == pytest.approx(1.024 + 6 * 0.01)
    assert one.tbt_s == pytest.approx(SENT_S + 0.01 + 0.011)


def test_prompts_that_come_together_are_prefilled_in_turn() -> None:
    node = replace(ROUND_NODE, prefill_step_tokens_max=1024)
    assert ttfts_s([traced(0, 1, 1, 2), traced(0, 1, 3, 4)], round_setup(node=node)) == pytest.approx(
        [1.024, 2.048]
    )


def test_prefill_instances_share_what_comes_together() -> None:
    requests = [traced(0, 1, 2 * place, 2 * place + 1) for place in range(4)]
    assert ttfts_s(requests, round_setup(prefill=4)) == pytest.approx(4 * [1.024])


def test_a_prompt_seen_before_is_computed_from_where_it_must_be() -> None:
    """The last token's block is always computed."""
    run = simulate_cluster([traced(0, 2, 1, 2), traced(10_000, 2, 1, 2)], round_setup())
    first, again = served(run)
    assert (first.cached_tokens, again.cached_tokens) == (0, 512)
    assert again.ttft_s == pytest.approx(0.512)
    # Decode holds the first block still: of the second one, a quarter is sent after the compute.
    assert again.tbt_s == pytest.approx(0.512 / 4 + 0.011)


def test_a_long_prefix_comes_up_beside_the_compute() -> None:
    node = replace(ROUND_NODE, host_bytes_per_s=1e9)
    requests = [traced(0, 2, 1, 2, 3), traced(10_000, 2, 1, 2, 3)]
    assert ttfts_s(requests, round_setup(node=node)) == pytest.approx([1.536, 1.024])


def test_a_prefix_of_another_instance_is_read_over_the_network() -> None:
    """The holder is busy for long, and reading takes a tenth of the time of computing."""
    cost = replace(ROUND_COST, transfer_bytes_per_s=1e10)
    node = replace(ROUND_NODE, cost=cost, card_bytes_per_s=1e10)
    long = traced(10_000, 2, 1, 2, *range(10, 30))
    requests = [traced(0, 2, 1, 2), long, traced(11_000, 2, 1, 2, 3)]
    run = simulate_cluster(requests, round_setup(prefill=2, decode=1, node=node))
    first, second, third = served(run)
    assert first.prefill == second.prefill != third.prefill
    assert third.cached_tokens == 1024
    assert third.ttft_s == pytest.approx(0.1024 + 0.512)


def test_handovers_share_a_card() -> None:
    """Both end their compute at once; the last layers of both go in by one card."""
    requests = [traced(0, 2, 1, 2), traced(0, 2, 3, 4)]
    node = replace(ROUND_NODE, card_bytes_per_s=2e9)
    tbts_s = [one.tbt_s for one in served(simulate_cluster(requests, round_setup(prefill=2, node=node)))]
    assert tbts_s == pytest.approx(2 * [SENT_S + 0.012])


def test_who_joins_a_batch_waits_for_the_step_in_progress_and_slows_it() -> None:
    """The first decodes alone for 5 s; the second comes 1.024 + 0.256 s after its arrival."""
    requests = [traced(0, 1000, 1, 2), traced(5_000, 11, 3, 4)]
    first, second = served(simulate_cluster(requests, round_setup()))
    alone_steps = 455
    """Of 11 ms: the first number that takes at least 5 s."""
    joined_s = 1.28 + alone_steps * 0.011
    assert second.tbt_s == pytest.approx(joined_s + 0.012 - 6.024)
    assert second.done_at_s == pytest.approx(joined_s + 10 * 0.012)
    assert first.done_at_s == pytest.approx(joined_s + 10 * 0.012 + (999 - 10 - alone_steps) * 0.011)


def test_coupled_prefill_keeps_decodes_waiting() -> None:
    """A part is 511 tokens beside one decode: three steps of it, the last with what is left of 1,024."""
    requests = [traced(0, 41, 1, 2), traced(1_100, 1, 3, 4)]
    first, second = served(simulate_cluster(requests, round_setup(**COUPLED)))
    assert first.ttft_s == pytest.approx(1.024)
    # 0.076 s after its first token, 7 steps are done; parts read the weights beside their compute.
    began_s = 1.024 + 7 * 0.011
    parts_s = [0.511 + 0.001, 0.511 + 0.001, 0.010 + 0.001]
    assert second.ttft_s == pytest.approx(began_s + sum(parts_s[:2]) + 0.002 + 0.010 - 1.1, abs=0.002)
    # 40 gaps, of which the longest 4.
    assert first.tbt_s == pytest.approx((0.512 + 0.512 + 2 * 0.011) / 4, abs=1e-4)


def test_a_tenth_of_the_gaps_is_counted_and_at_least_one() -> None:
    assert tail_mean_s([]) is None
    assert tail_mean_s([3.0, 1.0]) == 3.0
    assert tail_mean_s([1.0] * 9 + [5.0, 4.0]) == 4.5


def test_gaps_are_measured_as_asked() -> None:
    gaps_s = [1.0] * 17 + [3.0, 5.0, 4.0]
    assert tbt_of(gaps_s, TbtMeasure.TAIL) == 4.5
    # Two of twenty are longer.
    assert tbt_of(gaps_s, TbtMeasure.P90) == 3.0
    assert tbt_of(gaps_s, TbtMeasure.MEAN) == pytest.approx(29 / 20)
    for measure in TbtMeasure:
        assert tbt_of([], measure) is None
        assert tbt_of([2.0], measure) == 2.0


def test_a_target_that_cannot_be_met_is_refused_before_any_work() -> None:
    node = replace(ROUND_NODE, prefill_step_tokens_max=1024)
    setup = round_setup(
        node=node, ttft_s_max=1.5, placement=PlacementLimits(admission=AdmissionMode.SNAPSHOT)
    )
    run = simulate_cluster([traced(0, 1, 1, 2), traced(0, 1, 3, 4)], setup)
    assert [result.rejected for result in run.results] == [None, "ttft"]
    assert sum(run.busy_s.values()) == pytest.approx(1.024)


def test_decode_has_a_second_look_and_attempts_end() -> None:
    """It has room for one request; the conductor, that admits all, does not mind."""
    node = replace(ROUND_NODE, batch_requests_max=1)
    run = simulate_cluster([traced(0, 2000, 1), traced(2_000, 5, 2)], round_setup(node=node))
    assert [result.rejected for result in run.results] == [None, REFUSED]
    assert run.results[1].attempts == 4


def test_one_that_fits_nowhere_is_told_at_once() -> None:
    run = simulate_cluster([traced(0, 512 * 98 + 1, 1)], round_setup())
    assert run.results[0].rejected == TOO_LONG


def test_out_of_blocks_the_last_one_gives_its_own_back_and_is_computed_again() -> None:
    """Both have 3 blocks of 6 at first, and want a fourth for their 513th token more."""
    node = replace(ROUND_NODE, device_blocks=6)
    requests = [traced(0, 600, 1, 2), traced(0, 600, 3, 4)]
    run = simulate_cluster(requests, round_setup(prefill=2, node=node))
    assert run.preempted == 1
    first, second = sorted(served(run), key=lambda one: one.done_at_s)
    # Both go into one card.
    joined_s = 2 * 1.024
    assert first.done_at_s == pytest.approx(joined_s + 512 * 0.012 + 87 * 0.011)
    # The recompute of prompt and answer so far gives the 514th token, 86 are left.
    recomputed_s = first.done_at_s + (1024 + 513) * 0.001
    assert second.done_at_s == pytest.approx(recomputed_s + 86 * 0.011)


def test_blocks_may_be_of_another_size() -> None:
    """Prompts of 1,024 tokens in blocks of 16, the second one cached as far as that goes."""
    prompt = TracedRequest(0, 1024, 2, tuple(range(64)))
    node = replace(ROUND_NODE, device_blocks=3200, pool_blocks=3200)
    setup = round_setup(node=node, block_tokens=16)
    first, again = served(simulate_cluster([prompt, replace(prompt, arrived_ms=10_000)], setup))
    assert (first.cached_tokens, again.cached_tokens) == (0, 1008)
    assert again.ttft_s == pytest.approx(0.016)
    with pytest.raises(SetupError, match="block_tokens: 512, request 0 has 64 block ids for 1024 tokens"):
        simulate_cluster([prompt], round_setup())


def test_arrivals_that_would_take_for_ever_are_refused() -> None:
    requests = [TracedRequest(0, 10, 1, (1,)), TracedRequest(1000, 10, 1, (1,))]
    with pytest.raises(SetupError, match="speedup: 1e-08, the trace's arrivals must not take more than 1e"):
        simulate_cluster(requests, ClusterSetup(coupled=1, speedup=1e-8))


def test_under_pressure_the_less_important_are_refused_first() -> None:
    """Prompts of 1.024 s that come together, 5 s to the first token: the lower ones leave the higher ones
    room to come."""
    setup = round_setup(
        node=replace(ROUND_NODE, prefill_step_tokens_max=1024),
        ttft_s_max=5.0,
        placement=PlacementLimits(admission=AdmissionMode.SNAPSHOT),
    )
    requests = [
        replace(traced(0, 1, 2 * place, 2 * place + 1), priority=10 * (place % 2)) for place in range(8)
    ]
    run = simulate_cluster(requests, setup)
    assert [result.priority for result in run.results] == 4 * [0, 10]
    times_served = {
        priority: sum(result.served is not None for result in run.results if result.priority == priority)
        for priority in (0, 10)
    }
    assert times_served == {0: 1, 10: 3}


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"prefill": 0}, "prefill and decode"),
        ({"speedup": 0.0}, "speedup"),
        ({"message_s": 1.0}, "message_s"),
        ({"tbt_s_max": float("nan")}, "tbt_s_max"),
        ({"block_tokens": 0}, "block_tokens"),
    ],
)
def test_what_cannot_be_simulated_is_named(changes: dict[str, object], field: str) -> None:
    with pytest.raises(SetupError, match=field):
        round_setup(**changes)
