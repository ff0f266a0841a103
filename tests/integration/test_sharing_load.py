"""Two prefill and two decode instances share the work, and a client that goes away leaves nothing behind."""

import random
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPConnection
from urllib.parse import urlsplit

import orjson
import pytest
from tests.support.stack import RunningStack, Status

pytestmark = [pytest.mark.integration, pytest.mark.timeout(180)]

REQUESTS = 24
CONCURRENCY = 12
PROMPT_TOKENS = 400
ANSWER_TOKENS = 96
LONG_ANSWER_TOKENS = 1500
KILLED_CLIENTS = 8


def random_prompt(seed: int, tokens: int) -> list[int]:
    """Token ids that nobody else sends; the first ids of the vocabulary are special tokens."""
    numbers = random.Random(f"sharing load {seed}")
    return [numbers.randrange(10, 500) for _ in range(tokens)]


def body(stack: RunningStack, prompt: list[int], answer_tokens: int) -> dict[str, object]:
    return {
        "model": stack.state.model,
        "prompt": prompt,
        "max_tokens": answer_tokens,
        "temperature": 0,
        "ignore_eos": True,
    }


def idle(status: Status) -> bool:
    totals = status["totals"]
    return not (totals["blocks_in_use"] or totals["queued"] or totals["running"] or totals["requests"])


def counters(stack: RunningStack, role: str, name: str) -> dict[str, int]:
    return {instance["instance"]: instance[name] for instance in stack.instances(role)}


def test_every_instance_does_its_part(tiny_stack: RunningStack) -> None:
    prefilled = counters(tiny_stack, "prefill", "prefill_tokens_total")
    decoded = counters(tiny_stack, "decode", "decode_tokens_total")
    assert len(prefilled) == 2
    assert len(decoded) == 2
    bodies = [body(tiny_stack, random_prompt(i, PROMPT_TOKENS), ANSWER_TOKENS) for i in range(REQUESTS)]
    with ThreadPoolExecutor(CONCURRENCY) as threads:
        answers = list(threads.map(lambda b: tiny_stack.api.post("/completions", b), bodies))
    assert {answer["usage"]["completion_tokens"] for answer in answers} == {ANSWER_TOKENS}
    tiny_stack.wait_status(idle)
    prefill_shares = growth(prefilled, counters(tiny_stack, "prefill", "prefill_tokens_total"))
    decode_shares = growth(decoded, counters(tiny_stack, "decode", "decode_tokens_total"))
    assert sum(prefill_shares) == REQUESTS * PROMPT_TOKENS
    assert min(prefill_shares) >= PROMPT_TOKENS
    assert min(decode_shares) >= ANSWER_TOKENS // 2
    # The first token of each answer is prefill's.
    assert sum(decode_shares) >= REQUESTS * (ANSWER_TOKENS - 1)


def growth(before: dict[str, int], after: dict[str, int]) -> list[int]:
    return [after[name] - count for name, count in before.items()]


def test_clients_killed_in_mid_stream_return_every_block(tiny_stack: RunningStack) -> None:
    before = tiny_stack.wait_status(idle)
    streams = [
        tiny_stack.api.stream(
            "/completions", body(tiny_stack, random_prompt(1000 + i, PROMPT_TOKENS), LONG_ANSWER_TOKENS)
        )
        for i in range(KILLED_CLIENTS)
    ]
    next(streams[0])
    busy = tiny_stack.status()["totals"]  # before the others: on a slow machine it ends meanwhile
    for stream in streams[1:]:
        next(stream)
    assert busy["blocks_in_use"] > 0
    assert busy["running"] > 0
    for stream in streams:
        stream.close()
    assert_all_returned(before, tiny_stack.wait_status(idle))


def test_clients_killed_before_the_first_token_return_every_block(tiny_stack: RunningStack) -> None:
    before = tiny_stack.wait_status(idle)
    for i in range(KILLED_CLIENTS):
        send_and_leave(tiny_stack, body(tiny_stack, random_prompt(2000 + i, 1500), 300))
    after = tiny_stack.wait_status(idle)
    assert_all_returned(before, after)
    answer = tiny_stack.api.post("/completions", body(tiny_stack, random_prompt(3000, 20), 4))
    assert answer["usage"]["completion_tokens"] == 4


def send_and_leave(stack: RunningStack, request: dict[str, object]) -> None:
    """Send a whole request and close the connection without reading a byte of the answer."""
    parts = urlsplit(stack.state.url)
    connection = HTTPConnection(parts.hostname or "", parts.port)
    payload = orjson.dumps({**request, "stream": True})
    connection.request("POST", f"{parts.path}/completions", payload, {"Content-Type": "application/json"})
    connection.close()


def assert_all_returned(before: Status, after: Status) -> None:
    for was, now in zip(before["instances"], after["instances"], strict=True):
        assert now["instance"] == was["instance"]
        assert now["incarnation"] == was["incarnation"]
        assert now["blocks_in_use"] == 0
        assert now["blocks_free"] + now["blocks_cached"] == now["blocks"] == was["blocks"]
