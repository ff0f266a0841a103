"""From the tokens of one answer to the text in its outbox, in order and in slices.

Thousands of tokens may come at once, after an outage or a loss: each slice holds the event loop for about a
millisecond, and what comes meanwhile waits behind. Knows no attempt and no message.
"""

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace

from gateway.answers.outbox import Ending, Outbox
from gateway.api.api_errors import ApiError
from gateway.text.answer_text import AnswerText, TextDelta
from policy.core import FinishReason, TokenLogprobs

SLICE_TOKENS = 256
"""Tokens that are turned into text in one turn of the event loop."""


@dataclass(frozen=True, slots=True)
class _Tokens:
    token_ids: list[int]
    logprobs: tuple[TokenLogprobs | None, ...]


class Delivery:
    """`deliver` tokens, then `end`; `close` where nobody wants more of it. What it tells through the
    callbacks may come within these calls or later."""

    def __init__(
        self,
        text: AnswerText,
        outbox: Outbox,
        *,
        stopped: Callable[[int], None],
        overflowed: Callable[[], None],
        broken: Callable[[Exception], None],
    ) -> None:
        """`stopped`: a stop string ended the answer with that many tokens. `overflowed`: the client is too
        slow, nothing more is put. `broken`: a bug, nothing more is put."""
        self._text = text
        self._outbox = outbox
        self._stopped = stopped
        self._overflowed = overflowed
        self._broken = broken
        self._waiting: deque[_Tokens | Ending | ApiError] = deque()
        self._turn: asyncio.Handle | None = None
        self._tokens = 0
        self._stopped_after: int | None = None

    def deliver(self, token_ids: list[int], logprobs: tuple[TokenLogprobs | None, ...]) -> None:
        for begin in range(0, len(token_ids), SLICE_TOKENS):
            end = begin + SLICE_TOKENS
            self._waiting.append(_Tokens(token_ids[begin:end], logprobs[begin:end]))
        self._begin()

    def end(self, end: Ending | ApiError) -> None:
        """Behind all tokens. A stop string among the last ones ends the answer where it ended."""
        self._waiting.append(end)
        self._begin()

    def close(self) -> None:
        self._waiting.clear()
        if self._turn is not None:
            self._turn.cancel()
            self._turn = None

    def _begin(self) -> None:
        if self._turn is None:
            self._take_turn()

    def _take_turn(self) -> None:
        self._turn = None
        if not self._waiting:
            return
        try:
            self._carry_out(self._waiting.popleft())
        except Exception as error:
            self.close()
            self._broken(error)
            return
        if self._waiting and self._turn is None:
            self._turn = asyncio.get_running_loop().call_soon(self._take_turn)

    def _carry_out(self, next_one: _Tokens | Ending | ApiError) -> None:
        match next_one:
            case _Tokens(token_ids, logprobs):
                if self._stopped_after is None:
                    self._add(token_ids, logprobs)
            case Ending() if self._stopped_after is not None:
                self._outbox.end(
                    replace(next_one, reason=FinishReason.STOP, completion_tokens=self._stopped_after)
                )
            case Ending():
                if self._put(self._text.finish(), []):
                    self._outbox.end(next_one)
            case ApiError():
                self._outbox.end(next_one)

    def _add(self, token_ids: list[int], logprobs: tuple[TokenLogprobs | None, ...]) -> None:
        delta = self._text.feed(token_ids, logprobs)
        first = self._tokens
        self._tokens += len(token_ids)
        if delta.stopped_after is not None:
            token_ids = token_ids[: delta.stopped_after - first]
            self._stopped_after = delta.stopped_after
        if self._put(delta, token_ids) and delta.stopped_after is not None:
            self._stopped(delta.stopped_after)

    def _put(self, delta: TextDelta, token_ids: list[int]) -> bool:
        if self._outbox.put(delta.text, token_ids, delta.logged):
            return True
        self.close()
        self._overflowed()
        return False
