"""What is outstanding on a send queue: it must never be overrun, and few completions are asked for. Pure.

Work requests carry the numbers 1, 2, 3 … as they are posted. Only every `signal_every`th, and those that
the poster wants to hear of, are signalled: a completion retires its number and all before it.
"""


class SendQueue:
    """The accounting of one queue of `depth` work requests."""

    def __init__(self, depth: int, signal_every: int) -> None:
        # A queue without a signalled request among its last `depth` would never get room again.
        if not 0 < signal_every <= depth:
            raise ValueError(f"signal_every must be from 1 to depth {depth}, not {signal_every}")
        self._depth = depth
        self._signal_every = signal_every
        self.posted = 0
        self.retired = 0

    @property
    def room(self) -> int:
        """How many more may be posted now."""
        return self._depth - (self.posted - self.retired)

    @property
    def idle(self) -> bool:
        return self.posted == self.retired

    def take(self, count: int) -> range:
        """The numbers of the next `count` requests, about to be posted."""
        assert 0 < count <= self.room
        first = self.posted + 1
        self.posted += count
        return range(first, first + count)

    def is_signalled(self, number: int) -> bool:
        """Whether this one must be signalled whatever the poster wants."""
        return number % self._signal_every == 0

    def retire(self, number: int) -> None:
        """A completion of `number` came; they come in order."""
        assert self.retired <= number <= self.posted
        self.retired = number
