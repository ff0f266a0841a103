"""What gateways tell counts once, and tunes the limits of a conductor that may tune them."""

import pytest
from tests.support.views import decode, prefill, queued, view_of

from cluster.cluster_config import ClusterConfig
from cluster.logs import Level, Logger
from conductor.outcomes_heard import GATEWAYS_MAX, OutcomesHeard
from conductor.policy_limits import PolicyLimits
from kvindex.core import InstanceId
from policy.adapt import Outcomes
from policy.choice import PlacementLimits
from policy.core import InstanceState, LoadSnapshot, Role

pytestmark = pytest.mark.unit


def told(name: str, answered: int, in_targets: int, rejected: int, role: Role = Role.GATEWAY) -> LoadSnapshot:
    return LoadSnapshot(
        InstanceId(name),
        (role,),
        InstanceState.SERVING,
        answered_total=answered,
        in_targets_total=in_targets,
        rejected_total=rejected,
    )


def heard() -> OutcomesHeard:
    return OutcomesHeard(Logger(Level.ERROR))


def test_each_request_counts_once_and_none_from_before():
    outcomes = heard()
    assert outcomes.newly(told("g1", 100, 80, 10), 1) == Outcomes()
    assert outcomes.newly(told("g1", 110, 85, 12), 1) == Outcomes(in_targets=5, missed=3, rejected=2)
    assert outcomes.newly(told("g1", 110, 85, 12), 1) == Outcomes()
    assert outcomes.newly(told("g2", 7, 7, 0), 1) == Outcomes()
    assert outcomes.newly(told("g1", 111, 86, 12), 1) == Outcomes(in_targets=1)


def test_a_new_process_begins_anew_and_late_or_wrong_counts_say_nothing():
    outcomes = heard()
    outcomes.newly(told("g1", 100, 80, 10), 1)
    assert outcomes.newly(told("g1", 3, 3, 0), 2) == Outcomes()
    assert outcomes.newly(told("g1", 4, 4, 0), 2) == Outcomes(in_targets=1)
    assert outcomes.newly(told("g1", 3, 3, 0), 2) == Outcomes()
    assert outcomes.newly(told("g1", 1, 2, 0), 2) == Outcomes()
    assert outcomes.newly(told("p1", 5, 5, 0, Role.PREFILL), 1) == Outcomes()


def test_gateways_known_are_bounded():
    outcomes = heard()
    outcomes.newly(told("first", 1, 1, 0), 1)
    for number in range(GATEWAYS_MAX):
        outcomes.newly(told(f"g{number}", 1, 1, 0), 1)
    assert outcomes.newly(told("first", 2, 2, 0), 1) == Outcomes()
    assert outcomes.newly(told(f"g{GATEWAYS_MAX - 1}", 2, 2, 0), 1) == Outcomes(in_targets=1)


BUSY = view_of(prefill("p1", *(queued(f"q{number}", 9000) for number in range(100))), decode("d1"))


def test_limits_that_may_not_tune_themselves_stay_as_they_are():
    limits = PolicyLimits(PlacementLimits(ttft_ms_default=1000.0, kvcache_balancing_threshold=3.0))
    for number in range(100):
        limits.answered(Outcomes(missed=100), number)
        assert limits.deciding(BUSY, float(number)) == limits.current()
    assert limits.tuned() == limits.current()


def test_what_was_found_is_in_force_until_the_cluster_says_otherwise():
    base = PlacementLimits(ttft_ms_default=10_000.0, adaptive=True)
    limits = PolicyLimits(base)
    assert limits.deciding(BUSY, 0.0) == base
    for number in range(60):
        limits.deciding(BUSY, float(number))
    limits.answered(Outcomes(missed=10), 60.0)
    assert limits.tuned().work_price > 1.0
    assert limits.tuned().target_share < 1.0
    assert limits.current() == base
    limits.configure(ClusterConfig(adaptive=False))
    assert limits.deciding(BUSY, 61.0) == limits.current()
    limits.configure(ClusterConfig(adaptive=True))
    assert limits.tuned() == limits.current()
