"""The whole stack answers as transformers does on the same weights, token for token."""

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path

import pytest
from tests.support.prompts import Prompt, comparison_prompts
from tests.support.reference import NEAR_TIE_LOGITS, Reference, ReferenceAnswer
from tests.support.stack import RunningStack, running_stack

from engine.engine import Engine, KVLayout, SequenceStep
from engine.loader import load_model
from engine.model_folder import ModelConfig
from policy.core import SamplingParams

pytestmark = [pytest.mark.integration, pytest.mark.timeout(900)]

ANSWER_TOKENS = 64
PROMPTS = 20
BLOCK_TOKENS = 16
CONDITIONS = (("cold", 1), ("warm", 8), ("cold", 8), ("warm", 1))
"""State of the cache and number of requests at once."""

CACHE_SALT = "the same answers"
"""What other tests asked the stack does not warm its cache."""

Condition = tuple[str, int]


@dataclass(frozen=True, slots=True)
class Case:
    prompt: Prompt
    token_ids: list[int]
    expected: ReferenceAnswer


@dataclass(frozen=True, slots=True)
class Answer:
    text: str
    token_ids: list[int]
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int


@pytest.fixture(scope="module")
def cases(smollm2_stack: RunningStack) -> list[Case]:
    """Twenty prompts with the reference's answers."""
    reference = Reference(Path(smollm2_stack.state.model_folder))
    prompts = comparison_prompts(reference.text_token_ids)
    token_ids = [prompt_token_ids(reference, prompt) for prompt in prompts]
    started_s = time.monotonic()
    expected = reference.answers(token_ids, ANSWER_TOKENS)
    print(f"reference: {time.monotonic() - started_s:.0f} s")
    return [Case(*case) for case in zip(prompts, token_ids, expected, strict=True)]


def prompt_token_ids(reference: Reference, prompt: Prompt) -> list[int]:
    if prompt.messages:
        return reference.chat_token_ids(prompt.messages)
    return list(prompt.token_ids) or reference.text_token_ids(prompt.text)


@pytest.fixture(scope="module")
def second_stack(home: Path) -> Iterator[RunningStack]:
    """Another one whose cache nobody has filled."""
    with running_stack(home, "second", "--model", "smollm2") as stack:
        yield stack


@pytest.fixture(scope="module")
def answers(
    smollm2_stack: RunningStack, second_stack: RunningStack, cases: list[Case]
) -> dict[Condition, list[Answer]]:
    """Every case under every condition: each stack cold first, then warm, both at the same time."""
    with ThreadPoolExecutor(2) as threads:
        first = threads.submit(ask_twice, smollm2_stack, cases, CONDITIONS[:2])
        second = threads.submit(ask_twice, second_stack, cases, CONDITIONS[2:])
        return {**first.result(), **second.result()}


def ask_twice(
    stack: RunningStack, cases: list[Case], conditions: tuple[Condition, ...]
) -> dict[Condition, list[Answer]]:
    found = {}
    for state, concurrency in conditions:
        started_s = time.monotonic()
        with ThreadPoolExecutor(concurrency) as threads:
            found[state, concurrency] = list(threads.map(lambda case: ask(stack, case.prompt), cases))
        print(f"{state}, {concurrency} at once: {time.monotonic() - started_s:.0f} s")
    return found


def ask(stack: RunningStack, prompt: Prompt) -> Answer:
    """A streamed greedy answer."""
    body = {
        "model": stack.state.model,
        "max_tokens": ANSWER_TOKENS,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
        "cache_salt": CACHE_SALT,
        "stream_options": {"include_usage": True},
        **prompt.body(),
    }
    text, token_ids, usage = "", [], {}
    for event in stack.api.stream(prompt.path, body):
        for choice in event["choices"]:
            text += choice["delta"].get("content", "") if prompt.messages else choice["text"]
            token_ids += choice.get("token_ids", [])
        usage = event.get("usage") or usage
    cached_tokens = usage["prompt_tokens_details"]["cached_tokens"]
    return Answer(text, token_ids, usage["prompt_tokens"], usage["completion_tokens"], cached_tokens)


def test_the_prompts_are_what_is_promised(cases: list[Case]) -> None:
    lengths = [len(case.token_ids) for case in cases]
    assert len(lengths) == PROMPTS
    assert (min(lengths), max(lengths)) == (3, 2000)
    assert sum(bool(case.prompt.messages) for case in cases) >= 5
    assert sum(longest_shared_tokens(cases, case) >= BLOCK_TOKENS for case in cases) >= 5
    near_ties = [case.prompt.name for case in cases if case.expected.near_tie is not None]
    assert len(near_ties) < PROMPTS // 4, near_ties


@pytest.mark.parametrize("condition", CONDITIONS, ids=lambda condition: f"{condition[0]}-{condition[1]}")
def test_every_answer_is_the_references(
    answers: dict[Condition, list[Answer]], cases: list[Case], condition: Condition
) -> None:
    for case, answer in zip(cases, answers[condition], strict=True):
        assert case.expected.agrees(answer.token_ids), (
            f"{case.prompt.name}: expected {case.expected.text!r}, got {answer.text!r}"
        )
        if case.expected.near_tie is None:
            assert answer.text == case.expected.text, case.prompt.name
        assert answer.completion_tokens == ANSWER_TOKENS, case.prompt.name
        assert answer.prompt_tokens == len(case.token_ids), case.prompt.name


def test_where_the_reference_nearly_tied_the_logits_are_compared(
    smollm2_stack: RunningStack, cases: list[Case]
) -> None:
    """There either token is right, so the engine's logits must be the reference's."""
    near_ties = [case.expected.near_tie for case in cases if case.expected.near_tie is not None]
    print(f"near ties: {len(near_ties)} of {len(cases)} answers")
    if not near_ties:
        return
    engine, blocks = whole_context_engine(Path(smollm2_stack.state.model_folder))
    for near_tie in near_ties:
        step = SequenceStep(near_tie.token_ids, 0, tuple(range(blocks)), SamplingParams(1), 0)
        logits = engine.logits([step])[0][list(near_tie.best_token_ids)]
        assert logits.tolist() == pytest.approx(near_tie.best_logits, abs=NEAR_TIE_LOGITS)


def whole_context_engine(folder: Path) -> tuple[Engine, int]:
    """The engine that the stack runs, with blocks for the longest prompt and answer."""
    layout = KVLayout.of(ModelConfig.load(folder))
    blocks = (2000 + ANSWER_TOKENS) // BLOCK_TOKENS + 1
    arena = memoryview(bytearray(blocks * layout.block_bytes))
    return Engine(load_model(folder), layout, arena, blocks), blocks


@pytest.mark.parametrize("concurrency", [1, 8])
def test_a_warm_cache_holds_every_whole_block_but_the_last_token(
    answers: dict[Condition, list[Answer]], cases: list[Case], concurrency: int
) -> None:
    whole_blocks = [(len(case.token_ids) - 1) // BLOCK_TOKENS * BLOCK_TOKENS for case in cases]
    assert [answer.cached_tokens for answer in answers["warm", concurrency]] == whole_blocks


@pytest.mark.parametrize("concurrency", [1, 8])
def test_a_cold_cache_holds_no_more_than_what_prompts_share(
    answers: dict[Condition, list[Answer]], cases: list[Case], concurrency: int
) -> None:
    for case, answer in zip(cases, answers["cold", concurrency], strict=True):
        assert answer.cached_tokens <= longest_shared_tokens(cases, case), case.prompt.name


def longest_shared_tokens(cases: list[Case], case: Case) -> int:
    """How many tokens another prompt begins with like this one."""
    return max(shared_tokens(case.token_ids, other.token_ids) for other in cases if other is not case)


def shared_tokens(one: list[int], other: list[int]) -> int:
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))


def test_a_chat_ends_by_itself_with_a_sensible_answer(smollm2_stack: RunningStack) -> None:
    answer = smollm2_stack.api.post(
        "/chat/completions",
        {
            "model": smollm2_stack.state.model,
            "messages": [{"role": "user", "content": "What is the capital of France?"}],
            "max_tokens": ANSWER_TOKENS,
            "temperature": 0,
        },
    )
    choice = answer["choices"][0]
    assert choice["message"]["content"] == "The capital of France is Paris."
    assert choice["finish_reason"] == "stop"
