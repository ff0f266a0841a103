"""What the instances tell of a request's life to whoever keeps account of it."""

from typing import Protocol

from kvindex.core import InstanceId
from simulator.request import SimulatedRequest


class Lives(Protocol):
    """Each request is refused any number of times, and then finished once unless it was refused for good."""

    def refused(self, request: SimulatedRequest, attempt: int, culprit: InstanceId) -> None:
        """`culprit` cannot take it, or go on with it. What is said of another attempt than its latest changes
        nothing."""

    def lost(self, request: SimulatedRequest, attempt: int, culprit: InstanceId) -> None:
        """`culprit` failed under it."""

    def finished(self, request: SimulatedRequest) -> None: ...
