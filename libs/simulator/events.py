"""Simulated time: what is to happen, in the order of its time and then of its planning.

Owns the clock and nothing of what happens. No randomness: the same plans give the same order.
"""

from collections.abc import Callable
from heapq import heappop, heappush

Action = Callable[[], None]


class Event:
    """One thing that is to happen, unless it is cancelled before."""

    __slots__ = ("_action", "at_s")

    def __init__(self, at_s: float, action: Action) -> None:
        self.at_s = at_s
        self._action: Action | None = action

    def cancel(self) -> None:
        self._action = None

    def happen(self) -> None:
        action, self._action = self._action, None
        if action is not None:
            action()

    @property
    def cancelled(self) -> bool:
        """Or over."""
        return self._action is None


class Events:
    """A heap of events. `now_s` never falls."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.happened = 0
        self._heap: list[tuple[float, int, Event]] = []
        self._planned = 0

    def at(self, at_s: float, action: Action) -> Event:
        """Plan for a time that is not over. ValueError for one that is."""
        if at_s < self.now_s:
            raise ValueError(f"{at_s} s is over, it is {self.now_s} s")
        event = Event(at_s, action)
        self._planned += 1
        heappush(self._heap, (at_s, self._planned, event))
        return event

    def after(self, delay_s: float, action: Action) -> Event:
        return self.at(self.now_s + delay_s, action)

    def run(self) -> None:
        """Until nothing is left to happen."""
        while self._heap:
            at_s, _, event = heappop(self._heap)
            if not event.cancelled:
                self.now_s = at_s
                self.happened += 1
                event.happen()
