import pytest

from kvindex.core import InstanceId
from policy import copies as copies_module
from policy.copies import SETTLE_S, Copies
from policy.replicate import Replication

pytestmark = pytest.mark.unit

PAUSE_S = 60.0


def copy_of(number: int, target: str = "p2") -> Replication:
    return Replication(number.to_bytes(16), "f0", InstanceId("p1"), InstanceId(target), 1, 1000)


def test_in_flight_then_settling_then_only_avoided_then_free():
    copies, copy = Copies(PAUSE_S), copy_of(1)
    copies.begin(copy)
    assert (copies.in_flight, copies.settling, copies.avoided) == ((copy,), (), frozenset())
    copies.end(copy, 10.0, done=True)
    assert (copies.in_flight, copies.settling, copies.avoided) == ((), (copy,), {copy.key})
    copies.forget(10.0 + SETTLE_S + 0.1)
    assert (copies.settling, copies.avoided) == ((), {copy.key})
    copies.forget(10.0 + PAUSE_S + 0.1)
    assert copies.avoided == frozenset()


def test_what_failed_never_counts_as_a_copy():
    copies, copy = Copies(PAUSE_S), copy_of(1)
    copies.begin(copy)
    copies.end(copy, 10.0, done=False)
    assert (copies.settling, copies.avoided) == ((), {copy.key})


def test_what_nobody_waits_for_any_more_counts_as_tried():
    copies = Copies(PAUSE_S)
    for number in range(3):
        copies.begin(copy_of(number))
    copies.end(copy_of(1), 10.0, done=True)
    copies.end_all(11.0)
    assert copies.in_flight == ()
    assert copies.settling == (copy_of(1),)
    assert copies.avoided == {copy_of(number).key for number in range(3)}


def test_one_that_ends_again_is_avoided_from_then_on():
    copies = Copies(PAUSE_S)
    for now_s, number in ((0.0, 1), (30.0, 2), (50.0, 1)):
        copies.end(copy_of(number), now_s, done=False)
    copies.forget(95.0)
    assert copies.avoided == {copy_of(1).key}


def test_bounded(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(copies_module, "TRIED_MAX", 3)
    copies = Copies(PAUSE_S)
    for number in range(5):
        copies.end(copy_of(number), float(number), done=False)
    assert copies.avoided == {copy_of(number).key for number in (2, 3, 4)}
