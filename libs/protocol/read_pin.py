"""The source's side of one read pin: blocks held so that another instance can read them (DESIGN §3 step 6).

`admit` is its beginning, `step` the machine. The shell owns the blocks, the grant and the tiers. Every pin
ends: by release, by its lease, or with its reader. What ended is remembered for a while, so that a request
that comes late meets a tombstone and pins nothing that nobody will release.
"""

import math
from dataclasses import dataclass, replace
from enum import StrEnum

from cluster.messages import MATCH_BLOCKS_MAX, PinRefused, ReadPin, ReadPinned, RefusalReason
from kvhash import HASH_BYTES
from kvindex.core import InstanceId

PIN_TTL_S_MAX = 30.0
"""A longer lease is cut to this. There is no renewal: who reads for longer asks again under another id."""
PIN_BLOCKS_MAX = MATCH_BLOCKS_MAX
"""Blocks in the chain of one pin: no match is longer."""
PIN_ID_CHARS_MAX = 128
"""What ended is remembered by its id, thousands at once."""
TOMBSTONE_S = 10.0
"""How long an ended pin is remembered; a request on the bus does not live longer."""


class PinPhase(StrEnum):
    RISING = "rising"
    """Its blocks are being looked for and brought up; the reader waits for an answer."""
    HELD = "held"
    CLOSED = "closed"


@dataclass(frozen=True, slots=True)
class Reader:
    """One process that reads: pins of a dead predecessor of the same name are not its own."""

    instance: InstanceId
    incarnation: int


@dataclass(frozen=True, slots=True)
class Pin:
    """`ends_at_s`: the end of the lease, or of the tombstone. `answer` as it was given at the start."""

    reader: Reader
    pin_id: str
    phase: PinPhase
    ends_at_s: float
    last_hash: bytes = b""
    """With `first_block`, what was asked for: a block's hash stands for the whole chain up to it."""
    first_block: int = 0
    answer: ReadPinned | None = None
    closed_by: RefusalReason = RefusalReason.UNKNOWN
    detail: str = ""


# --- admission ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Begin:
    """Remember `pin` and look for its blocks."""

    pin: Pin


@dataclass(frozen=True, slots=True)
class AwaitAnswer:
    """The same was asked a moment ago: it gets the same answer, once that is known."""


def problem(asked: ReadPin) -> str:
    """What is wrong with a request, naming field and limit; empty where nothing is."""
    if wrong_id := id_problem(asked.pin_id):
        return wrong_id
    blocks, rest = divmod(len(asked.block_hashes), HASH_BYTES)
    if rest:
        return f"block_hashes has {len(asked.block_hashes)} bytes, not a multiple of {HASH_BYTES}"
    if not 1 <= blocks <= PIN_BLOCKS_MAX:
        return f"block_hashes has {blocks} hashes, must be 1 to {PIN_BLOCKS_MAX}"
    if not 0 <= asked.first_block < blocks:
        return f"first_block is {asked.first_block}, must be 0 to {blocks - 1}"
    if not (math.isfinite(asked.ttl_s) and asked.ttl_s > 0):
        return f"ttl_s is {asked.ttl_s}, must be a positive number"
    return ""


def id_problem(pin_id: str) -> str:
    """As `problem`, for the id alone."""
    if len(pin_id) > PIN_ID_CHARS_MAX:
        return f"pin_id has {len(pin_id)} characters, must be at most {PIN_ID_CHARS_MAX}"
    return ""


def admit(
    pin: Pin | None, asked: ReadPin, reader: Reader, now_s: float
) -> Begin | AwaitAnswer | ReadPinned | PinRefused:
    """What a ReadPin meets that has no `problem`: nothing, itself a moment ago, or its own tombstone.

    Asked again, a pin is not held for longer: the answer says how much of its time is left.
    """
    if pin is None:
        ends_at_s = now_s + min(asked.ttl_s, PIN_TTL_S_MAX)
        last_hash = asked.block_hashes[-HASH_BYTES:]
        return Begin(Pin(reader, asked.pin_id, PinPhase.RISING, ends_at_s, last_hash, asked.first_block))
    if pin.phase is PinPhase.CLOSED:
        return PinRefused(asked.pin_id, pin.closed_by, pin.detail)
    if (pin.last_hash, pin.first_block) != (asked.block_hashes[-HASH_BYTES:], asked.first_block):
        return PinRefused(asked.pin_id, RefusalReason.MISMATCH, "the pin_id stands for other blocks already")
    if pin.answer is None:
        return AwaitAnswer()
    return replace(pin.answer, ttl_s=max(0.0, pin.ends_at_s - now_s))


def tombstone(reader: Reader, pin_id: str, now_s: float) -> Pin:
    """A release for a pin that is not here (yet): its request, should it still come, is refused."""
    closed = Pin(reader, pin_id, PinPhase.CLOSED, now_s + TOMBSTONE_S)
    return replace(closed, closed_by=RefusalReason.CANCELLED)


# --- events -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Pinned:
    """Blocks are pinned and granted: what the reader may be told."""

    answer: ReadPinned


@dataclass(frozen=True, slots=True)
class NotPinned:
    """Nothing is held from the first block on, or it cannot be lent now."""

    reason: RefusalReason
    detail: str = ""


@dataclass(frozen=True, slots=True)
class ReleaseAsked:
    pass


@dataclass(frozen=True, slots=True)
class ReaderLost:
    """Its registration is gone for long, or another process has its name."""


@dataclass(frozen=True, slots=True)
class TimePassed:
    pass


Event = Pinned | NotPinned | ReleaseAsked | ReaderLost | TimePassed

# --- effects ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Answer:
    """Tell everybody who waits for it."""

    message: ReadPinned | PinRefused


@dataclass(frozen=True, slots=True)
class RevokeAndUnpin:
    """Let no more byte be read, then give the pins back, in this order."""


@dataclass(frozen=True, slots=True)
class Forget:
    """The tombstone's time is over: drop the record."""


Effect = Answer | RevokeAndUnpin | Forget
Outcome = tuple[Pin, tuple[Effect, ...]]


def step(pin: Pin, event: Event, now_s: float) -> Outcome:
    match event:
        case Pinned(answer):
            if pin.phase is not PinPhase.RISING:
                return pin, (RevokeAndUnpin(),)
            answer = replace(answer, ttl_s=max(0.0, pin.ends_at_s - now_s))
            return replace(pin, phase=PinPhase.HELD, answer=answer), (Answer(answer),)
        case NotPinned(reason, detail):
            if pin.phase is not PinPhase.RISING:
                return pin, ()
            return _close(pin, reason, detail, now_s)
        case ReleaseAsked():
            return _close(pin, RefusalReason.CANCELLED, "the pin was released", now_s)
        case ReaderLost():
            return _close(pin, RefusalReason.CANCELLED, "the reader is gone", now_s)
        case TimePassed():
            if now_s < pin.ends_at_s:
                return pin, ()
            if pin.phase is PinPhase.CLOSED:
                return pin, (Forget(),)
            return _close(pin, RefusalReason.EXPIRED, "the pin's time is over", now_s)


def _close(pin: Pin, reason: RefusalReason, detail: str, now_s: float) -> Outcome:
    closed = replace(
        pin,
        phase=PinPhase.CLOSED,
        ends_at_s=now_s + TOMBSTONE_S,
        answer=None,
        closed_by=reason,
        detail=detail,
    )
    match pin.phase:
        case PinPhase.RISING:
            return closed, (Answer(PinRefused(pin.pin_id, reason, detail)),)
        case PinPhase.HELD:
            return closed, (RevokeAndUnpin(),)
        case PinPhase.CLOSED:
            return pin, ()
