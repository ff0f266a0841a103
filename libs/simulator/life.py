"""What the instances tell of a request's life to whoever keeps account of it."""

from typing import Protocol

from kvindex.core import InstanceId
from simulator.request import SimulatedRequest


class Lives(Protocol):
    """Each request is refused any number of times, then has one first token and is finished once; or it is
    refused for good."""

    def refused(self, request: SimulatedRequest, instance: InstanceId) -> None: ...

    def first_token(self, request: SimulatedRequest) -> None: ...

    def finished(self, request: SimulatedRequest) -> None: ...
