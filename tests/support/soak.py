"""A soak's load: several clients that talk with one stack at once, every answer judged by the reference.

One judge in a thread of its own; clients that are ahead of it wait. What the stack says about itself
(sizes, blocks, directory) is `soak_watch`'s.
"""

import queue
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Self

from tests.support.soak_reference import SoakReference
from tests.support.soak_script import Ask, Conversation, Turn

from moonpool.api import Api, ApiError
from policy.core import SamplingParams

UNJUDGED_MAX = 64
"""Answers that wait for the judge; clients wait then."""
JUDGED_S_MAX = 60.0
"""What is left when the load ends is judged within this."""
REFUSED_STATUS = frozenset({429, 503})
REFUSED_PAUSE_S = 0.2
"""A client that was refused asks again after this."""


@dataclass
class SoakCounts:
    """What happened. `wrong` holds one line for each wrong answer."""

    requests: int = 0
    answers: int = 0
    cancelled: int = 0
    refused: int = 0
    answer_tokens: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    near_ties: int = 0
    wrong: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    asked: set[int] = field(default_factory=set)
    """Numbers of the conversations of which something was asked."""


@dataclass(frozen=True, slots=True)
class _Answer:
    what: str
    prompt: tuple[int, ...]
    token_ids: tuple[int, ...]
    sampling: SamplingParams


class Soak:
    """Used in a `with`: at its end all clients have stopped and all answers are judged."""

    def __init__(self, api: Api, model: str, model_folder: Path, asks: Iterator[Ask], clients: int) -> None:
        self.counts = SoakCounts()
        self._api = api
        self._model = model
        self._asks = asks
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._histories: dict[int, tuple[int, ...]] = {}
        """By number of a conversation: all that was said, where it is not at its start."""
        self._busy: set[int] = set()
        self._unjudged: queue.Queue[_Answer | None] = queue.Queue(UNJUDGED_MAX)
        self._reference = SoakReference(model_folder)
        self._judge = threading.Thread(target=self._judge_all, name="judge")
        self._clients = [threading.Thread(target=self._client, name=f"client {i}") for i in range(clients)]

    def __enter__(self) -> Self:
        self._judge.start()
        for client in self._clients:
            client.start()
        return self

    def __exit__(
        self, _: type[BaseException] | None, __: BaseException | None, ___: TracebackType | None
    ) -> None:
        self._stop.set()
        for client in self._clients:
            client.join()
        self._unjudged.put(None)
        self._judge.join(JUDGED_S_MAX)
        assert not self._judge.is_alive(), f"answers were not judged within {JUDGED_S_MAX:g} s"

    def run_for(self, seconds: float) -> None:
        """Return after that time, or as soon as something went wrong."""
        ends_at_s = time.monotonic() + seconds
        while time.monotonic() < ends_at_s and not (self.counts.wrong or self.counts.failed):
            if self._stop.wait(min(0.5, max(0.0, ends_at_s - time.monotonic()))):
                return

    def _client(self) -> None:
        while not self._stop.is_set():
            ask, history = self._next()
            number = ask.conversation.number
            try:
                said = self._turn(ask, history)
            except ApiError as error:
                said = history
                self._count_failure(ask, error)
                self._stop.wait(REFUSED_PAUSE_S)
            except Exception as error:
                said = history
                self.counts.failed.append(f"{_name(ask, history)}: {error!r}")
            with self._lock:
                self._busy.discard(number)
                if said and _turns_said(ask.conversation, said) < len(ask.conversation.turns):
                    self._histories[number] = said
                else:
                    self._histories.pop(number, None)

    def _next(self) -> tuple[Ask, tuple[int, ...]]:
        """What is asked next, of a conversation that nobody is in, and what was said in it."""
        with self._lock:
            ask = next(ask for ask in self._asks if ask.conversation.number not in self._busy)
            self._busy.add(ask.conversation.number)
            self.counts.requests += 1
            self.counts.asked.add(ask.conversation.number)
            return ask, self._histories.get(ask.conversation.number, ())

    def _turn(self, ask: Ask, history: tuple[int, ...]) -> tuple[int, ...]:
        """All that is said then. A turn whose answer the client did not wait for is asked again."""
        conversation = ask.conversation
        turn = conversation.turns[_turns_said(conversation, history)]
        prompt = (*(history or conversation.system), *turn.token_ids)
        body = self._body(turn, prompt)
        token_ids, usage = self._stream(body, ask.cancel_after) if ask.streamed else self._whole(body)
        sampling = SamplingParams(
            turn.answer_tokens, temperature=turn.temperature, top_p=turn.top_p, seed=turn.seed
        )
        self._unjudged.put(_Answer(_name(ask, history), prompt, token_ids, sampling))
        with self._lock:
            self.counts.answer_tokens += len(token_ids)
            if usage is None:
                self.counts.cancelled += 1
                return history
            self.counts.answers += 1
            self.counts.prompt_tokens += len(prompt)
            self.counts.cached_tokens += usage["prompt_tokens_details"]["cached_tokens"]
        if (len(token_ids), usage["prompt_tokens"]) != (turn.answer_tokens, len(prompt)):
            self.counts.wrong.append(f"{_name(ask, history)}: {len(token_ids)} tokens, usage {usage}")
        return (*prompt, *token_ids)

    def _body(self, turn: Turn, prompt: tuple[int, ...]) -> dict[str, object]:
        return {
            "model": self._model,
            "prompt": list(prompt),
            "max_tokens": turn.answer_tokens,
            "temperature": turn.temperature,
            "top_p": turn.top_p,
            "seed": turn.seed,
            "ignore_eos": True,
            "return_token_ids": True,
        }

    def _whole(self, body: dict[str, object]) -> tuple[tuple[int, ...], dict]:
        answer = self._api.post("/completions", body)
        return tuple(answer["choices"][0]["token_ids"]), answer["usage"]

    def _stream(
        self, body: dict[str, object], cancel_after: int | None
    ) -> tuple[tuple[int, ...], dict | None]:
        """Without usage where the client went away before the end."""
        token_ids: list[int] = []
        usage = None
        events = self._api.stream("/completions", {**body, "stream_options": {"include_usage": True}})
        for event in events:
            for choice in event["choices"]:
                token_ids += choice.get("token_ids", [])
            usage = event.get("usage") or usage
            if cancel_after is not None and len(token_ids) >= cancel_after:
                events.close()
                return tuple(token_ids), None
        return tuple(token_ids), usage

    def _count_failure(self, ask: Ask, error: ApiError) -> None:
        with self._lock:
            if error.status in REFUSED_STATUS:
                self.counts.refused += 1
            else:
                self.counts.failed.append(f"conversation {ask.conversation.number}: {error}")

    def _judge_all(self) -> None:
        while (answer := self._unjudged.get()) is not None:
            judgement = self._reference.judge(answer.prompt, answer.token_ids, answer.sampling)
            self.counts.near_ties += judgement.near_ties
            if judgement.wrong is not None:
                self.counts.wrong.append(f"{answer.what}: {judgement.wrong}")


def _turns_said(conversation: Conversation, history: tuple[int, ...]) -> int:
    tokens, turns = len(conversation.system), 0
    while tokens < len(history):
        turn = conversation.turns[turns]
        tokens += len(turn.token_ids) + turn.answer_tokens
        turns += 1
    return turns


def _name(ask: Ask, history: tuple[int, ...]) -> str:
    conversation = ask.conversation
    return f"conversation {conversation.number}, turn {_turns_said(conversation, history)}"
