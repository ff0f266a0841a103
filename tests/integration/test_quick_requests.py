"""Requests that come and go between two load snapshots, in a pool that has room for one at a time."""

from pathlib import Path

import pytest
from tests.integration.test_sharing_load import body, random_prompt
from tests.support.stack import running_stack

from engine.layout import KVLayout
from engine.model_folder import ModelConfig

pytestmark = [pytest.mark.integration, pytest.mark.timeout(180)]

REQUESTS = 40
PROMPT_TOKENS = 640
ANSWER_TOKENS = 3
POOL_BLOCKS = 64
"""A prompt and its answer take 41: two do not fit."""


def test_one_after_another_all_find_room(home: Path, small_folder: Path) -> None:
    block_bytes = KVLayout.of(ModelConfig.load(small_folder)).block_bytes
    flags = ("--model", str(small_folder), "--pool-bytes", str(POOL_BLOCKS * block_bytes))
    with running_stack(home, "quick", *flags) as stack:
        for number in range(REQUESTS):
            prompt = random_prompt(1000 + number, PROMPT_TOKENS)
            answer = stack.api.post("/completions", body(stack, prompt, ANSWER_TOKENS))
            assert answer["usage"]["completion_tokens"] == ANSWER_TOKENS
