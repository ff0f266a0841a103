import pytest

from cluster.cluster_config import ClusterConfig
from conductor.config import ConductorConfig
from conductor.policy_limits import PolicyLimits, placement_limits
from policy.choice import AdmissionMode, PlacementLimits, Strategy

pytestmark = pytest.mark.unit


def test_what_a_process_was_started_with():
    assert placement_limits(ConductorConfig()) == PlacementLimits(target_share=0.95, adaptive=True)
    limits = placement_limits(
        ConductorConfig(
            strategy="cache_aware",
            admission="snapshot",
            kvcache_balancing_threshold=3.0,
            ttft_ms_default=500.0,
            tbt_ms_default=20.0,
            decode_horizon_s=7.0,
            silence_s_max=9.0,
            target_share=1.0,
            adaptive=False,
        )
    )
    assert limits == PlacementLimits(
        strategy=Strategy.CACHE_AWARE,
        admission=AdmissionMode.SNAPSHOT,
        kvcache_balancing_threshold=3.0,
        ttft_ms_default=500.0,
        tbt_ms_default=20.0,
        decode_horizon_s=7.0,
        silence_s_max=9.0,
    )


def test_the_cluster_goes_before_the_process_and_leaves_the_rest_alone():
    limits = PolicyLimits(PlacementLimits(ttft_ms_default=500.0, tbt_ms_default=20.0))
    limits.configure(ClusterConfig(strategy="random", ttft_ms_default=900.0, target_share=0.5))
    assert limits.current() == PlacementLimits(
        strategy=Strategy.RANDOM, ttft_ms_default=900.0, tbt_ms_default=20.0, target_share=0.5
    )
    limits.configure(ClusterConfig(adaptive=True))
    assert limits.current() == PlacementLimits(ttft_ms_default=500.0, tbt_ms_default=20.0, adaptive=True)
    limits.configure(ClusterConfig(tbt_ms_default=0.0))
    assert limits.current() == PlacementLimits(ttft_ms_default=500.0, tbt_ms_default=None)
    limits.configure(ClusterConfig())
    assert limits.current() == PlacementLimits(ttft_ms_default=500.0, tbt_ms_default=20.0)
