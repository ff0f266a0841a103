"""The answers to one HTTP request, begun within bounds and read as one.

Each is an order of its own: what is lost, stopped or resumed of one touches no other. The first answer to a
prompt goes ahead; with its first token the prompt is in the pool and the others to it follow. Owns who has
begun and who waits; knows no form and no connection.
"""

import asyncio
from collections import deque
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from types import TracebackType
from typing import NamedTuple

from gateway.answers.orders import ChoiceOrder
from gateway.answers.outbox import Ending, Piece, TokenUsage
from gateway.answers.requests import Requests
from gateway.answers.running import RunningRequest
from gateway.api.api_errors import ApiError
from gateway.text.answer_text import AnswerText, TextRules

ORDERS_IN_FLIGHT_MAX = 64
"""Answers to one HTTP request that run at once; the others wait here."""


class ChoicePiece(NamedTuple):
    """The next that is there of the answer number `choice`."""

    choice: int
    piece: Piece


@dataclass(frozen=True, slots=True)
class _Begun:
    choice: ChoiceOrder
    running: RunningRequest
    stack: ExitStack


class Choices:
    """A context: leaving it in any way gives back all that its orders hold. One reader `take`s until all has
    `ended`."""

    def __init__(
        self,
        requests: Requests,
        choices: Sequence[ChoiceOrder],
        rules: TextRules,
        *,
        arrived_at_s: float,
    ) -> None:
        """`arrived_at_s`: when the client's request came, by the event loop's clock."""
        self._requests = requests
        self._rules = rules
        self._arrived_at_s = arrived_at_s
        self._waiting = deque(choice for choice in choices if choice.leads)
        self._followers: dict[int, list[ChoiceOrder]] = {}
        for choice in choices:
            if not choice.leads:
                self._followers.setdefault(choice.leader, []).append(choice)
        self._room = requests.room()
        self._begun: dict[int, _Begun] = {}
        self._ready: dict[int, None] = {}
        """Those of which there is something to take, in the order in which they got it."""
        self._wake = asyncio.Event()
        self._failure: ApiError | None = None
        self._prompt_tokens = 0
        self._cached_tokens = 0
        self._completion_tokens = 0
        self.count = len(choices)

    def __enter__(self) -> "Choices":
        try:
            self._begin_more()
        except BaseException:
            self._close_all()
            raise
        return self

    def __exit__(
        self,
        error_type: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._close_all()

    @property
    def ended(self) -> bool:
        return not (self._begun or self._waiting or self._followers or self._failure)

    @property
    def accepted(self) -> bool:
        """What has begun has been let in: what fails from now on is no refusal any more."""
        return all(begun.running.accepted for begun in self._begun.values())

    @property
    def usage(self) -> TokenUsage:
        """Of the answers that ended: the tokens of each prompt once, however many answers it has, and as
        cached those that its first answer found cached."""
        return TokenUsage(self._prompt_tokens, self._completion_tokens, self._cached_tokens)

    async def take(self) -> list[ChoicePiece]:
        """Wait for something and return all there is; nothing where it was nudged. The last piece of an
        answer has its ending. Raises ApiError for the first answer that failed, after what came before it:
        with one of them the whole request fails."""
        await self._wake.wait()
        self._wake.clear()
        if self._failure is not None:
            raise self._fail(self._failure)
        pieces: list[ChoicePiece] = []
        ready, self._ready = self._ready, {}
        for index in ready:
            begun = self._begun.get(index)
            if begun is None:
                continue
            try:
                piece = begun.running.outbox.take()
            except ApiError as error:
                if not pieces:
                    raise self._fail(error) from None
                self._failure = error
                self._wake.set()
                break
            pieces.append(ChoicePiece(index, piece))
            self._took(begun, piece)
        self._begin_more()
        return pieces

    def nudge(self) -> None:
        """Let the reader go on, though there may be nothing to take."""
        self._wake.set()

    def stop(self, index: int) -> None:
        """The answer number `index` is complete with what came so far; its ending follows."""
        begun = self._begun.get(index)
        if begun is not None:
            begun.running.stop()

    def _fail(self, error: ApiError) -> ApiError:
        """For all that run: it is not their client that left."""
        for begun in self._begun.values():
            begun.running.fail(error)
        return error

    def _took(self, begun: _Begun, piece: Piece) -> None:
        index = begun.choice.index
        if piece.token_ids or piece.ending is not None:
            # Ahead of other prompts: theirs is in the pool now.
            self._waiting.extendleft(reversed(self._followers.pop(index, ())))
        if piece.ending is not None:
            self._add(begun.choice, piece.ending)
            del self._begun[index]
            begun.stack.close()

    def _add(self, choice: ChoiceOrder, ending: Ending) -> None:
        self._completion_tokens += ending.completion_tokens
        if choice.leads:
            self._prompt_tokens += ending.prompt_tokens
            self._cached_tokens += ending.cached_tokens

    def _begin_more(self) -> None:
        while self._waiting and len(self._begun) < ORDERS_IN_FLIGHT_MAX and self._failure is None:
            self._begin(self._waiting.popleft())

    def _begin(self, choice: ChoiceOrder) -> None:
        stack = ExitStack()
        running = stack.enter_context(
            self._requests.run(
                choice.order,
                AnswerText(self._rules),
                arrived_at_s=self._arrived_at_s,
                room=self._room,
                ready=lambda: self._is_ready(choice.index),
                admitted=not choice.leads,
            )
        )
        self._begun[choice.index] = _Begun(choice, running, stack)

    def _is_ready(self, index: int) -> None:
        self._ready[index] = None
        self._wake.set()

    def _close_all(self) -> None:
        self._waiting.clear()
        self._followers.clear()
        with ExitStack() as all_of_them:
            for begun in self._begun.values():
                all_of_them.push(begun.stack)
        self._begun.clear()
