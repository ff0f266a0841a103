"""A prefix that was computed once is not computed again."""

import json

import pytest
from tests.support.prompts import LONG_TEXT
from tests.support.stack import RunningStack
from tokenizers import Tokenizer

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]

PREFIX_TOKENS = 1000
PREFIX_CACHED_TOKENS = 992
"""62 whole blocks of 16."""


def test_the_second_request_with_a_prefix_finds_it_cached(smollm2_stack: RunningStack) -> None:
    tokenizer = Tokenizer.from_file(f"{smollm2_stack.state.model_folder}/tokenizer.json")
    # Backwards: no other test sends this text.
    token_ids = tokenizer.encode(LONG_TEXT).ids[::-1]
    prefix, ends = token_ids[:PREFIX_TOKENS], (token_ids[1100:1120], token_ids[1200:1225])
    first, second = (cached_tokens(smollm2_stack, [*prefix, *end]) for end in ends)
    assert first < 16
    assert second >= PREFIX_CACHED_TOKENS


def test_the_benchmark_of_the_prefix_prints_the_one_form(smollm2_stack: RunningStack) -> None:
    done = smollm2_stack.command(
        "bench", "prefix", "--json", "--repeats", "2", "--name", smollm2_stack.name, timeout_s=240
    )
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    print(done.stdout)
    assert [(line["case"], line["metric"], line["unit"]) for line in lines] == [
        ("fresh", "ttft", "ms"),
        ("shared", "ttft", "ms"),
        ("fresh/shared", "ttft_ratio", "x"),
    ]
    for line in lines:
        assert line["bench"] == "prefix"
        assert line["n"] == 2
        assert 0 < line["min"] <= line["value"] <= line["max"]
        assert line["context"]["prompt_tokens_min"] > PREFIX_TOKENS
        assert line["context"]["cached_tokens_min"] >= PREFIX_CACHED_TOKENS
        assert line["context"]["cached_tokens_fresh_max"] < 16


def cached_tokens(stack: RunningStack, token_ids: list[int]) -> int:
    body = {"model": stack.state.model, "prompt": token_ids, "max_tokens": 2, "temperature": 0}
    usage = stack.api.post("/completions", body)["usage"]
    assert usage["prompt_tokens"] == len(token_ids)
    return usage["prompt_tokens_details"]["cached_tokens"]
