"""What the instances tell of a request's life to whoever keeps account of it."""

from typing import Protocol

from kvindex.core import InstanceId
from simulator.request import SimulatedRequest


class Lives(Protocol):
    """Each request is refused any number of times, and then finished once unless it was refused for good."""

    def refused(self, request: SimulatedRequest, instance: InstanceId) -> None: ...

    def finished(self, request: SimulatedRequest) -> None: ...
