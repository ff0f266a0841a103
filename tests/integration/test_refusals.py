"""What a client is told that cannot be served: the status, the body, and when to come again."""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.support.cluster_watch import cluster_watch
from tests.support.loose_stack import LooseStack
from tests.support.raw_http import RawAnswer, RawClient, post, post_bytes
from tests.support.timed_engine import FIRST_TOKEN_ID
from tests.support.timed_stack import timed_stack

pytestmark = [pytest.mark.integration, pytest.mark.timeout(240)]

PATH = "/v1/completions"
DEADLINE_S = 1.5
STEP_S = 0.05
PREFILL_TOKEN_S = 0.002
TTFT_MS = 1500.0
LONG_PROMPT_TOKENS = 500
"""Takes a second to compute: of several at once, the last ones cannot meet the target."""
AT_ONCE = 12
FREED_S_MAX = 2.0
NAMES = ("gateway-0", "gateway-1", "prefill-0", "decode-0")


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LooseStack]:
    """gateway-0 has time, gateway-1 gives every request DEADLINE_S. No worker runs yet."""
    folder: Path = tmp_path_factory.mktemp("refusals")
    with timed_stack(folder) as made:
        made.launch("gateway-0")
        made.launch("gateway-1", "--request-timeout-s", str(DEADLINE_S))
        made.launch("conductor-0", "--ttft-ms-default", str(TTFT_MS))
        made.launch("kvmeta-0")
        for name in ("gateway-0", "gateway-1", "conductor-0", "kvmeta-0"):
            made.wait_ready(name)
        yield made


@pytest.fixture(scope="module")
def workers(stack: LooseStack) -> LooseStack:
    """The same stack, with instances."""
    stack.launch("prefill-0", "--prefill-token-s", str(PREFILL_TOKEN_S), "--step-tokens-max", "64")
    stack.launch("decode-0", "--step-fixed-s", str(STEP_S))
    for name in ("prefill-0", "decode-0"):
        stack.wait_ready(name)
    return stack


def body(tokens: int = 8, prompt_tokens: int = 20, **parameters: Any) -> dict[str, Any]:
    prompt = [FIRST_TOKEN_ID + i % 200 for i in range(prompt_tokens)]
    return {"model": "tiny", "prompt": prompt, "max_tokens": tokens, "ignore_eos": True, **parameters}


def check_says_when(answer: RawAnswer) -> None:
    assert int(answer.headers["retry-after"]) >= 1
    assert int(answer.headers["retry-after-ms"]) >= 1


@pytest.mark.parametrize("streamed", [True, False], ids=["streamed", "whole"])
async def test_no_instance_is_a_503(stack: LooseStack, streamed: bool) -> None:
    answer = await post(stack.url("gateway-0"), PATH, body(stream=streamed))
    assert answer.status == 503, answer.body
    check_says_when(answer)
    assert answer.headers["x-moonpool-rejected-reason"] == "no_instance"
    assert answer.json["error"]["type"] == "service_unavailable_error"


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_an_unknown_model_is_a_404_whatever_runs(stack: LooseStack, path: str) -> None:
    content = {"messages": [{"role": "user", "content": "x"}]} if "chat" in path else {"prompt": "x"}
    answer = await post(stack.url("gateway-0"), path, {"model": "gpt-5", **content})
    assert answer.status == 404
    assert answer.json["error"]["code"] == "model_not_found"
    assert answer.json["error"]["param"] == "model"


async def test_a_deadline_is_a_504(workers: LooseStack) -> None:
    url = workers.url("gateway-1")
    async with cluster_watch(workers, *NAMES) as watch:
        began_s = asyncio.get_running_loop().time()
        answer = await post(url, PATH, body(tokens=500))
        took_s = asyncio.get_running_loop().time() - began_s
        assert answer.status == 504, answer.body
        assert answer.json["error"]["code"] == "deadline_exceeded"
        assert took_s >= DEADLINE_S
        await watch.freed_s(FREED_S_MAX)

        # Once it has begun, the error is an event, and the stream ends without [DONE].
        client = await RawClient.connect(url)
        await client.send(post_bytes(PATH, body(tokens=500, stream=True), "Connection: close"))
        status, _ = await client.head()
        assert status == 200
        events, whole = await client.events()
        assert not whole
        assert events[-1]["error"]["code"] == "deadline_exceeded"
        assert all(event["choices"] for event in events[:-1])
        assert len(events) > 5
        await watch.freed_s(FREED_S_MAX)


async def test_what_cannot_meet_its_target_is_a_429(workers: LooseStack) -> None:
    url = workers.url("gateway-0")
    async with cluster_watch(workers, *NAMES) as watch:
        prompts = [
            [FIRST_TOKEN_ID + number, *([FIRST_TOKEN_ID] * (LONG_PROMPT_TOKENS - 1))]
            for number in range(AT_ONCE)
        ]
        answers = await asyncio.gather(*(post(url, PATH, body() | {"prompt": prompt}) for prompt in prompts))
        assert {answer.status for answer in answers} == {200, 429}
        for answer in answers:
            if answer.status == 429:
                check_says_when(answer)
                assert answer.headers["x-moonpool-rejected-reason"] == "ttft"
                assert answer.json["error"]["type"] == "rate_limit_error"
        # A target of the request's own, too short for anything.
        answer = await post(url, PATH, body(prompt_tokens=LONG_PROMPT_TOKENS), "x-slo-ttft-ms: 1")
        assert answer.status == 429
        await watch.freed_s(FREED_S_MAX)
        assert (await post(url, PATH, body())).status == 200, "there is room again"
