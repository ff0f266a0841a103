"""How long the GPU takes for a launch: many of them in one graph, so that the CPU's pace is left out."""

from collections.abc import Callable, Sequence
from typing import Protocol

import torch

SAMPLE_S_MIN = 0.02
"""A sample repeats its launches until it takes about this long."""
LAUNCHES_MAX = 2000

Launch = Callable[[], object]


class Timing(Protocol):
    """Some launches, ready to be timed again and again."""

    def sample_s(self) -> float:
        """Seconds of one launch, the mean over a sample."""


class GraphTiming:
    """Launches in turn, recorded in one graph."""

    def __init__(self, launches: Sequence[Launch]) -> None:
        for launch in launches:  # compiles, and fills the libraries' caches
            launch()
        once_s = _timed(lambda: [launch() for launch in launches]) / len(launches)
        rounds = int(SAMPLE_S_MIN / once_s / len(launches)) + 1
        self._count = min(rounds * len(launches), max(LAUNCHES_MAX, len(launches)))
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            for index in range(self._count):
                launches[index % len(launches)]()
        self._graph.replay()

    def sample_s(self) -> float:
        return _timed(self._graph.replay) / self._count


def _timed(work: Launch) -> float:
    """Seconds on the GPU."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    torch.cuda.synchronize()
    begin.record()
    work()
    end.record()
    torch.cuda.synchronize()
    return float(begin.elapsed_time(end)) / 1e3
