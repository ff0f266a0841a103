"""Clock, links, steps and load of the simulated cluster, each against what it must be by its words."""

from collections.abc import Sequence
from itertools import pairwise
from math import floor, inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvindex.core import InstanceId
from policy.core import InstanceState, LoadSnapshot
from policy.evict import UNKNOWN_USE, EvictionOrder
from simulator.batch import StepTimes
from simulator.closed_cache import ClosedCache
from simulator.events import Events
from simulator.links import Flow, Links, share
from simulator.node import LoadTeller
from simulator.results import distribution

pytestmark = pytest.mark.unit

CARD = 1e9


def test_events_happen_in_the_order_of_time_then_of_planning() -> None:
    events = Events()
    seen: list[tuple[float, str]] = []

    def see(name: str) -> None:
        seen.append((events.now_s, name))

    def see_and_cause() -> None:
        see("second")
        events.after(0.0, lambda: see("caused"))

    events.at(2.0, lambda: see("late"))
    events.at(1.0, lambda: see("first"))
    events.at(1.0, see_and_cause)
    events.at(1.0, lambda: see("third"))
    events.at(1.5, lambda: see("never")).cancel()
    events.run()
    assert seen == [(1.0, "first"), (1.0, "second"), (1.0, "third"), (1.0, "caused"), (2.0, "late")]


def test_nothing_is_planned_for_a_time_that_is_over() -> None:
    events = Events()
    events.at(1.0, lambda: None)
    events.run()
    with pytest.raises(ValueError, match="is over"):
        events.at(0.5, lambda: None)


@given(
    st.lists(
        st.tuples(st.integers(0, 3), st.integers(0, 3), st.sampled_from([inf, 1e8, 3e8, 9e8, 2e9])),
        max_size=12,
    )
)
def test_rates_are_max_min_fair(ends: Sequence[tuple[int, int, float]]) -> None:
    """None above its feed, no card above its rate; whoever has less than its feed meets a full card on
    which nobody has more."""
    flows = []
    for source, target, feed in ends:
        flow = Flow(source, target)
        flow.feed_bytes_per_s = feed
        flows.append(flow)
    share(flows, CARD)
    cards = {card for flow in flows for card in (flow.out_of, flow.into)}
    users = {card: [flow for flow in flows if card in (flow.out_of, flow.into)] for card in cards}
    used = {card: sum(flow.rate for flow in users[card]) for card in cards}
    assert all(rate <= CARD * (1 + 1e-6) for rate in used.values())
    for flow in flows:
        assert 0 < flow.rate <= flow.feed_bytes_per_s
        if flow.rate < flow.feed_bytes_per_s * (1 - 1e-6):
            assert any(
                used[card] >= CARD * (1 - 1e-6)
                and flow.rate >= max(other.rate for other in users[card]) * (1 - 1e-6)
                for card in (flow.out_of, flow.into)
            )


def never() -> None:
    raise AssertionError("broken")


def test_a_short_flow_leaves_its_share_to_the_long_one() -> None:
    events = Events()
    links = Links(events, CARD)
    done: list[tuple[str, float]] = []
    links.send(0, 2, 1e9, lambda: done.append(("short", events.now_s)), never)
    links.send(1, 2, 3e9, lambda: done.append(("long", events.now_s)), never)
    events.run()
    assert done == [("short", pytest.approx(2.0)), ("long", pytest.approx(4.0))]
    assert links.bytes_total == pytest.approx(4e9)
    assert links.flows == 0


@given(st.floats(1e-3, 1.0), st.sampled_from([0.0, 1e-9, 1e-5, 1e-2]), st.integers(0, 400), st.floats(0, 1))
def test_steps_are_counted_in_closed_form(first_s: float, rise_s: float, steps: int, part: float) -> None:
    times = StepTimes(first_s, rise_s)
    assert times.upto(steps) == pytest.approx(sum(times.each(steps)))
    passed_s = times.upto(steps) + part * (times.upto(steps + 1) - times.upto(steps))
    begun, done = times.begun_within(passed_s), times.done_within(passed_s)
    assert times.upto(begun) >= passed_s > (times.upto(begun - 1) if begun else -1.0)
    assert times.upto(done) <= passed_s < times.upto(done + 1)


@given(
    st.lists(st.tuples(st.floats(0.001, 0.7), st.booleans()), max_size=30), st.sampled_from([0.0, 0.05, 0.1])
)
def test_load_is_what_it_was_when_it_was_told(steps: Sequence[tuple[float, bool]], message_s: float) -> None:
    """Beside a teller that makes a snapshot at every moment."""
    events = Events()
    requests = 0
    changes = [(0.0, 0)]

    def load(at_s: float) -> LoadSnapshot:
        assert changes[-1][0] <= at_s <= events.now_s
        return LoadSnapshot(InstanceId("one"), (), InstanceState.SERVING, requests=requests)

    teller = LoadTeller(events, 0.1, message_s, load)

    def change() -> None:
        nonlocal requests
        teller.before_change()
        requests += 1
        changes.append((events.now_s, requests))

    def look() -> None:
        told = teller.arrived()
        moment = floor((events.now_s - message_s) / 0.1)
        if moment < 0:
            assert told is None
            return
        assert told is not None
        assert told.moment <= moment
        # A change at the very moment may be told then or at the next.
        as_of = [number for at_s, number in changes if at_s < moment * 0.1] or [0]
        assert told.load.requests in {as_of[-1], *(n for at_s, n in changes if at_s == moment * 0.1)}

    at_s = 0.0
    for delay_s, is_change in steps:
        at_s += delay_s
        events.at(at_s, change if is_change else look)
    events.run()


def test_a_held_prefix_stays_whatever_comes() -> None:
    cache = ClosedCache(EvictionOrder.LRU, 4)
    cache.use((1, 2, 3), 0, UNKNOWN_USE)
    cache.hold((1, 2))
    cache.use((7, 8, 9), 0, UNKNOWN_USE)
    assert cache.hits((1, 2, 3)) == 2
    assert cache.hits((7, 8, 9)) == 2
    cache.release((1, 2))
    cache.check_integrity()
    cache.use((10, 11, 12, 13), 0, UNKNOWN_USE)
    assert cache.hits((1, 2)) == 0
    cache.check_integrity()


def test_percentiles_occur() -> None:
    found = distribution([5.0, 1.0, 2.0, 4.0, 3.0])
    assert found is not None
    assert (found.mean, found.p50, found.p90, found.max) == (3.0, 3.0, 5.0, 5.0)
    assert distribution([]) is None


def test_time_never_goes_back() -> None:
    events = Events()
    seen: list[float] = []
    for at_s in (3.0, 1.0, 2.0, 1.0):
        events.at(at_s, lambda: seen.append(events.now_s))
    events.run()
    assert all(before <= after for before, after in pairwise(seen))
