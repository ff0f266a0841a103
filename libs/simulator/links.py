"""Bytes between instances: fluid flows that share network cards by max-min fairness.

Each instance has one card, full duplex: so many bytes a second out and as many in; the network between the
cards takes all of it. A flow may be held below its share by who feeds it: KV that is still being computed
cannot be sent. Rates change only where a flow begins, ends or is fed otherwise.
"""

from collections.abc import Callable, Sequence
from math import inf

from simulator.events import Event, Events

REST_BYTES = 1000.0
"""A flow with less to go is through: clocks are floats."""

Direction = tuple[int, bool]
"""A card, and whether into it."""


class Flow:
    """Bytes on their way from one card to another, which may still become more."""

    __slots__ = (
        "broken", "feed_bytes_per_s", "into", "last", "left_bytes", "on_broken", "on_done", "out_of", "rate",
    )  # fmt: skip

    def __init__(self, source: int, target: int) -> None:
        self.out_of: Direction = (source, False)
        self.into: Direction = (target, True)
        self.left_bytes = 0.0
        self.feed_bytes_per_s = inf
        self.rate = 0.0
        self.last = False
        """Nothing comes after what is left."""
        self.on_done: Callable[[], None] | None = None
        self.on_broken: Callable[[], None] | None = None
        self.broken = False
        """One of its ends is gone: nothing comes of what is done with it."""


class Links:
    def __init__(self, events: Events, bytes_per_s: float) -> None:
        self.bytes_total = 0.0
        self._events = events
        self._bytes_per_s = bytes_per_s
        self._flows: list[Flow] = []
        self._as_of_s = 0.0
        self._next: Event | None = None

    @property
    def flows(self) -> int:
        return len(self._flows)

    def open(self, source: int, target: int) -> Flow:
        """A flow that carries nothing yet."""
        flow = Flow(source, target)
        self._flows.append(flow)
        return flow

    def send(
        self,
        source: int,
        target: int,
        sent_bytes: float,
        on_done: Callable[[], None],
        on_broken: Callable[[], None],
    ) -> None:
        """All at once, as fast as the cards allow. Ends with one of the two calls."""
        flow = self.open(source, target)
        flow.left_bytes = sent_bytes
        flow.on_broken = on_broken
        self.close(flow, on_done)

    def feed(self, flow: Flow, more_bytes: float, feed_bytes_per_s: float) -> None:
        """`more_bytes` are to come, and from now on no faster than `feed_bytes_per_s`."""
        if flow.broken:
            return
        self._advance()
        flow.left_bytes += more_bytes
        flow.feed_bytes_per_s = feed_bytes_per_s
        self._share()

    def close(self, flow: Flow, on_done: Callable[[], None]) -> None:
        """Nothing more comes, and what is left goes as fast as the cards allow; `on_done` once all is
        through, at the earliest as an event of its own."""
        if flow.broken:
            return
        flow.last = True
        flow.feed_bytes_per_s = inf
        flow.on_done = on_done
        self._advance()
        self._share()

    def cancel(self, flow: Flow) -> None:
        """Nobody waits for it any more."""
        if not flow.broken and flow in self._flows:
            self._break([flow])

    def drop(self, card: int) -> None:
        """Whatever goes out of the card or into it ends there."""
        gone = [flow for flow in self._flows if card in (flow.out_of[0], flow.into[0])]
        self._break(gone)
        for flow in gone:
            if flow.on_broken is not None:
                flow.on_broken()

    def _break(self, flows: Sequence[Flow]) -> None:
        self._advance()
        for flow in flows:
            flow.broken = True
        self._flows = [flow for flow in self._flows if not flow.broken]
        self._share()

    def _advance(self) -> None:
        now_s = self._events.now_s
        passed_s = now_s - self._as_of_s
        if passed_s > 0.0:
            for flow in self._flows:
                moved_bytes = min(flow.left_bytes, flow.rate * passed_s)
                flow.left_bytes -= moved_bytes
                self.bytes_total += moved_bytes
            self._as_of_s = now_s

    def _share(self) -> None:
        """New rates, and when the first flow is through with them."""
        moving = [flow for flow in self._flows if flow.left_bytes > REST_BYTES]
        share(moving, self._bytes_per_s)
        if self._next is not None:
            self._next.cancel()
            self._next = None
        wait_s = inf
        for flow in self._flows:
            if flow.left_bytes <= REST_BYTES:
                flow.rate = 0.0
                if flow.last:
                    wait_s = 0.0
            elif flow.last:
                wait_s = min(wait_s, flow.left_bytes / flow.rate)
        if wait_s < inf:
            self._next = self._events.after(wait_s, self._end_those_through)

    def _end_those_through(self) -> None:
        self._next = None
        self._advance()
        through = [flow for flow in self._flows if flow.last and flow.left_bytes <= REST_BYTES]
        self._flows = [flow for flow in self._flows if not (flow.last and flow.left_bytes <= REST_BYTES)]
        self._share()
        for flow in through:
            if flow.on_done is not None:
                flow.on_done()


def share(flows: Sequence[Flow], bytes_per_s: float) -> None:
    """Set the rate of each flow: max-min fair over cards, none above what it is fed."""
    fed: dict[Direction, float] = {}
    for flow in flows:
        flow.rate = min(flow.feed_bytes_per_s, bytes_per_s)
        for card in (flow.out_of, flow.into):
            fed[card] = fed.get(card, 0.0) + flow.rate
    if max(fed.values(), default=0.0) > bytes_per_s:
        _fill(flows, bytes_per_s)


def _fill(flows: Sequence[Flow], bytes_per_s: float) -> None:
    """Progressive filling: all rates rise together; a flow stops at what it is fed, or where one of its cards
    is full."""
    left: dict[Direction, float] = {}
    for flow in flows:
        left[flow.out_of] = left[flow.into] = bytes_per_s
    level = 0.0
    rising = list(flows)
    while rising:
        users = dict.fromkeys(left, 0)
        for flow in rising:
            users[flow.out_of] += 1
            users[flow.into] += 1
        used = [(card, number) for card, number in users.items() if number]
        rise = min(left[card] / number for card, number in used)
        rise = min(rise, min(flow.feed_bytes_per_s for flow in rising) - level)
        level += rise
        for card, number in used:
            left[card] -= rise * number
        stopped = []
        for flow in rising:
            flow.rate = level
            if flow.feed_bytes_per_s <= level or min(left[flow.out_of], left[flow.into]) <= REST_BYTES:
                stopped.append(flow)
        rising = [flow for flow in rising if flow not in stopped]
