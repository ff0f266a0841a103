"""What measured instances have and made-up ones do not: two shapes, costs that change, first tokens that take
more than their messages."""

from dataclasses import replace

import pytest
from tests.support.simulated_clusters import ROUND_COST, ROUND_NODE, round_setup

from kvindex.core import InstanceId
from simulator.cluster import TOO_LONG, simulate_cluster
from simulator.results import Served
from simulator.setup import AnnouncedCost, ClusterSetup
from simulator.trace import TracedRequest

pytestmark = pytest.mark.unit

REQUEST = TracedRequest(0, 1024, 3, (1, 2))


def served(setup: ClusterSetup, *requests: TracedRequest) -> list[Served]:
    results = simulate_cluster(requests or (REQUEST,), setup).results
    assert all(result.served for result in results)
    return [result.served for result in results if result.served is not None]


def test_those_that_only_decode_may_have_another_shape() -> None:
    slow = replace(ROUND_NODE, cost=replace(ROUND_COST, step_fixed_s=0.099, prefill_per_token_s=1.0))
    (one,) = served(round_setup(decode_node=slow))
    assert one.ttft_s == pytest.approx(1.024)
    assert one.done_at_s == pytest.approx(1.024 + 1.024 / 4 + 2 * 0.1)
    small = round_setup(decode_node=replace(slow, device_blocks=3))
    assert simulate_cluster([REQUEST], small).results[0].rejected == TOO_LONG


def test_a_first_token_takes_what_is_announced_beside_its_messages() -> None:
    """Not twice: of 0.2 s, five messages are simulated one by one. The last message brings the token."""
    node = replace(ROUND_NODE, cost=replace(ROUND_COST, first_token_fixed_s=0.2))
    (one,) = served(round_setup(node=node, message_s=0.01))
    assert one.ttft_s == pytest.approx(1.024 + 0.2 + 0.01)
    assert one.predicted_ttft_s == pytest.approx(1.024 + 0.2)
    (less,) = served(round_setup(node=node, message_s=0.1))
    assert less.ttft_s == pytest.approx(1.024 + 5 * 0.1 + 0.1)


def test_a_step_takes_what_was_announced_before_it_began() -> None:
    requests = [replace(REQUEST, arrived_ms=arrived_ms, output_tokens=1) for arrived_ms in (0, 2_000, 8_000)]
    requests = [replace(one, block_ids=(n, n + 1)) for one, n in zip(requests, (1, 3, 5), strict=True)]
    twice = replace(ROUND_COST, prefill_per_token_s=2e-3)
    changes = (
        AnnouncedCost(2.5, InstanceId("prefill-0"), twice),
        AnnouncedCost(6.0, InstanceId("prefill-0"), replace(ROUND_COST, prefill_per_token_s=3e-3)),
    )
    first, second, third = served(round_setup(announced=changes), *requests)
    assert (first.ttft_s, second.ttft_s) == pytest.approx((1.024, 1.024))
    assert (third.ttft_s, third.predicted_ttft_s) == pytest.approx((3.072, 3.072))


def test_parts_of_several_prompts_go_through_the_model_once() -> None:
    """A first prompt is computed while three come; those are one step of 1,536 tokens with one fixed part."""
    node = replace(ROUND_NODE, cost=replace(ROUND_COST, prefill_fixed_s=0.5))
    requests = [TracedRequest(arrived_ms, 512, 1, (place,)) for place, arrived_ms in enumerate((0, 1, 2, 3))]
    times_s = [one.ttft_s for one in served(round_setup(node=node), *requests)]
    first_s, together_s = 0.5 + 0.512, 0.5 + 3 * 0.512
    assert times_s == pytest.approx(
        [first_s, *(first_s + together_s - arrived_s for arrived_s in (0.001, 0.002, 0.003))]
    )
