"""How instances are best split between prefill and decode: the highest rate of requests at which enough of
them meet both targets, for one split after the other, and what that is a GPU.

A rate passes where the attainment, the share of all requests that are served within both targets, is at least
what is asked for; who is rejected has not attained. The rate is changed by the speed of the arrivals: doubled
or halved from a first guess until one that passes and one that does not are known, then bisected. Requests
should arrive for many times as long as a first token may take: what fits into the queue of the last moments
passes, whatever the rate.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import sqrt

from simulator.cluster import SimulatedRun, simulate_cluster
from simulator.results import Summary, summary
from simulator.setup import SPEEDUP_MAX, ClusterSetup, NodeShape
from simulator.trace import TracedRequest

SPEEDUP_MIN = 1 / 1024
"""A split that misses even this serves nothing."""
SIMULATIONS_LIMIT = 64
"""For one split."""


@dataclass(frozen=True, slots=True)
class Split:
    """Instances of `gpus_per_instance` GPUs: `prefill` and `decode`, or `coupled` ones."""

    gpus_per_instance: int
    prefill: int = 0
    decode: int = 0
    coupled: int = 0

    @property
    def gpus(self) -> int:
        return self.gpus_per_instance * (self.prefill + self.decode + self.coupled)

    @property
    def name(self) -> str:
        return f"{self.prefill}P+{self.decode}D" if self.prefill else f"{self.coupled} coupled"


@dataclass(frozen=True, slots=True)
class SearchLimits:
    attainment: float = 0.9
    tolerance: float = 0.05
    """How much higher, as a share, a rate that does not pass may be than the one that is told."""
    simulations_max: int = 16
    """For one split."""


@dataclass(frozen=True, slots=True)
class Trial:
    """One simulation."""

    speedup: float
    offered_per_s: float
    told: Summary

    @property
    def attainment(self) -> float:
        return self.told.in_targets / self.told.requests

    @property
    def goodput_per_s(self) -> float:
        """While requests arrive: what is left at the end is not counted as time."""
        return self.offered_per_s * self.attainment


@dataclass(frozen=True, slots=True)
class Planned:
    """What was found for one split."""

    split: Split
    best: Trial | None
    """At the highest speed that passes; None where none does."""
    simulations: int
    exact: bool
    """Within the tolerance; else the search ended at a bound."""

    @property
    def goodput_per_gpu_s(self) -> float:
        return 0.0 if self.best is None else self.best.goodput_per_s / self.split.gpus


OnTrial = Callable[[Split, float], None]
"""Told before each simulation: of what, and at which speed."""


def splits_of(gpus: int, gpus_per_instance: int) -> Iterator[Split]:
    """Every split of the GPUs into instances, then all of them coupled; those left over stay idle."""
    instances = gpus // gpus_per_instance
    for prefill in range(1, instances):
        yield Split(gpus_per_instance, prefill=prefill, decode=instances - prefill)
    if instances:
        yield Split(gpus_per_instance, coupled=instances)


def best_of(planned: Iterable[Planned]) -> Planned | None:
    """The most goodput a GPU; of equals the first. None where nothing is served at all."""
    served = [one for one in planned if one.best is not None]
    return max(served, key=lambda one: one.goodput_per_gpu_s, default=None)


class Planner:
    """Tries splits with the same requests, targets and policies."""

    def __init__(
        self,
        requests: Sequence[TracedRequest],
        setup: ClusterSetup,
        nodes: Callable[[int], NodeShape],
        limits: SearchLimits,
        on_trial: OnTrial,
    ) -> None:
        """`requests` are at least two that do not all arrive at once. Of `setup` everything counts but
        instances, their shape, which `nodes` tells by their GPUs, and speedup."""
        arrivals_ms = [request.arrived_ms for request in requests]
        self._requests = requests
        self._setup = setup
        self._nodes = nodes
        self._limits = limits
        self._on_trial = on_trial
        self._rate_per_s = (len(requests) - 1) * 1e3 / (max(arrivals_ms) - min(arrivals_ms))

    def fixed(self, split: Split, speedup: float) -> Planned:
        """At this speed, whether it passes or not."""
        return Planned(split, self.trial(split, speedup), 1, exact=True)

    def highest(self, split: Split, first_speedup: float) -> Planned:
        """At the highest speed that passes; the search begins at the given one."""
        trials: list[Trial] = []

        def passes(speedup: float) -> bool:
            trials.append(self.trial(split, speedup))
            return trials[-1].attainment >= self._limits.attainment

        exact = bracketed(passes, first_speedup, self._limits)
        passed = [trial for trial in trials if trial.attainment >= self._limits.attainment]
        best = max(passed, key=lambda trial: trial.speedup, default=None)
        return Planned(split, best, len(trials), exact)

    def trial(self, split: Split, speedup: float) -> Trial:
        self._on_trial(split, speedup)
        return Trial(speedup, self._rate_per_s * speedup, self._told(self._run(split, speedup)))

    def _run(self, split: Split, speedup: float) -> SimulatedRun:
        setup = replace(
            self._setup,
            prefill=split.prefill,
            decode=split.decode,
            coupled=split.coupled,
            node=self._nodes(split.gpus_per_instance),
            speedup=speedup,
        )
        return simulate_cluster(self._requests, setup)

    def _told(self, run: SimulatedRun) -> Summary:
        return summary(run.results, self._setup.ttft_s_max, self._setup.tbt_s_max)


def bracketed(passes: Callable[[float], bool], first: float, limits: SearchLimits) -> bool:
    """Asks for speeds until the highest that passes is known to the tolerance: whether it is. At most
    `simulations_max` times, and none outside SPEEDUP_MIN to SPEEDUP_MAX."""
    low: float | None = None
    high: float | None = None
    speedup = min(SPEEDUP_MAX, max(SPEEDUP_MIN, first))
    for _ in range(limits.simulations_max):
        if passes(speedup):
            low = speedup
        else:
            high = speedup
        if low is not None and high is not None:
            if high <= low * (1 + limits.tolerance):
                return True
            speedup = sqrt(low * high)
        elif low is not None:
            if low >= SPEEDUP_MAX:
                return False
            speedup = min(SPEEDUP_MAX, 2 * low)
        elif high is not None:
            if high <= SPEEDUP_MIN:
                return True
            speedup = max(SPEEDUP_MIN, high / 2)
    return False
