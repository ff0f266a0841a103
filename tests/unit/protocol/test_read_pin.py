"""The source's machine of a read pin: every pin ends, and what was pinned is given back exactly once."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.messages import PinRefused, ReadPin, ReadPinned, RefusalReason
from kvindex.core import InstanceId
from protocol import read_pin
from protocol.read_pin import (
    Answer,
    AwaitAnswer,
    Begin,
    Forget,
    NotPinned,
    Pin,
    Pinned,
    PinPhase,
    Reader,
    ReaderLost,
    ReleaseAsked,
    RevokeAndUnpin,
    TimePassed,
)

pytestmark = pytest.mark.unit

READER = Reader(InstanceId("p"), 7)
ASKED = ReadPin("pin", "fingerprint", b"a" * 16 + b"b" * 16, first_block=1, ttl_s=5.0)
PINNED = Pinned(ReadPinned("pin", 1, b"\1\0\0\0", "grant", ttl_s=0.0))
ENDS = (ReleaseAsked(), ReaderLost())


def begun(ttl_s: float = 5.0) -> Pin:
    begin = read_pin.admit(None, replace(ASKED, ttl_s=ttl_s), READER, now_s=0.0)
    assert isinstance(begin, Begin)
    return begin.pin


def held() -> Pin:
    pin, _ = read_pin.step(begun(), PINNED, 1.0)
    return pin


def test_a_pin_is_held_for_what_is_left_of_its_lease() -> None:
    pin, effects = read_pin.step(begun(), PINNED, 2.0)
    assert pin.phase is PinPhase.HELD
    assert effects == (Answer(replace(PINNED.answer, ttl_s=3.0)),)
    assert read_pin.step(pin, TimePassed(), 4.9) == (pin, ())
    pin, effects = read_pin.step(pin, TimePassed(), 5.0)
    assert pin.phase is PinPhase.CLOSED
    assert effects == (RevokeAndUnpin(),)


def test_a_lease_is_cut_to_its_bound() -> None:
    assert begun(ttl_s=1e9).ends_at_s == read_pin.PIN_TTL_S_MAX


def test_asked_again_it_waits_for_the_answer_and_is_not_held_for_longer() -> None:
    assert read_pin.admit(begun(), ASKED, READER, 0.5) == AwaitAnswer()
    assert read_pin.admit(held(), ASKED, READER, 4.0) == replace(PINNED.answer, ttl_s=1.0)
    assert held().ends_at_s == 5.0


@pytest.mark.parametrize("other", [replace(ASKED, first_block=0), replace(ASKED, block_hashes=b"c" * 32)])
def test_one_pin_id_for_other_blocks_is_refused(other: ReadPin) -> None:
    answer = read_pin.admit(held(), other, READER, 1.0)
    assert isinstance(answer, PinRefused)
    assert answer.reason is RefusalReason.MISMATCH


@pytest.mark.parametrize("end", ENDS)
def test_an_end_while_its_blocks_rise_gives_back_what_comes(end: read_pin.Event) -> None:
    pin, effects = read_pin.step(begun(), end, 1.0)
    (answer,) = effects
    assert isinstance(answer, Answer)
    assert isinstance(answer.message, PinRefused)
    assert read_pin.step(pin, PINNED, 2.0) == (pin, (RevokeAndUnpin(),))


def test_a_rise_that_outlasts_the_lease_is_answered_and_given_back() -> None:
    pin, effects = read_pin.step(begun(), TimePassed(), 5.0)
    assert [effect.message.reason for effect in effects if isinstance(effect, Answer)] == [
        RefusalReason.EXPIRED
    ]
    assert read_pin.step(pin, PINNED, 5.1) == (pin, (RevokeAndUnpin(),))
    assert read_pin.step(pin, NotPinned(RefusalReason.UNKNOWN), 5.1) == (pin, ())


def test_where_nothing_is_held_the_reader_hears_why_and_hears_it_again() -> None:
    pin, effects = read_pin.step(begun(), NotPinned(RefusalReason.UNKNOWN, "gone"), 1.0)
    refused = PinRefused("pin", RefusalReason.UNKNOWN, "gone")
    assert effects == (Answer(refused),)
    assert read_pin.admit(pin, ASKED, READER, 2.0) == refused


def test_a_release_ahead_of_its_request_is_a_tombstone() -> None:
    stone = read_pin.tombstone(READER, "pin", 0.0)
    answer = read_pin.admit(stone, ASKED, READER, 1.0)
    assert isinstance(answer, PinRefused)
    assert answer.reason is RefusalReason.CANCELLED
    assert read_pin.step(stone, TimePassed(), read_pin.TOMBSTONE_S)[1] == (Forget(),)


@pytest.mark.parametrize(
    ("asked", "field"),
    [
        (replace(ASKED, block_hashes=b""), "block_hashes"),
        (replace(ASKED, block_hashes=b"a" * 17), "block_hashes"),
        (replace(ASKED, block_hashes=b"a" * 16 * (read_pin.PIN_BLOCKS_MAX + 1)), "block_hashes"),
        (replace(ASKED, pin_id="p" * (read_pin.PIN_ID_CHARS_MAX + 1)), "pin_id"),
        (replace(ASKED, first_block=2), "first_block"),
        (replace(ASKED, first_block=-1), "first_block"),
        (replace(ASKED, ttl_s=0.0), "ttl_s"),
        (replace(ASKED, ttl_s=float("inf")), "ttl_s"),
        (replace(ASKED, ttl_s=float("nan")), "ttl_s"),
    ],
)
def test_a_malformed_request_is_told_field_and_limit(asked: ReadPin, field: str) -> None:
    assert read_pin.problem(asked).startswith(field)
    assert read_pin.problem(ASKED) == ""


EVENTS = st.one_of(
    st.sampled_from([NotPinned(RefusalReason.UNKNOWN), *ENDS]),
    st.floats(0.0, 4.0).map(lambda passed_s: (TimePassed(), passed_s)),
)


@given(st.lists(EVENTS, max_size=12), st.integers(0, 12) | st.none())
def test_whatever_happens_pins_go_back_once_and_everybody_is_answered_once(
    events: list[object], pinned_at: int | None
) -> None:
    """`pinned_at`: after so many events the blocks come; the shell brings them once, or not at all."""
    pin, now_s, answers, given_back, brought = begun(), 0.0, 0, 0, False
    script: list[object] = list(events)
    if pinned_at is not None and NotPinned(RefusalReason.UNKNOWN) not in events:
        script.insert(min(pinned_at, len(script)), PINNED)
    script += [(TimePassed(), read_pin.PIN_TTL_S_MAX), (TimePassed(), read_pin.TOMBSTONE_S)]
    for entry in script:
        event, passed_s = entry if isinstance(entry, tuple) else (entry, 0.0)
        now_s += passed_s
        brought |= event is PINNED
        before = pin.phase
        pin, effects = read_pin.step(pin, event, now_s)
        answers += sum(isinstance(effect, Answer) for effect in effects)
        given_back += effects.count(RevokeAndUnpin())
        assert not (before is PinPhase.CLOSED and pin.phase is not PinPhase.CLOSED)
        if pin.phase is PinPhase.HELD:
            assert brought
            assert not given_back
    assert effects == (Forget(),)
    assert answers == 1
    assert given_back == brought
