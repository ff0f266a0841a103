"""The whole stack answers as transformers does on the same weights, token for token.

A token's text may in theory be spelled by other tokens; the number of tokens is compared too.
"""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest
from tests.support.prompts import Prompt, comparison_prompts
from tests.support.reference import Reference, ReferenceAnswer
from tests.support.stack import RunningStack, running_stack

pytestmark = [pytest.mark.integration, pytest.mark.timeout(900)]

ANSWER_TOKENS = 64
PROMPTS = 20
CONCURRENCY_MAX = 8


@dataclass(frozen=True, slots=True)
class Case:
    prompt: Prompt
    prompt_tokens: int
    expected: ReferenceAnswer


@pytest.fixture(scope="module")
def cases(smollm2_stack: RunningStack) -> list[Case]:
    """The reference's answers, computed once."""
    reference = Reference(Path(smollm2_stack.state.model_folder))
    found = []
    for prompt in comparison_prompts(reference.text_token_ids):
        if prompt.messages:
            token_ids = reference.chat_token_ids(prompt.messages)
        else:
            token_ids = list(prompt.token_ids) or reference.text_token_ids(prompt.text)
        found.append(Case(prompt, len(token_ids), reference.answer(token_ids, ANSWER_TOKENS)))
    assert len(found) == PROMPTS
    assert min(case.prompt_tokens for case in found) == 3
    assert max(case.prompt_tokens for case in found) == 2000
    return found


@pytest.fixture(scope="module")
def other_cold_stack(home: Path) -> Iterator[RunningStack]:
    """A second one whose cache nobody has filled."""
    with running_stack(home, "cold", "--model", "smollm2") as stack:
        yield stack


def test_one_at_a_time_cold_then_eight_at_once_warm(smollm2_stack: RunningStack, cases: list[Case]) -> None:
    check_all(smollm2_stack, cases, concurrency=1)
    cached_tokens = check_all(smollm2_stack, cases, concurrency=CONCURRENCY_MAX)
    assert_warm(cases, cached_tokens)


def test_eight_at_once_cold_then_one_at_a_time_warm(
    other_cold_stack: RunningStack, cases: list[Case]
) -> None:
    check_all(other_cold_stack, cases, concurrency=CONCURRENCY_MAX)
    cached_tokens = check_all(other_cold_stack, cases, concurrency=1)
    assert_warm(cases, cached_tokens)


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


def check_all(stack: RunningStack, cases: list[Case], *, concurrency: int) -> list[int]:
    """Ask every case and compare; cached tokens of each."""
    with ThreadPoolExecutor(concurrency) as threads:
        answers = list(threads.map(lambda case: ask(stack, case.prompt), cases))
    near_ties = [case.prompt.name for case in cases if not case.expected.certain]
    print(f"concurrency {concurrency}: {len(near_ties)} of {len(cases)} answers have a near tie: {near_ties}")
    for case, (text, usage) in zip(cases, answers, strict=True):
        assert case.expected.agrees(text), (
            f"{case.prompt.name}, concurrency {concurrency}: expected {case.expected.text!r}, got {text!r}"
        )
        assert usage["prompt_tokens"] == case.prompt_tokens, case.prompt.name
        assert usage["completion_tokens"] == ANSWER_TOKENS, case.prompt.name
    return [usage["prompt_tokens_details"]["cached_tokens"] for _, usage in answers]


def ask(stack: RunningStack, prompt: Prompt) -> tuple[str, dict]:
    """Text and usage of a streamed greedy answer."""
    body = {
        "model": stack.state.model,
        "max_tokens": ANSWER_TOKENS,
        "temperature": 0,
        "ignore_eos": True,
        "stream_options": {"include_usage": True},
        **prompt.body(),
    }
    text, usage = "", {}
    for event in stack.api.stream(prompt.path, body):
        for choice in event["choices"]:
            text += choice["delta"].get("content") or "" if prompt.messages else choice["text"]
        usage = event.get("usage") or usage
    return text, usage


def assert_warm(cases: list[Case], cached_tokens: list[int]) -> None:
    """Everything but the last, always computed token came from the cache, in whole blocks."""
    expected = [(case.prompt_tokens - 1) // 16 * 16 for case in cases]
    assert cached_tokens == expected
