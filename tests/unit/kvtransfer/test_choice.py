"""Which transport a call takes, when one that failed is tried again, and how often a bad link is dialled."""

import math
import random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from kvtransfer.choice import Dial, Ladder, Use, Wait
from kvtransfer.kinds import TransportKind
from kvtransfer.limits import Limits

pytestmark = pytest.mark.unit

SHM, RDMA, TCP = TransportKind.SHM, TransportKind.RDMA, TransportKind.TCP
LIMITS = Limits(retry_s_min=0.5, retry_s_max=60.0, dial_backoff_s_min=0.02, dial_backoff_s_max=5.0)


def ladder(*kinds: TransportKind, uniform: float = 0.0) -> Ladder:
    return Ladder(kinds, LIMITS, lambda: uniform)


def test_the_best_that_is_up_or_due() -> None:
    pair = ladder(SHM, RDMA, TCP)
    assert pair.choose(0.0, set()) == Dial(SHM)
    assert pair.choose(0.0, set(), {SHM}) == Dial(RDMA)
    assert pair.choose(0.0, {SHM, TCP}) == Use(SHM)
    assert pair.choose(0.0, {SHM, TCP}, {SHM, RDMA}) == Use(TCP)
    assert pair.choose(0.0, {TCP}) == Use(TCP, probe=SHM)
    assert pair.choose(0.0, set(), {SHM, RDMA, TCP}) == Wait(math.inf)


def test_down_a_rung_and_back_up() -> None:
    pair = ladder(SHM, TCP)
    assert pair.failed(SHM, 10.0) == 0.5
    assert pair.better_due_s(TCP) == 10.5
    assert pair.choose(10.0, set()) == Dial(TCP)
    assert pair.choose(10.4, {TCP}) == Use(TCP)
    assert pair.choose(10.5, {TCP}) == Use(TCP, probe=SHM)
    assert pair.failed(SHM, 10.5) == 1.0
    assert pair.choose(11.4, {TCP}) == Use(TCP)
    assert pair.choose(11.5, {TCP}) == Use(TCP, probe=SHM)
    assert pair.choose(11.6, {TCP, SHM}) == Use(SHM)


def test_nothing_is_due() -> None:
    pair = ladder(SHM, TCP)
    pair.failed(SHM, 0.0)
    pair.failed(TCP, 0.0)
    assert pair.choose(0.0, set()) == Wait(0.02)
    assert pair.choose(0.0, set(), {TCP}) == Wait(0.5)
    assert pair.choose(0.02, set()) == Dial(TCP)


@pytest.mark.parametrize(("kind", "first_s", "last_s"), [(SHM, 0.5, 60.0), (TCP, 0.02, 5.0)])
def test_waits_double_up_to_their_bound(kind: TransportKind, first_s: float, last_s: float) -> None:
    whole, half = ladder(SHM, TCP), ladder(SHM, TCP, uniform=1.0)
    waits = [whole.failed(kind, 0.0) for _ in range(2000)]
    assert waits[:3] == [first_s, 2 * first_s, 4 * first_s]
    assert waits[-1] == last_s
    assert [half.failed(kind, 0.0) for _ in range(2000)] == [wait_s / 2 for wait_s in waits]


def test_trusted_again_only_after_it_stood_and_carried_a_call() -> None:
    pair = ladder(SHM, TCP)
    pair.failed(SHM, 0.0)
    assert pair.failed(SHM, 0.5) == 1.0  # due at 1.5
    pair.carried(SHM, 2.4)
    assert pair.failed(SHM, 2.4) == 2.0  # it did not stand as long as it was waited for: due at 4.4
    pair.carried(SHM, 6.4)
    assert pair.failed(SHM, 6.4) == 0.5


@pytest.mark.parametrize("carries", [True, False])
def test_dials_of_a_flapping_link_are_few(carries: bool) -> None:
    """Ten minutes of a caller that calls each 5 ms over links that dial well and break at their next call."""
    pair = Ladder((TCP,), LIMITS, random.Random(7).random)
    up: set[TransportKind] = set()
    dials = 0
    for turn in range(120_000):
        now_s = turn * 0.005
        choice = pair.choose(now_s, up)
        if isinstance(choice, Dial):
            dials += 1
            up = {TCP}
            if carries:
                pair.carried(TCP, now_s)
        elif isinstance(choice, Use):
            pair.failed(TCP, now_s)
            up = set()
    # Eight doublings from 20 ms to 5 s, then one dial in 2.5 to 5 s.
    assert 600 / 5 <= dials <= 9 + 600 / 2.5


class LadderMachine(RuleBasedStateMachine):
    """Any order of dials, losses, calls and time: what is chosen is up, or due by what failures said."""

    @initialize(kinds=st.permutations([SHM, RDMA, TCP]), count=st.integers(1, 3), seed=st.integers(0, 99))
    def begin(self, kinds: list[TransportKind], count: int, seed: int) -> None:
        self.kinds = kinds[:count]
        self.ladder = Ladder(self.kinds, LIMITS, random.Random(seed).random)
        self.now_s = 0.0
        self.up: set[TransportKind] = set()
        self.due_s = dict.fromkeys(self.kinds, -math.inf)
        self.failures = dict.fromkeys(self.kinds, 0)

    def fail(self, kind: TransportKind) -> None:
        wait_s = self.ladder.failed(kind, self.now_s)
        last = kind == self.kinds[-1]
        least_s = LIMITS.dial_backoff_s_min if last else LIMITS.retry_s_min
        most_s = LIMITS.dial_backoff_s_max if last else LIMITS.retry_s_max
        assert least_s / 2 <= wait_s <= most_s
        assert wait_s <= least_s * 2 ** self.failures[kind]
        self.failures[kind] += 1
        self.due_s[kind] = self.now_s + wait_s
        self.up.discard(kind)

    @rule(passed_s=st.floats(0.0, 100.0))
    def time_passes(self, passed_s: float) -> None:
        self.now_s += passed_s

    @rule(unfit=st.sets(st.sampled_from([SHM, RDMA, TCP])), works=st.booleans())
    def call(self, unfit: set[TransportKind], works: bool) -> None:
        fit = [kind for kind in self.kinds if kind not in unfit]
        choice = self.ladder.choose(self.now_s, self.up, unfit)
        match choice:
            case Use(kind, probe):
                assert kind == next(kind for kind in fit if kind in self.up)
                if probe is not None:
                    assert fit.index(probe) < fit.index(kind)
                    assert self.due_s[probe] <= self.now_s
                    self.dial(probe, works)
            case Dial(kind):
                assert not self.up.intersection(fit)
                assert kind == next(kind for kind in fit if self.due_s[kind] <= self.now_s)
                self.dial(kind, works)
            case Wait(until_s):
                assert not self.up.intersection(fit)
                assert until_s == min((self.due_s[kind] for kind in fit), default=math.inf)
                assert until_s > self.now_s

    def dial(self, kind: TransportKind, works: bool) -> None:
        if works:
            self.up.add(kind)
        else:
            self.fail(kind)

    @rule(at=st.integers(0, 2))
    def lose(self, at: int) -> None:
        if at < len(self.kinds) and self.kinds[at] in self.up:
            self.fail(self.kinds[at])

    @rule(at=st.integers(0, 2))
    def carry(self, at: int) -> None:
        if at < len(self.kinds) and self.kinds[at] in self.up:
            self.ladder.carried(self.kinds[at], self.now_s)

    @invariant()
    def a_call_waits_no_longer_than_the_last_transport_does(self) -> None:
        if not hasattr(self, "ladder"):
            return
        choice = self.ladder.choose(self.now_s, self.up)
        if isinstance(choice, Wait):
            assert choice.until_s - self.now_s <= LIMITS.dial_backoff_s_max


LadderMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestLadder = LadderMachine.TestCase
