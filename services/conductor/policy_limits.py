"""The placement limits as they are in force: what the process was started with, and what changed since.

The one place that puts them together: over the process's own settings what the cluster's configuration
sets. Everything else asks `current` anew for each decision.
"""

from dataclasses import replace

from cluster.cluster_config import ClusterConfig
from conductor.config import ConductorConfig
from policy.choice import AdmissionMode, PlacementLimits, Strategy


def placement_limits(config: ConductorConfig) -> PlacementLimits:
    """What a process was started with."""
    own = ClusterConfig(
        strategy=config.strategy,
        admission=config.admission,
        kvcache_balancing_threshold=config.kvcache_balancing_threshold,
        ttft_ms_default=config.ttft_ms_default,
        tbt_ms_default=config.tbt_ms_default,
        target_share=config.target_share,
        decode_horizon_s=config.decode_horizon_s,
        adaptive=config.adaptive,
    )
    return configured(PlacementLimits(silence_s_max=config.silence_s_max), own)


def configured(limits: PlacementLimits, config: ClusterConfig) -> PlacementLimits:
    """`limits` with what `config` sets."""
    return replace(
        limits,
        strategy=limits.strategy if config.strategy is None else Strategy(config.strategy),
        admission=limits.admission if config.admission is None else AdmissionMode(config.admission),
        kvcache_balancing_threshold=_either(
            config.kvcache_balancing_threshold, limits.kvcache_balancing_threshold
        ),
        ttft_ms_default=_target_ms(config.ttft_ms_default, limits.ttft_ms_default),
        tbt_ms_default=_target_ms(config.tbt_ms_default, limits.tbt_ms_default),
        target_share=_either(config.target_share, limits.target_share),
        decode_horizon_s=_either(config.decode_horizon_s, limits.decode_horizon_s),
        adaptive=limits.adaptive if config.adaptive is None else config.adaptive,
    )


class PolicyLimits:
    """One event loop's; what is in force is replaced as a whole, never changed."""

    def __init__(self, base: PlacementLimits) -> None:
        self._base = base
        self._current = base

    def current(self) -> PlacementLimits:
        """In force now; one decision uses one answer."""
        return self._current

    def configure(self, config: ClusterConfig) -> None:
        """Take over what the cluster's configuration sets now."""
        self._current = configured(self._base, config)


def _either(set_value: float | None, own_value: float) -> float:
    return own_value if set_value is None else set_value


def _target_ms(set_ms: float | None, own_ms: float | None) -> float | None:
    """As a setting 0 is no target; not set is the own one."""
    return own_ms if set_ms is None else set_ms or None
