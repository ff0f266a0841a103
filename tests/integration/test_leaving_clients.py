"""Clients that go away at any moment: within a second nobody holds anything for them any more."""

import asyncio
import os
import random
import signal
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.support.cluster_watch import cluster_watch
from tests.support.eventually import eventually
from tests.support.loose_stack import LooseStack
from tests.support.raw_http import RawClient, post, post_bytes
from tests.support.scrape import metrics
from tests.support.timed_engine import FIRST_TOKEN_ID, LAST_TOKEN_ID
from tests.support.timed_stack import timed_stack

pytestmark = [pytest.mark.integration, pytest.mark.timeout(240)]

SEED = int(os.environ.get("MOONPOOL_LEAVING_SEED") or random.SystemRandom().randrange(2**31))
FREED_S_MAX = 1.0
PATH = "/v1/completions"
STEP_TOKENS = 64
PREFILL_TOKEN_S = 0.0005
"""A step of prefill takes 32 ms: so long at most an engine still computes for somebody who is gone."""
DECODE_STEP_S = 0.03
LONG_PROMPT_TOKENS = 1500
BODY_PROMPT_TOKENS = 20_000
"""Never computed: its body does not come to its end."""
ANSWER_TOKENS = 400
NAMES = ("gateway-0", "prefill-0", "decode-0")
PREFILL_FLAGS = (
    *("--step-tokens-max", str(STEP_TOKENS), "--prefill-token-s", str(PREFILL_TOKEN_S)),
    *("--prefill-requests-max", "1"),
)
DECODE_FLAGS = ("--step-fixed-s", str(DECODE_STEP_S), "--step-request-s", "0.0002")
ABORTED = 500
ABORTED_AT_ONCE = 24
LIFE_S_MAX = 1.5
"""Of a request that is aborted: some have ended by then, some have not begun."""


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LooseStack]:
    folder: Path = tmp_path_factory.mktemp("leaving")
    with timed_stack(folder) as made:
        for name in ("gateway-0", "conductor-0", "kvmeta-0"):
            made.launch(name)
        made.launch("prefill-0", *PREFILL_FLAGS)
        made.launch("decode-0", *DECODE_FLAGS)
        for name in ("conductor-0", "kvmeta-0", *NAMES):
            made.wait_ready(name)
        yield made


def prompt(numbers: random.Random, tokens: int) -> list[int]:
    """One that nobody has cached."""
    return [numbers.randint(FIRST_TOKEN_ID, LAST_TOKEN_ID) for _ in range(tokens)]


def request(tokens: int = 40, *headers: str, **parameters: Any) -> bytes:
    body = {
        "model": "tiny",
        "prompt": prompt(random.Random(), tokens),
        "max_tokens": ANSWER_TOKENS,
        "ignore_eos": True,
        "stream": True,
        **parameters,
    }
    return post_bytes(PATH, body, *headers)


async def asked(stack: LooseStack, tokens: int = 40, **parameters: Any) -> RawClient:
    client = await RawClient.connect(stack.url("gateway-0"))
    await client.send(request(tokens, **parameters))
    return client


@pytest.mark.parametrize("way", ["hang_up", "reset"])
@pytest.mark.parametrize("streamed", [True, False], ids=["streamed", "whole"])
async def test_at_every_stage(stack: LooseStack, streamed: bool, way: str) -> None:
    async def leave(client: RawClient) -> None:
        await (client.hang_up() if way == "hang_up" else client.reset())

    async with cluster_watch(stack, *NAMES) as watch:
        await watch.freed_s(FREED_S_MAX)

        client = await RawClient.connect(stack.url("gateway-0"))
        half = request(BODY_PROMPT_TOKENS)[:-20]
        await client.send(half)
        await eventually(lambda: body_bytes(stack) > len(half) // 2)
        assert (await watch.load("gateway-0")).requests == 0, "who sends takes nobody's place"
        await leave(client)
        await eventually(lambda: body_bytes(stack) == 0, FREED_S_MAX)

        first = await asked(stack, LONG_PROMPT_TOKENS, stream=streamed)
        await watch.until("prefill-0", lambda load: len(load.queued) == 1)
        queued = await asked(stack, LONG_PROMPT_TOKENS, stream=streamed)
        load = await watch.until("prefill-0", lambda load: len(load.queued) == 2)
        assert load.queued[1].new_tokens == LONG_PROMPT_TOKENS, "the second one waits"
        await leave(queued)
        await watch.until("prefill-0", lambda load: len(load.queued) == 1, FREED_S_MAX)
        held = await watch.held()
        assert (held["gateway-0"].requests, held["decode-0"].requests) == (1, 1), (
            "the first one is still here"
        )

        load = await watch.until("prefill-0", lambda load: load.queued[0].new_tokens < LONG_PROMPT_TOKENS)
        assert load.queued[0].new_tokens > 0, "it is in prefill"
        await leave(first)
        report("in prefill", await watch.freed_s(FREED_S_MAX))

        client = await asked(stack, 300, stream=streamed)
        await watch.until("decode-0", lambda load: any(one.output_tokens > 3 for one in load.running))
        await leave(client)
        report("while it decodes", await watch.freed_s(FREED_S_MAX))
        await watch.check_pools()


@pytest.mark.parametrize("frozen", ["conductor-0", "prefill-0"])
async def test_while_an_answer_is_waited_for(stack: LooseStack, frozen: str) -> None:
    """For a placement, or to a submit: what comes of it later is let go of at once."""
    async with cluster_watch(stack, *NAMES) as watch:
        stack.pause(frozen)
        try:
            client = await asked(stack)
            await watch.until("gateway-0", lambda load: load.requests == 1)
            await client.reset()
            await watch.until("gateway-0", lambda load: load.requests == 0, FREED_S_MAX)
        finally:
            stack.signal(frozen, signal.SIGCONT)
        report(f"{frozen} has not answered", await watch.freed_s(FREED_S_MAX))
        await watch.check_pools()
        assert await watch.freed_s(FREED_S_MAX) < FREED_S_MAX, "nor did anything begin later"


async def test_while_its_blocks_move_to_decode(stack: LooseStack) -> None:
    """Decode stands still from the reservation on, so the commit is under way when the client goes."""
    async with cluster_watch(stack, *NAMES) as watch:
        client = await asked(stack, LONG_PROMPT_TOKENS // 2)
        await watch.until("decode-0", lambda load: len(load.running) == 1)
        stack.pause("decode-0")
        try:
            await watch.until("prefill-0", lambda load: bool(load.queued) and load.queued[0].new_tokens == 0)
            await client.reset()
            await watch.until("gateway-0", lambda load: load.requests == 0)
        finally:
            stack.signal("decode-0", signal.SIGCONT)
        report("in transfer", await watch.freed_s(FREED_S_MAX))
        await watch.check_pools()


async def test_between_the_first_token_and_decode(stack: LooseStack) -> None:
    async with cluster_watch(stack, *NAMES) as watch:
        for _ in range(5):
            client = await asked(stack)
            status, _ = await client.head()
            assert status == 200
            event = await client.event()
            assert event is not None
            await client.reset()
            await watch.freed_s(FREED_S_MAX)
        await watch.check_pools()


def whole() -> dict[str, Any]:
    return {"model": "tiny", "prompt": prompt(random.Random(), 40), "max_tokens": 8, "ignore_eos": True}


async def test_hundreds_at_random_moments_leave_nothing_behind(stack: LooseStack) -> None:
    print(f"seed {SEED}")
    numbers = random.Random(SEED)
    url = stack.url("gateway-0")
    ways: Counter[str] = Counter()
    async with cluster_watch(stack, *NAMES) as watch:
        await watch.freed_s(FREED_S_MAX)
        before = await watch.held()
        room = asyncio.Semaphore(ABORTED_AT_ONCE)

        async def abort_one(content: dict[str, Any], life_s: float, cut: float, reset: bool) -> None:
            async with room:
                client = await RawClient.connect(url)
                body = request(1, "Connection: close", **content, max_tokens=10)
                try:
                    async with asyncio.timeout(life_s):
                        await client.send(body[: max(1, round(len(body) * cut))])
                        status, _ = await client.head()
                        ways[str(status)] += 1
                        await client.reader.read()
                        ways["ended"] += 1
                except TimeoutError:
                    ways["aborted"] += 1
                await (client.reset() if reset else client.hang_up())

        await asyncio.gather(
            *(
                abort_one(
                    random_content(numbers),
                    numbers.uniform(0.0, LIFE_S_MAX),
                    numbers.choice((1.0, 1.0, 1.0, numbers.random())),
                    numbers.random() < 0.5,
                )
                for _ in range(ABORTED)
            )
        )
        freed_s = await watch.freed_s(FREED_S_MAX)
        report(f"{ABORTED} requests, {dict(ways)}", freed_s)
        assert ways.keys() <= {"aborted", "ended", "200", "429"}
        assert ways["aborted"] > ABORTED // 2
        assert ways["200"] > ways["ended"] > 0, "some had begun to answer, some had ended"
        assert await watch.held() == before
        await watch.check_pools()
        answer = await post(url, PATH, whole())
        assert answer.status == 200
        assert await watch.freed_s(FREED_S_MAX) < FREED_S_MAX
    check_counters(stack)


def random_content(numbers: random.Random) -> dict[str, Any]:
    """One prompt or two, one answer or several to each."""
    prompts = [prompt(numbers, numbers.choice((20, 60, 120))) for _ in range(numbers.choice((1, 1, 1, 1, 2)))]
    return {
        "prompt": prompts if len(prompts) > 1 else prompts[0],
        "n": numbers.choice((1, 1, 1, 1, 4)),
        "stream": numbers.random() < 0.7,
    }


def body_bytes(stack: LooseStack) -> float:
    return metrics(stack.url("gateway-0")).value("moonpool_gateway_body_bytes")


def check_counters(stack: LooseStack) -> None:
    seen = metrics(stack.url("gateway-0"))
    assert seen.value("moonpool_gateway_in_progress_requests") == 0
    assert seen.value("moonpool_gateway_body_bytes") == 0
    assert seen.value("moonpool_gateway_given_up_notices_total") == 0
    errors = [line for name in NAMES for line in stack.log_lines(name) if line.get("level") == "error"]
    assert errors == []


def report(stage: str, freed_s: float) -> None:
    print(f"{stage}: all is free after {freed_s:.2f} s")
