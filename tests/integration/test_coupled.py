"""A coupled instance answers alone, and as the two apart do."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from tests.support.stack import RunningStack, running_stack

pytestmark = [pytest.mark.integration, pytest.mark.timeout(180)]

PROMPTS = ["hello", "hello again, and then some more words to fill a block or two", "a", "hello again"]


@pytest.fixture(scope="module")
def coupled_stack(home: Path) -> Iterator[RunningStack]:
    flags = ("--model", "tiny", "--prefill", "0", "--decode", "0", "--coupled", "1")
    with running_stack(home, "coupled", *flags) as stack:
        yield stack


def ask(stack: RunningStack, prompt: str) -> tuple[str, int]:
    """Text and cached tokens of a greedy answer."""
    body = {
        "model": stack.state.model,
        "prompt": prompt,
        "max_tokens": 40,
        "temperature": 0,
        "ignore_eos": True,
    }
    answer = stack.api.post("/completions", body)
    assert answer["usage"]["completion_tokens"] == 40
    return answer["choices"][0]["text"], answer["usage"]["prompt_tokens_details"]["cached_tokens"]


def test_one_coupled_instance_answers_as_a_pair_does(
    coupled_stack: RunningStack, tiny_stack: RunningStack
) -> None:
    roles = [instance["roles"] for instance in coupled_stack.status()["instances"] if instance["blocks"]]
    assert [sorted(r) for r in roles] == [["decode", "prefill"]]
    with ThreadPoolExecutor(len(PROMPTS)) as threads:
        coupled = [text for text, _ in threads.map(lambda p: ask(coupled_stack, p), PROMPTS)]
        apart = [text for text, _ in threads.map(lambda p: ask(tiny_stack, p), PROMPTS)]
    assert coupled == apart


def test_it_reuses_what_it_computed_and_returns_its_blocks(coupled_stack: RunningStack) -> None:
    prompt = "the quick brown fox jumps over the lazy dog " * 4
    text, cached_tokens = ask(coupled_stack, prompt)
    assert cached_tokens == 0
    again, cached_tokens = ask(coupled_stack, prompt)
    assert again == text
    assert cached_tokens >= 16
    status = coupled_stack.wait_status(lambda s: s["totals"]["blocks_in_use"] == 0)
    assert status["totals"]["queued"] == status["totals"]["running"] == 0
    assert status["totals"]["blocks_cached"] > 0
