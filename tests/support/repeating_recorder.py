"""Stands in for CUDA graphs: a replay computes again, on the same tensors."""

from collections.abc import Callable


class RepeatingRecorder:
    def __init__(self) -> None:
        self.recorded = 0

    def record(self, compute: Callable[[], None]) -> "RepeatingRecording":
        self.recorded += 1
        return RepeatingRecording(compute)


class RepeatingRecording:
    def __init__(self, compute: Callable[[], None]) -> None:
        self._compute = compute

    def replay(self) -> None:
        self._compute()
