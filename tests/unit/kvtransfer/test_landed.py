"""The end of a write: what is answered, and what is asked of whom before."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import xxhash

from kvtransfer import Access, Region
from kvtransfer.grants import REVOKED, Arrival, Grant, GrantTable
from kvtransfer.memory import Ranges
from kvtransfer.stream.frames import ErrorCode, TransferRequest
from kvtransfer.stream.landed import all_landed
from kvtransfer.verification import GrantedDigests

pytestmark = pytest.mark.unit

RANGES = np.array([(10, 20)], np.int64)
MEMORY = bytes(range(100))
DIGEST = xxhash.xxh3_128_digest(MEMORY[10:30])


@dataclass
class Write:
    wanted: TransferRequest
    grant: Grant
    ranges: Ranges


@dataclass
class Owner:
    """Notes what it is told; answers once."""

    events: list[Any] = field(default_factory=list)
    answered: bool = False

    def stands(self, served: Write) -> bool:
        return not self.answered

    def refuse_write(self, served: Write, code: ErrorCode, text: str, landed_bytes: int) -> None:
        assert not self.answered
        self.answered = True
        self.events.append((code, text, landed_bytes))

    def write_is_done(self, served: Write) -> None:
        assert not self.answered
        self.answered = True
        self.events.append("done")


def write(owner: Owner, *, on_arrival: Any = None, **wanted: Any) -> Write:
    def arrived(arrival: Arrival) -> None:
        owner.events.append((arrival.tag, arrival.payload_bytes))
        if on_arrival is not None:
            on_arrival()

    table = GrantTable(1)
    grant = table.issue(Region(1, bytearray(MEMORY)), [(0, 50)], "peer", 1, Access.WRITE, arrived)
    return Write(TransferRequest(grant.token, RANGES, 20, **wanted), grant, RANGES)


def landed(owner: Owner, served: Write) -> list[Any]:
    all_landed(owner, GrantedDigests(), served)
    return owner.events


def test_bytes_alone() -> None:
    owner = Owner()
    assert landed(owner, write(owner)) == ["done"]


def test_the_tag_goes_before_the_answer_with_all_bytes_that_belong_to_it() -> None:
    owner = Owner()
    assert landed(owner, write(owner, tag=b"t", earlier_bytes=5, digest=DIGEST)) == [(b"t", 25), "done"]


def test_a_tag_is_not_handed_over_for_other_bytes() -> None:
    owner = Owner()
    expected = (ErrorCode.CHECKSUM, "what arrived is not what was sent", 0)
    assert landed(owner, write(owner, tag=b"t", digest=bytes(16))) == [expected]


@pytest.mark.parametrize("digest", [b"", bytes(16)], ids=["no digest", "cut short"])
def test_a_revoked_grant_is_the_reason_whatever_the_digest_says(digest: bytes) -> None:
    owner = Owner()
    served = write(owner, tag=b"t", digest=digest)
    served.grant.revoked = True
    assert landed(owner, served) == [(ErrorCode.GRANT, REVOKED, 20)]


def test_a_tag_that_was_not_taken() -> None:
    owner = Owner()

    def fail() -> None:
        raise ValueError("no")

    tag, (code, text, landed_bytes) = landed(owner, write(owner, tag=b"t", on_arrival=fail))
    assert (tag, code, landed_bytes) == ((b"t", 20), ErrorCode.ARRIVAL, 20)
    assert "on_arrival" in text


@pytest.mark.parametrize("digest", [b"", DIGEST, bytes(16)], ids=["none", "right", "wrong"])
def test_what_is_answered_meanwhile_is_left_alone(digest: bytes) -> None:
    owner = Owner(answered=True)
    assert landed(owner, write(owner, tag=b"t", digest=digest)) == []


def test_a_callback_that_ends_the_write_itself_is_the_last_word() -> None:
    owner = Owner()
    served = write(owner, tag=b"t", on_arrival=lambda: setattr(owner, "answered", True))
    assert landed(owner, served) == [(b"t", 20)]
