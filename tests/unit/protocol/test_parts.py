"""Long prompts in parts: what fits comes back whole, what does not is refused by name."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.messages import PromptPart
from policy.core import RequestId
from protocol.parts import (
    BUFFERED_REQUESTS_MAX,
    BUFFERED_S_MAX,
    PART_BYTES_MAX,
    PARTS_MAX,
    PartBuffer,
    PartsError,
    split,
)

pytestmark = pytest.mark.unit
REQUEST = RequestId("r")


def part(index: int, parts: int, token_ids: bytes = b"\x01\0\0\0", request: str = "r") -> PromptPart:
    return PromptPart(RequestId(request), 0, index, parts, token_ids)


def test_short_prompts_are_not_split() -> None:
    assert split(bytes(PART_BYTES_MAX)) == []


@given(st.integers(PART_BYTES_MAX // 4 + 1, PART_BYTES_MAX), st.randoms())
def test_parts_in_any_order_and_repeated_give_the_prompt(tokens: int, random) -> None:
    token_ids = np.arange(tokens, dtype="<i4").tobytes()
    pieces = list(enumerate(split(token_ids)))
    sent = pieces + random.sample(pieces, 1)
    random.shuffle(sent)
    buffer = PartBuffer()
    for index, piece in sent:
        buffer.add(part(index, len(pieces), piece), now_s=0.0)
    assert buffer.take(REQUEST, 0, len(pieces)) == token_ids
    assert buffer.buffered_bytes == 0


def test_a_missing_part_is_named_and_nothing_stays() -> None:
    buffer = PartBuffer()
    buffer.add(part(0, 2), now_s=0.0)
    with pytest.raises(PartsError, match="prompt_parts is 2, but 1 parts came"):
        buffer.take(REQUEST, 0, 2)
    with pytest.raises(PartsError, match="no part came"):
        buffer.take(REQUEST, 0, 2)
    assert buffer.buffered_bytes == 0


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (part(0, 0), f"parts is 0, must be 1 to {PARTS_MAX}"),
        (part(0, PARTS_MAX + 1), f"must be 1 to {PARTS_MAX}"),
        (part(2, 2), "part is 2"),
        (part(-1, 2), "part is -1"),
        (part(0, 2, b"abc"), "token_ids has 3 bytes"),
        (part(0, 2, bytes(PART_BYTES_MAX + 4)), f"at most {PART_BYTES_MAX}"),
    ],
)
def test_malformed_parts_are_refused(bad: PromptPart, message: str) -> None:
    with pytest.raises(PartsError, match=message):
        PartBuffer().add(bad, now_s=0.0)


def test_parts_must_agree_on_their_number() -> None:
    buffer = PartBuffer()
    buffer.add(part(0, 2), now_s=0.0)
    with pytest.raises(PartsError, match="parts is 3, was 2"):
        buffer.add(part(1, 3), now_s=0.0)


def test_waiting_requests_are_bounded_and_expire() -> None:
    buffer = PartBuffer()
    for number in range(BUFFERED_REQUESTS_MAX):
        buffer.add(part(0, 2, request=f"r{number}"), now_s=0.0)
    with pytest.raises(PartsError, match="are waiting already"):
        buffer.add(part(0, 2, request="one more"), now_s=1.0)
    buffer.add(part(0, 2, request="one more"), now_s=BUFFERED_S_MAX + 1)
    assert buffer.buffered_bytes == 4
