from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.views import (
    D1,
    D2,
    P1,
    P2,
    decode,
    instance,
    prefill,
    queued,
    running,
    snapshot,
    view_of,
)

from kvindex.core import InstanceId
from policy.core import ENDED_LISTED_MAX, EndedRequest, Placement, RequestId
from policy.lengths import EVERYBODY
from policy.predict import outlook
from policy.view import (
    Booking,
    ClusterView,
    expire,
    with_booking,
    with_instance,
    with_instances,
    with_load,
    with_placement,
    without_instance,
)

pytestmark = pytest.mark.unit

QUAD = view_of(prefill("p1"), prefill("p2"), decode("d1"), decode("d2"))


def booking(name: str = "r", attempt: int = 1, prefill_name=P1, decode_name=D1, at_s: float = 0.0) -> Booking:
    return Booking(RequestId(name), attempt, prefill_name, decode_name, 900, 100, at_s, 64)


class TestInstances:
    def test_a_changed_record_of_the_same_process_keeps_its_load(self):
        moved = replace(instance("p1", heard_at_s=9.0), host="10.0.0.9")
        known = with_instance(QUAD, moved).instances[P1]
        assert known.host == "10.0.0.9"
        assert known.load == QUAD.instances[P1].load
        assert known.heard_at_s == QUAD.instances[P1].heard_at_s

    def test_another_incarnation_starts_afresh(self):
        view = with_booking(QUAD, booking())
        view = with_instance(view, instance("p1", incarnation=2))
        assert view.instances[P1].load is None
        assert view.bookings == {}

    def test_a_removed_instance_takes_its_bookings_along(self):
        view = with_booking(with_booking(QUAD, booking("a")), booking("b", 1, P2, D2))
        assert list(without_instance(view, D1).bookings) == ["b"]
        assert D1 not in without_instance(view, D1).instances

    def test_registry_as_a_whole(self):
        view = with_booking(QUAD, booking())
        kept = [instance("p1", *QUAD.instances[P1].roles, heard_at_s=5.0), instance("d9")]
        synced = with_instances(view, kept)
        assert set(synced.instances) == {"p1", "d9"}
        assert synced.instances[P1] is view.instances[P1]
        assert with_instances(synced, kept) is synced


class TestLoad:
    def test_latest_snapshot_stands(self):
        new = snapshot("p1", queued=(queued("q", 5),))
        view = with_load(QUAD, new, incarnation=1, seq=2, now_s=3.0)
        assert view.instances[P1].load is new
        assert view.instances[P1].heard_at_s == 3.0

    @pytest.mark.parametrize(
        ("name", "incarnation", "seq"), [("p1", 1, 1), ("p1", 2, 9), ("p1", 0, 9), ("stranger", 1, 9)]
    )
    def test_stale_foreign_and_dead_snapshots_change_nothing(self, name, incarnation, seq):
        assert with_load(QUAD, snapshot(name), incarnation, seq, 3.0) is QUAD

    @pytest.mark.parametrize(
        "load", [snapshot("p1", queued=(queued("r", 5),)), snapshot("d1", running=(running("r"),))]
    )
    def test_ends_the_bookings_it_lists(self, load):
        view = with_booking(with_booking(QUAD, booking("r")), booking("other"))
        assert list(with_load(view, load, 1, 2, 0.0).bookings) == ["other"]

    def test_another_attempt_ends_no_booking(self):
        view = with_booking(QUAD, booking("r", attempt=2))
        load = snapshot("p1", queued=(queued("r", 5, attempt=1),))
        assert with_load(view, load, 1, 2, 0.0).bookings == view.bookings


class TestBookings:
    def test_the_latest_attempt_counts(self):
        second = booking(attempt=2, prefill_name=P2)
        assert with_booking(with_booking(QUAD, booking()), second).bookings["r"] is second
        assert with_booking(with_booking(QUAD, second), booking()).bookings["r"] is second

    def test_expire(self):
        view = with_booking(with_booking(QUAD, booking("old", at_s=0.0)), booking("new", at_s=5.0))
        assert expire(view, 9.0, 10.0) is view
        assert list(expire(view, 10.0, 10.0).bookings) == ["new"]

    def test_of_a_placement(self):
        placement = Placement(RequestId("r"), 2, P1, D1, P1, prefix_blocks=3)
        made = with_placement(QUAD, placement, 100, 7.0).bookings["r"]
        assert (made.key, made.new_tokens, made.prefix_tokens, made.kv_tokens) == (("r", 2), 52, 48, 100)
        assert (made.prefill, made.decode, made.booked_at_s) == (P1, D1, 7.0)

    @pytest.mark.parametrize(("at_prefill", "at_decode"), [("p9", D1), (P1, "d9")])
    def test_nothing_is_booked_on_an_unknown_instance(self, at_prefill, at_decode):
        placement = Placement(RequestId("r"), 1, InstanceId(at_prefill), InstanceId(at_decode))
        assert with_placement(QUAD, placement, 100, 7.0) is QUAD


class TestPredictedLoad:
    def test_bookings_add_to_the_queue(self):
        before = outlook(QUAD, 0.0).backlog(P1)
        after = outlook(with_booking(QUAD, booking()), 0.0).backlog(P1)
        assert (before.requests, before.wait_s) == (0, 0.0)
        assert after.requests == 1
        assert after.wait_s == pytest.approx(0.01 + 0.9 + 1e-8 * 900 * (100 + 450))

    def test_booked_work_drains_from_when_it_was_booked(self):
        view = QUAD
        for i in range(3):
            view = with_booking(view, booking(f"r{i}", at_s=float(10 * i)))
        work_s = outlook(with_booking(QUAD, booking()), 0.0).backlog(P1).wait_s
        assert outlook(view, 20.25).backlog(P1).wait_s == pytest.approx(work_s - 0.25)
        assert outlook(view, 22.0).backlog(P1).wait_s == 0.0

    def test_a_request_counts_once_at_its_decode(self):
        view = view_of(
            prefill("p1", queued("reserved", 160), queued("waiting", 160)),
            decode("d1", running("reserved", kv_tokens=160)),
        )
        load = outlook(with_booking(view, booking("booked")), 0.0).load(D1)
        assert load.sequences == 3
        assert load.kv_tokens == 160 + 160 + 1000
        assert load.blocks_pending == 11 + 64

    def test_what_is_no_longer_queued_is_no_load_however_it_was_listed(self):
        """One that a snapshot lists twice, for two decodes, makes no sense, and leaves nothing behind."""
        twice = (queued("r", 160, "d1"), queued("r", 160, "d2"), queued("s", 160, "d1"))
        view = with_load(QUAD, snapshot("p1", queued=twice), 1, 2, 1.0)
        assert [outlook(view, 1.0).load(name).sequences for name in (D1, D2)] == [2, 0]
        view = with_load(view, snapshot("p1", queued=twice[2:]), 1, 3, 2.0)
        assert [outlook(view, 2.0).load(name).sequences for name in (D1, D2)] == [1, 0]
        view = with_load(view, snapshot("p1"), 1, 4, 3.0)
        assert [outlook(view, 3.0).load(name).sequences for name in (D1, D2)] == [0, 0]

    def test_every_sample_that_grows_is_one_more_in_a_step(self):
        view = view_of(prefill("p1"), decode("d1", replace(running("r"), samples=4), running("s")))
        assert outlook(view, 0.0).load(D1).sequences == 5


@given(
    st.lists(
        st.tuples(
            st.sampled_from("abc"), st.integers(1, 3), st.sampled_from([P1, P2]), st.sampled_from([D1, D2])
        )
    )
)
def test_one_booking_a_request_that_of_its_highest_attempt(drawn):
    view: ClusterView = QUAD
    for name, attempt, at_prefill, at_decode in drawn:
        view = with_booking(view, booking(name, attempt, at_prefill, at_decode))
    highest = {name: max(a for n, a, _, _ in drawn if n == name) for name, _, _, _ in drawn}
    assert {name: known.attempt for name, known in view.bookings.items()} == highest
    ahead = outlook(view, 0.0)
    assert ahead.backlog(P1).requests + ahead.backlog(P2).requests == len(highest)


def test_a_placement_that_its_instances_could_never_hold_books_nothing():
    """Another conductor's: it would stand before all others until it ran out."""
    view = view_of(prefill("p1"), decode("d1"))
    placement = Placement(RequestId("r"), 1, P1, D1)
    most_tokens = (instance("x").blocks - 1) * 16
    assert with_placement(view, placement, most_tokens, 0.0).bookings
    for prompt_tokens, samples in ((most_tokens + 1, 1), (2**63 - 1, 1), (1, 2**62)):
        booked = with_placement(view, placement, prompt_tokens, 0.0, samples=samples)
        assert not booked.bookings


def test_of_what_ended_no_more_is_learnt_than_a_snapshot_may_list():
    view = view_of(prefill("p1"), decode("d1"))
    ended = tuple(EndedRequest(RequestId("r"), 0, n, tenant=str(n)) for n in range(20_000))
    learned = with_load(view, replace(snapshot("d1"), ended=ended, ended_total=10**18), 1, 2, 0.0).lengths
    latest = range(20_000 - ENDED_LISTED_MAX, 20_000)
    assert learned.by_group == {
        **{(str(n), b""): (n,) for n in latest},
        EVERYBODY: tuple(latest),
    }
