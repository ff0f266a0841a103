"""The placement limits as they are in force: what the process was started with, and what changed since.

The one place that puts them together: over the process's own settings what the cluster's configuration
sets, and over both what was found while requests came (`policy.adapt`), where they may tune themselves.
Everything else asks anew for each decision.
"""

from dataclasses import replace

from cluster.cluster_config import ClusterConfig
from conductor.config import ConductorConfig
from policy import adapt
from policy.adapt import Adaptation, Outcomes
from policy.choice import AdmissionMode, PlacementLimits, Strategy
from policy.core import ScheduleRequest
from policy.view import ClusterView


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
        self._adaptation = Adaptation()

    def current(self) -> PlacementLimits:
        """As they are set now."""
        return self._current

    def tuned(self) -> PlacementLimits:
        """As they were found best by now."""
        return adapt.tuned(self._current, self._adaptation)

    def deciding(self, view: ClusterView, now_s: float) -> PlacementLimits:
        """In force for a decision by what the view says."""
        if not self._current.adaptive:
            return self._current
        self._adaptation = adapt.asked(self._adaptation, None, self._current)
        self._adaptation = adapt.pressed(self._adaptation, view, now_s)
        return self.tuned()

    def placed(self, request: ScheduleRequest) -> None:
        """Its target could be met, as far as was predicted: it counts among those that requests name. To name
        one that cannot be met costs nothing, and would set the price of work for all others."""
        if self._current.adaptive and not request.attempt:
            self._adaptation = adapt.asked(self._adaptation, request.ttft_ms_max, self._current)

    def answered(self, outcomes: Outcomes, now_s: float) -> None:
        """What became of requests since the last time."""
        if self._current.adaptive:
            self._adaptation = adapt.observed(self._adaptation, outcomes, now_s)

    def configure(self, config: ClusterConfig) -> None:
        """Take over what the cluster's configuration sets now. What was found before starts anew where limits
        begin or cease to tune themselves."""
        before, self._current = self._current, configured(self._base, config)
        if before.adaptive != self._current.adaptive:
            self._adaptation = Adaptation()


def _either(set_value: float | None, own_value: float) -> float:
    return own_value if set_value is None else set_value


def _target_ms(set_ms: float | None, own_ms: float | None) -> float | None:
    """As a setting 0 is no target; not set is the own one."""
    return own_ms if set_ms is None else set_ms or None
