"""What a soak asks: conversations over a working set many times as large as the pool, drawn from a seed.

Pure. A conversation is token ids: a system prompt that several share, then what the user says in each turn;
the answers come between. The same seed makes the same conversations and the same order of requests.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass

FIRST_TOKEN_ID, TOKEN_IDS = 10, 490
"""Drawn token ids; the first of the vocabulary are special."""
FRESH_SHARE = 0.5
"""Of requests, those that go on through the working set; the others come back to a recent conversation."""
RECENT_CONVERSATIONS = 24
CANCELLED_SHARE = 0.08
SAMPLED_SHARE = 0.4
STREAMED_SHARE = 0.3


@dataclass(frozen=True, slots=True)
class SoakShape:
    """Sizes. `working_set_tokens` counts what conversations do not share with one another."""

    working_set_tokens: int
    block_tokens: int = 16
    system_prompts: int = 8
    system_tokens: int = 160
    turns: int = 3
    user_tokens: tuple[int, int] = (120, 260)
    """From, to."""
    answer_tokens: tuple[int, int] = (8, 32)


@dataclass(frozen=True, slots=True)
class Turn:
    """What the user says, and how the answer to it is drawn; `temperature` 0 is greedy."""

    token_ids: tuple[int, ...]
    answer_tokens: int
    temperature: float
    top_p: float
    seed: int


@dataclass(frozen=True, slots=True)
class Conversation:
    number: int
    system: tuple[int, ...]
    turns: tuple[Turn, ...]

    def opening(self) -> tuple[int, ...]:
        """The prompt of its first turn."""
        return (*self.system, *self.turns[0].token_ids)

    def unique_tokens(self) -> int:
        return sum(len(turn.token_ids) + turn.answer_tokens for turn in self.turns)


@dataclass(frozen=True, slots=True)
class Ask:
    """One request: the next turn of a conversation. `cancel_after` tokens the client goes away."""

    conversation: Conversation
    streamed: bool
    cancel_after: int | None


def conversations(seed: int, shape: SoakShape) -> list[Conversation]:
    """As many as make the working set."""
    numbers = random.Random(f"conversations {seed}")
    systems = [_tokens(numbers, shape.system_tokens) for _ in range(shape.system_prompts)]
    found: list[Conversation] = []
    tokens = 0
    while tokens < shape.working_set_tokens:
        turns = tuple(_turn(numbers, shape) for _ in range(shape.turns))
        found.append(Conversation(len(found), numbers.choice(systems), turns))
        tokens += found[-1].unique_tokens()
    return found


def asks(seed: int, everything: list[Conversation]) -> Iterator[Ask]:
    """Without end: half of them walk through the working set again and again, the others come back to what
    was asked of late."""
    numbers = random.Random(f"asks {seed}")
    walk = _walk(numbers, everything)
    recent: list[Conversation] = []
    while True:
        fresh = not recent or numbers.random() < FRESH_SHARE
        conversation = next(walk) if fresh else numbers.choice(recent)
        if fresh:
            recent = [*recent[1 - RECENT_CONVERSATIONS :], conversation]
        cancelled = numbers.random() < CANCELLED_SHARE
        streamed = cancelled or numbers.random() < STREAMED_SHARE
        yield Ask(conversation, streamed, numbers.randrange(1, 6) if cancelled else None)


def _walk(numbers: random.Random, everything: list[Conversation]) -> Iterator[Conversation]:
    order = list(everything)
    while True:
        numbers.shuffle(order)
        yield from order


def _turn(numbers: random.Random, shape: SoakShape) -> Turn:
    sampled = numbers.random() < SAMPLED_SHARE
    return Turn(
        _tokens(numbers, numbers.randint(*shape.user_tokens)),
        numbers.randint(*shape.answer_tokens),
        temperature=round(numbers.uniform(0.5, 1.2), 2) if sampled else 0.0,
        top_p=numbers.choice((1.0, 0.9)) if sampled else 1.0,
        seed=numbers.getrandbits(31),
    )


def _tokens(numbers: random.Random, tokens: int) -> tuple[int, ...]:
    return tuple(numbers.randrange(FIRST_TOKEN_ID, FIRST_TOKEN_ID + TOKEN_IDS) for _ in range(tokens))
