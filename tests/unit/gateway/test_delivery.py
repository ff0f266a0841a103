"""Many tokens at once: in order, in slices that let the event loop go on, ended where a stop string ends."""

import asyncio

import pytest
from tests.unit.gateway.model_files import byte_level_tokenizer

from gateway.answers import delivery as delivery_module
from gateway.answers.delivery import SLICE_TOKENS, Delivery
from gateway.answers.outbox import Ending, Outbox, UnsentRoom
from gateway.api.api_errors import INTERNAL, ApiError
from gateway.text.answer_text import AnswerText, TextRules
from gateway.text.detokenizer import TokenBytes
from gateway.text.stop_matcher import StopStrings
from policy.core import FinishReason

pytestmark = pytest.mark.unit

TOKENIZER = byte_level_tokenizer()
TABLE = TokenBytes(TOKENIZER)
ENDING = Ending(FinishReason.LENGTH, 5, 9, 0)


def ids(text: str) -> list[int]:
    return TOKENIZER.encode(text, add_special_tokens=False).ids


class Delivered:
    """A delivery with all that it told."""

    def __init__(self, *, stop: tuple[str, ...] = (), chars_max: int = 1_000_000) -> None:
        self.outbox = Outbox(UnsentRoom(chars_max), lambda: None)
        self.stops: list[int] = []
        self.overflows = 0
        self.bugs: list[Exception] = []
        self.delivery = Delivery(
            AnswerText(TextRules(TABLE, StopStrings(stop))),
            self.outbox,
            stopped=self.stops.append,
            overflowed=self.overflow,
            broken=self.bugs.append,
        )

    def overflow(self) -> None:
        self.overflows += 1


async def turns(count: int) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


async def test_few_tokens_are_there_at_once() -> None:
    one = Delivered()
    one.delivery.deliver(ids("The lazy"), ())
    one.delivery.end(ENDING)
    piece = one.outbox.take()
    assert (piece.text, piece.token_ids, piece.ending) == ("The lazy", ids("The lazy"), ENDING)


async def test_many_tokens_are_shared_out_over_turns_of_the_loop(monkeypatch) -> None:
    fed: list[int] = []
    feed = AnswerText.feed

    def counted(text, token_ids, logprobs):
        fed.append(len(token_ids))
        return feed(text, token_ids, logprobs)

    monkeypatch.setattr(AnswerText, "feed", counted)
    one = Delivered()
    words = "The quick brown fox " * 1000
    token_ids = ids(words)
    one.delivery.deliver(token_ids, ())
    one.delivery.deliver(ids("and on"), ())
    one.delivery.end(ENDING)
    assert fed == [SLICE_TOKENS]
    assert not one.outbox.ended
    await turns(len(token_ids) // SLICE_TOKENS + 3)
    assert max(fed) == SLICE_TOKENS
    piece = one.outbox.take()
    assert piece.text == words + "and on"
    assert piece.token_ids == token_ids + ids("and on")
    assert piece.ending == ENDING


async def test_a_stop_string_in_a_later_slice_ends_the_answer_there(monkeypatch) -> None:
    """The end that came behind is that of tokens which nobody gets."""
    monkeypatch.setattr(delivery_module, "SLICE_TOKENS", 4)
    one = Delivered(stop=("END",))
    before, behind = ids("The quick brown fox END"), ids(" jumps over the lazy dog")
    one.delivery.deliver(before + behind, ())
    one.delivery.end(Ending(FinishReason.LENGTH, 5, len(before + behind), 0))
    await turns(50)
    (stopped_after,) = one.stops
    assert stopped_after == len(before)
    piece = one.outbox.take()
    assert piece.text == "The quick brown fox "
    assert piece.token_ids == before
    assert piece.ending == Ending(FinishReason.STOP, 5, len(before), 0)


async def test_a_failure_comes_behind_the_tokens_before_it(monkeypatch) -> None:
    monkeypatch.setattr(delivery_module, "SLICE_TOKENS", 2)
    one = Delivered()
    one.delivery.deliver(ids("The quick brown fox"), ())
    one.delivery.end(ApiError(INTERNAL, "broken"))
    await turns(50)
    assert one.outbox.take().text == "The quick brown fox"
    with pytest.raises(ApiError, match="broken"):
        one.outbox.take()


async def test_after_a_close_nothing_more_comes(monkeypatch) -> None:
    monkeypatch.setattr(delivery_module, "SLICE_TOKENS", 2)
    one = Delivered()
    one.delivery.deliver(ids("The quick brown fox"), ())
    one.delivery.close()
    first = one.outbox.take().text
    await turns(50)
    assert one.outbox.take().text == ""
    assert "The quick brown fox".startswith(first)


async def test_a_client_that_is_too_slow_is_told_of_once(monkeypatch) -> None:
    monkeypatch.setattr(delivery_module, "SLICE_TOKENS", 2)
    one = Delivered(chars_max=10)
    one.delivery.deliver(ids("The quick brown fox jumps"), ())
    await turns(50)
    assert one.overflows == 1
    assert not one.bugs


async def test_a_bug_in_a_later_slice_is_told(monkeypatch) -> None:
    monkeypatch.setattr(delivery_module, "SLICE_TOKENS", 2)
    feed = AnswerText.feed
    calls = 0

    def broken(text, token_ids, logprobs):
        nonlocal calls
        calls += 1
        if calls == 2:
            raise ZeroDivisionError
        return feed(text, token_ids, logprobs)

    monkeypatch.setattr(AnswerText, "feed", broken)
    one = Delivered()
    one.delivery.deliver(ids("The quick brown fox"), ())
    await turns(50)
    assert [type(bug) for bug in one.bugs] == [ZeroDivisionError]
    assert calls == 2
