"""Prompts as long as the context, to the token: half a million tokens through a bus of 1 MiB messages, while
the gateway goes on answering everybody else.
"""

import asyncio
import json
import os
import random
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from tests.support.cluster_watch import cluster_watch
from tests.support.loose_stack import LooseStack
from tests.support.raw_http import RawAnswer, RawClient, post
from tests.support.timed_engine import FIRST_TOKEN_ID, LAST_TOKEN_ID, timed_answer
from tests.support.timed_stack import timed_stack
from tokenizers import Tokenizer

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
CONTEXT_TOKENS = 1_000_000
LONG_PROMPT_TOKENS = 520_000
LONG_BODY_BYTES_MIN = 2_000_000
SMALL_CONTEXT_TOKENS = 2048
WORD, LETTER = "a ", "z"
CHAT_AROUND = ("<|im_start|>user\n", "<|im_end|>\n<|im_start|>assistant\n")
"""What the tiny model's template puts around a user's text."""
ANSWER_TOKENS = 3
LOOP_LOOK_S = 0.005
HELD_S_MAX = 0.15
"""So long at most others wait, beyond what either side had to wait for a processor: the event loop is not to
be held for more than 0.1 s at once."""
NAMES = ("gateway-0", "prefill-0", "decode-0")
FAST = (
    *("--step-fixed-s", "0.001", "--step-request-s", "0.0001"),
    *("--prefill-fixed-s", "0.0005", "--prefill-token-s", "0.0000001", "--step-tokens-max", "65536"),
)


def started(folder: Path, context: int) -> Iterator[LooseStack]:
    with timed_stack(folder, context=context) as made:
        names = ("conductor-0", "kvmeta-0", *NAMES)
        for name in names:
            made.launch(name, *(FAST if name in ("prefill-0", "decode-0") else ()))
        for name in names:
            made.wait_ready(name)
        yield made


@pytest.fixture(scope="module")
def long_stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LooseStack]:
    yield from started(tmp_path_factory.mktemp("long"), CONTEXT_TOKENS)


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LooseStack]:
    yield from started(tmp_path_factory.mktemp("context"), SMALL_CONTEXT_TOKENS)


async def test_half_a_million_token_ids(long_stack: LooseStack) -> None:
    numbers = random.Random(7)
    prompt = numbers.choices(range(FIRST_TOKEN_ID, LAST_TOKEN_ID + 1), k=LONG_PROMPT_TOKENS)
    body = {"model": "tiny", "prompt": prompt, "max_tokens": ANSWER_TOKENS, "return_token_ids": True}
    content = json.dumps({**body, "ignore_eos": True}).encode()
    assert len(content) > LONG_BODY_BYTES_MIN
    url = long_stack.url("gateway-0")
    async with cluster_watch(long_stack, *NAMES) as watch:
        calm_s = await longest_wait_s(long_stack, asyncio.sleep(1.0))
        asking = asyncio.create_task(post(url, TEXT, content))
        held_s = await longest_wait_s(long_stack, asking)
        answer = await asking
        assert answer.status == 200, answer.body
        assert answer.json["usage"]["prompt_tokens"] == LONG_PROMPT_TOKENS
        assert answer.json["choices"][0]["token_ids"] == timed_answer(prompt, ANSWER_TOKENS)
        print(f"others waited {held_s * 1e3:.0f} ms at most, {calm_s * 1e3:.0f} ms before")
        again = await post(url, TEXT, content)
        assert again.json["choices"] == answer.json["choices"]
        assert again.json["usage"]["prompt_tokens_details"]["cached_tokens"] > LONG_PROMPT_TOKENS - 32
        await watch.freed_s(5.0)
    assert held_s < HELD_S_MAX


async def longest_wait_s(stack: LooseStack, until: Any) -> float:
    """The longest that a small request waits for its answer while `until` is not done, beyond the time in
    which the gateway, or this process, was ready to run and had no processor."""
    loop = asyncio.get_running_loop()
    until = asyncio.ensure_future(until)
    pids = (stack.pid("gateway-0"), os.getpid())
    client = await RawClient.connect(stack.url("gateway-0"))
    longest_s = 0.0
    try:
        while not until.done():
            began_s, ready_s = loop.time(), sum(map(ready_but_waiting_s, pids))
            await client.send(b"GET /live HTTP/1.1\r\nHost: a\r\n\r\n")
            assert (await client.answer()).status == 200
            waited_s = loop.time() - began_s - (sum(map(ready_but_waiting_s, pids)) - ready_s)
            longest_s = max(longest_s, waited_s)
            with suppress(TimeoutError):
                await asyncio.wait_for(asyncio.shield(until), LOOP_LOOK_S)
    finally:
        await client.hang_up()
    return longest_s


def ready_but_waiting_s(pid: int) -> float:
    """How long the threads of a process have been kept from running by others, all of them together (Linux):
    who holds the interpreter's lock and has no processor keeps the event loop from running, too."""
    waited_ns = 0
    for stat in Path(f"/proc/{pid}/task").glob("*/schedstat"):
        with suppress(OSError):
            waited_ns += int(stat.read_text().split()[1])
    return waited_ns / 1e9


def exact_text(tokenizer: Tokenizer, tokens: int, before: str = "", after: str = "") -> str:
    """A text that has exactly so many tokens between these two, special ones of the tokenizer's own only
    where it stands alone."""

    def counted(text: str) -> int:
        return len(tokenizer.encode(f"{before}{text}{after}", add_special_tokens=not before).ids)

    a_word, two_words = counted(WORD), counted(WORD * 2)
    text = WORD * max(1, (tokens - a_word) // (two_words - a_word))
    while counted(text) < tokens:
        text += LETTER
    assert counted(text) == tokens
    return text


def content_of(stack: LooseStack, form: str, tokens: int) -> dict[str, Any]:
    """A prompt of so many tokens, as a request has it."""
    if form == "ids":
        return {"prompt": [FIRST_TOKEN_ID] * tokens}
    tokenizer = Tokenizer.from_file(str(stack.folder / "tiny" / "tokenizer.json"))
    if form == "text":
        return {"prompt": exact_text(tokenizer, tokens)}
    text = exact_text(tokenizer, tokens, *CHAT_AROUND)
    return {"messages": [{"role": "user", "content": text}]}


@pytest.mark.parametrize("form", ["ids", "text", "chat"])
@pytest.mark.parametrize("streamed", [True, False], ids=["streamed", "whole"])
async def test_the_context_to_the_token(stack: LooseStack, form: str, streamed: bool) -> None:
    """Prompt and answer together fill it; one more of either is a 400, and so is a prompt alone that does."""
    room = SMALL_CONTEXT_TOKENS

    async def ask(prompt_tokens: int, max_tokens: int | None) -> RawAnswer:
        lengths = {} if max_tokens is None else {"max_tokens": max_tokens}
        path = CHAT if form == "chat" else TEXT
        body = {
            "model": "tiny",
            **content_of(stack, form, prompt_tokens),
            **lengths,
            "ignore_eos": True,
            "stream": streamed,
        }
        options = {"stream_options": {"include_usage": True}} if streamed else {}
        return await post(stack.url("gateway-0"), path, {**body, **options}, "Connection: close")

    for prompt_tokens, max_tokens in ((room - 5, 5), (room - 1, 1)):
        answer = await ask(prompt_tokens, max_tokens)
        assert answer.status == 200, answer.body
        assert usage(answer, streamed) == (prompt_tokens, max_tokens)
    for prompt_tokens, max_tokens in ((room - 5, 6), (room - 4, 5), (room - 1, 2), (room, 1), (room + 1, 1)):
        answer = await ask(prompt_tokens, max_tokens)
        assert answer.status == 400, (prompt_tokens, max_tokens)
        assert answer.json["error"]["code"] == "context_length_exceeded"
        assert str(room) in answer.json["error"]["message"]
    for prompt_tokens in (room, room + 1):
        assert (await ask(prompt_tokens, None)).status == 400
    answer = await ask(room - 7, None)
    assert answer.status == 200
    assert usage(answer, streamed) == (room - 7, 7), "as many as fit"


def usage(answer: RawAnswer, streamed: bool) -> tuple[int, int]:
    """Tokens of prompt and answer."""
    if streamed:
        lines = [line.removeprefix(b"data: ") for line in answer.body.split(b"\n\n")]
        events = [json.loads(line) for line in lines if line.startswith(b"{")]
        (found,) = [event["usage"] for event in events if event.get("usage")]
    else:
        found = answer.json["usage"]
    return found["prompt_tokens"], found["completion_tokens"]
