"""Requests that ask for another place, as a gateway lets them: oldest first, so many at once.

So a lost instance brings no storm of questions, and who has waited longest is placed first.
"""

from collections.abc import Callable
from functools import partial
from heapq import heappop, heappush

from simulator.events import Events
from simulator.request import SimulatedRequest


class Replacements:
    def __init__(
        self,
        events: Events,
        in_flight_max: int,
        message_s: float,
        place: Callable[[SimulatedRequest], None],
    ) -> None:
        """`place` is called at the conductor."""
        self._events = events
        self._in_flight_max = in_flight_max
        self._message_s = message_s
        self._place = place
        self._waiting: list[tuple[float, int, SimulatedRequest]] = []
        self._in_flight = 0

    def ask(self, request: SimulatedRequest) -> None:
        heappush(self._waiting, (request.arrived_s, request.index, request))
        self._ask_next()

    def _ask_next(self) -> None:
        while self._waiting and self._in_flight < self._in_flight_max:
            _, _, request = heappop(self._waiting)
            self._in_flight += 1
            self._events.after(self._message_s, partial(self._asked, request))

    def _asked(self, request: SimulatedRequest) -> None:
        self._place(request)
        self._events.after(self._message_s, self._answered)

    def _answered(self) -> None:
        self._in_flight -= 1
        self._ask_next()
