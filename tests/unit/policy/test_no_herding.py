"""Many conductors decide at once, none sees what the others just did: still nobody is flooded.

In every round each conductor places one request on a view that ends with the round before; then all hear of
each other. Load is seconds of prefill work and requests at decode, over all rounds.
"""

from collections import Counter
from collections.abc import Sequence

import pytest
from tests.support.views import decode, prefill, queued, request, view_of

from kvindex.core import InstanceId, InstanceMatch
from policy.choice import PlacementLimits, Strategy
from policy.core import Placement
from policy.place import place
from policy.predict import outlook
from policy.view import ClusterView, with_placement

pytestmark = pytest.mark.unit

INSTANCES = 8
CONDUCTORS = 16
ROUND_S = 0.004
"""Until all have heard of each other's decisions."""
PROMPT_TOKENS = 1000
ROUNDS = 8
RATIO_MAX = 1.3
"""Of the most loaded to the mean."""
BALANCING = [Strategy.LOAD_BALANCE, Strategy.CACHE_AWARE, Strategy.KVCACHE_CENTRIC, Strategy.JOINT]


def placed_by_all(
    view: ClusterView, strategy: Strategy, rounds: int, matches: Sequence[InstanceMatch] = ()
) -> tuple[ClusterView, list[Placement]]:
    limits = PlacementLimits(strategy=strategy)
    won: list[Placement] = []
    for number in range(rounds):
        told, now_s = [], number * ROUND_S
        for conductor in range(CONDUCTORS):
            asked = request(f"r{number}-{conductor}", prompt_tokens=PROMPT_TOKENS)
            placement = place(view, asked, matches, limits, now_s)
            assert isinstance(placement, Placement), placement
            told.append(placement)
        for placement in told:
            view = with_placement(view, placement, PROMPT_TOKENS, now_s, elsewhere=True)
        won.extend(told)
    return view, won


def ratio(loads: Sequence[float]) -> float:
    return max(loads) / (sum(loads) / len(loads))


def queues_s(view: ClusterView) -> list[float]:
    ahead = outlook(view, 0.0)
    return [ahead.backlog(InstanceId(f"p{i}")).wait_s for i in range(INSTANCES)]


def decodes(count: int = INSTANCES):
    return [decode(f"d{i}", free=100_000) for i in range(count)]


@pytest.mark.parametrize("strategy", BALANCING)
def test_an_idle_fleet(strategy):
    fleet = [prefill(f"p{i}") for i in range(INSTANCES)]
    view, won = placed_by_all(view_of(*fleet, *decodes()), strategy, rounds=ROUNDS)
    assert ratio(queues_s(view)) <= RATIO_MAX
    counts = Counter(placement.decode for placement in won)
    assert ratio([counts[InstanceId(f"d{i}")] for i in range(INSTANCES)]) <= RATIO_MAX


@pytest.mark.parametrize("strategy", [s for s in BALANCING if s is not Strategy.CACHE_AWARE])
def test_one_hot_prefix_at_one_instance(strategy):
    """cache_aware has to go to the one that holds it: that hot spot is what the others are for."""
    fleet = [prefill(f"p{i}") for i in range(INSTANCES)]
    hot = (InstanceMatch(InstanceId("p0"), 60),)
    view, _ = placed_by_all(view_of(*fleet, *decodes()), strategy, rounds=ROUNDS, matches=hot)
    assert ratio(queues_s(view)) <= RATIO_MAX


@pytest.mark.parametrize("strategy", BALANCING)
def test_a_cold_newcomer_among_loaded_ones_is_not_flooded(strategy):
    """It is idle, holds nothing of the prefix that all others have, and every conductor sees it so."""
    warm = [
        prefill(f"p{i}", *(queued(f"q{i}-{j}", 1000, f"d{j}") for j in range(4))) for i in range(1, INSTANCES)
    ]
    hot = tuple(InstanceMatch(InstanceId(f"p{i}"), 30) for i in range(1, INSTANCES))
    start = view_of(prefill("p0"), *warm, *decodes())
    view, _ = placed_by_all(start, strategy, rounds=ROUNDS, matches=hot)
    queues = queues_s(view)
    assert ratio(queues) <= RATIO_MAX
    assert queues[0] >= 0.6 * sum(queues) / len(queues), "it takes its share"


def test_one_conductor_alone_shares_exactly():
    """What it decides itself it knows at once: nothing is taken to be under way elsewhere."""
    view = view_of(*(prefill(f"p{i}") for i in range(INSTANCES)), *decodes())
    won = Counter[InstanceId]()
    for number in range(3 * INSTANCES):
        placement = place(view, request(f"r{number}"), (), PlacementLimits(), 0.0)
        assert isinstance(placement, Placement)
        view = with_placement(view, placement, PROMPT_TOKENS, 0.0)
        won[placement.prefill] += 1
    assert set(won.values()) == {3}
