"""Blocks are used again across instances: by the next turn of a conversation, by another prefill instance."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support.bus_gateway import bus_gateway
from tests.support.loose_stack import loose_stack
from tests.support.scrape import Metrics, metrics
from tests.support.soak_reference import SoakReference
from tests.support.ssd_stack import (
    BLOCK_TOKENS,
    PREFIX_BLOCKS,
    PREFIX_TOKENS,
    asking,
    at_rest,
    drawn,
    ssd_tier,
    start_with_ssd,
    sunk_prefix,
)
from tests.support.stack import RunningStack, Status, running_stack

from moonpool.cluster_client import ClusterAddresses
from policy.core import SamplingParams

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]

PROMPT_TOKENS = 403
ANSWER_TOKENS = 70
NEXT_TOKENS = 37
CONVERSATIONS = 6
POOL_BYTES = 96 << 20


@pytest.fixture(scope="module")
def one(home: Path, small_folder: Path) -> Iterator[RunningStack]:
    """One prefill instance and one that decodes."""
    with running_stack(home, "reuse-1", *flags(small_folder, 1)) as started:
        yield started


@pytest.fixture(scope="module")
def three(home: Path, small_folder: Path) -> Iterator[RunningStack]:
    """Three prefill instances and one that decodes."""
    with running_stack(home, "reuse-3", *flags(small_folder, 3)) as started:
        yield started


def flags(small_folder: Path, prefill: int) -> tuple[str, ...]:
    return ("--model", str(small_folder), "--prefill", str(prefill), "--pool-bytes", str(POOL_BYTES))


@pytest.fixture(params=["one", "three"])
def stack(request: pytest.FixtureRequest) -> RunningStack:
    found: RunningStack = request.getfixturevalue(request.param)
    return found


def settled(status: Status) -> bool:
    """Nobody works, and the directory knows of every block that is held."""
    totals = status["totals"]
    busy = totals["queued"] or totals["running"] or totals["requests"] or totals["blocks_in_use"]
    return not busy and totals["blocks_indexed"] == totals["blocks_cached"]


def ask(stack: RunningStack, prompt: list[int], tokens: int) -> tuple[list[int], int]:
    """The greedy answer's tokens, and how many of the prompt's were cached."""
    body = {
        "model": stack.state.model,
        "prompt": prompt,
        "max_tokens": tokens,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
    }
    answer = stack.api.post("/completions", body)
    return answer["choices"][0]["token_ids"], answer["usage"]["prompt_tokens_details"]["cached_tokens"]


def whole_blocks(tokens: int) -> int:
    """Of so many tokens, those in full blocks."""
    return tokens // BLOCK_TOKENS * BLOCK_TOKENS


def test_the_next_turn_finds_prompt_and_answer_of_the_last(
    stack: RunningStack, small_reference: SoakReference
) -> None:
    reusable = whole_blocks(PROMPT_TOKENS + ANSWER_TOKENS - 1)
    assert reusable > whole_blocks(PROMPT_TOKENS), "some blocks are of the answer alone"
    turns = []
    for number in range(CONVERSATIONS):
        prompt = drawn(f"turn 1 of {number}", PROMPT_TOKENS)
        answer, _ = ask(stack, prompt, ANSWER_TOKENS)
        turns.append([*prompt, *answer])
    stack.wait_status(settled)
    for number, said in enumerate(turns):
        prompt = [*said, *drawn(f"turn 2 of {number}", NEXT_TOKENS)]
        answer, cached_tokens = ask(stack, prompt, ANSWER_TOKENS)
        assert cached_tokens == reusable, f"conversation {number}"
        assert small_reference.judge(prompt, answer, SamplingParams(ANSWER_TOKENS)).wrong is None


def test_the_next_turn_of_a_chat_in_text(stack: RunningStack) -> None:
    """The template may cut the answer into other tokens than were drawn: the share that was found is told."""
    messages = [{"role": "user", "content": "Tell me about lighthouses. " * 12}]
    body = {"model": stack.state.model, "max_tokens": ANSWER_TOKENS, "temperature": 0, "ignore_eos": True}
    first = stack.api.post("/chat/completions", {**body, "messages": messages})
    stack.wait_status(settled)
    messages.append(first["choices"][0]["message"])
    messages.append({"role": "user", "content": "And who kept them?"})
    second = stack.api.post("/chat/completions", {**body, "messages": messages})
    cached_tokens = second["usage"]["prompt_tokens_details"]["cached_tokens"]
    prompt_tokens = first["usage"]["prompt_tokens"]
    whole = whole_blocks(prompt_tokens + ANSWER_TOKENS - 1)
    print(f"chat text, turn 2: {cached_tokens} of {whole} reusable tokens, {cached_tokens / whole:.0%}")
    # The prompt itself is the same text again, up to what follows it in the template.
    assert cached_tokens >= whole_blocks(prompt_tokens) - BLOCK_TOKENS


@pytest.mark.parametrize(("source", "reader"), [("prefill-0", "prefill-1"), ("decode-0", "prefill-2")])
async def test_a_prefix_of_another_instance_is_read_not_computed(
    three: RunningStack, small_reference: SoakReference, source: str, reader: str
) -> None:
    prefix = drawn(f"prefix for {reader}", PREFIX_TOKENS)
    first, prompt = ([*prefix, *drawn(f"{end} end for {reader}", 25)] for end in ("one", "other"))
    urls = {row["instance"]: row["http_url"] for row in three.status()["instances"]}
    async with bus_gateway(ClusterAddresses(three.state.nats_url, three.state.etcd_url)) as gateway:
        await gateway.submit(f"first-{reader}", first, 12, at=("prefill-0", "decode-0"))
        await gateway.answer(f"first-{reader}")
        before = metrics(urls[reader])
        await gateway.submit(
            f"read-{reader}",
            prompt,
            12,
            at=(reader, "decode-0"),
            source=source,
            prefix_blocks=PREFIX_BLOCKS,
        )
        read = await gateway.answer(f"read-{reader}")
        after = metrics(urls[reader])
        # Once more at the reader, now of its own; and computed whole by one that knows nothing of it.
        await gateway.submit(f"own-{reader}", prompt, 12, at=(reader, "decode-0"))
        own = await gateway.answer(f"own-{reader}")
        other = next(name for name in ("prefill-1", "prefill-2") if name != reader)
        unaware = metrics(urls[other])
        await gateway.submit(f"computed-{reader}", prompt, 12, at=(other, "decode-0"))
        computed = await gateway.answer(f"computed-{reader}")
        prefix_bytes = PREFIX_BLOCKS * gateway.block_bytes
    assert grown(before, after, "moonpool_fetched_blocks_total", source="remote") == PREFIX_BLOCKS
    assert grown(before, after, "moonpool_fetched_bytes_total", source="remote") == prefix_bytes
    assert grown(before, after, "moonpool_transfer_bytes_total", direction="read") == prefix_bytes
    rest = len(prompt) - PREFIX_BLOCKS * BLOCK_TOKENS
    assert grown(before, after, "moonpool_prefill_tokens_total") == rest
    assert grown(before, after, "moonpool_cached_tokens_total") == len(prompt) - rest
    assert grown(before, after, "moonpool_fetch_failures_total") == 0
    assert grown(unaware, metrics(urls[other]), "moonpool_prefill_tokens_total") == len(prompt)
    assert read == own == computed
    assert small_reference.judge(prompt, read, SamplingParams(12)).wrong is None


async def test_a_prefix_that_lies_on_the_ssd_of_another_instance_is_read_from_it(
    tmp_path: Path, small_folder: Path, small_reference: SoakReference
) -> None:
    with loose_stack(tmp_path, small_folder) as stack:
        stack.launch("prefill-1")
        start_with_ssd(stack)
        stack.wait_ready("prefill-1")
        async with asking(stack, small_reference) as asker:
            await sunk_prefix(stack, asker)
            risen = ssd_tier(stack)["risen_total"]
            request = await asker.submit(
                "prefix 0", "prefill-1", source="prefill-0", prefix_blocks=PREFIX_BLOCKS
            )
            await asker.check(*request)
            assert ssd_tier(stack)["risen_total"] >= risen + PREFIX_BLOCKS // 2, "it came from the SSD"
            reader = metrics(stack.url("prefill-1"))
            assert reader.value("moonpool_fetched_blocks_total", source="remote") == PREFIX_BLOCKS
            rest = len(request[1]) - PREFIX_BLOCKS * BLOCK_TOKENS
            assert reader.value("moonpool_prefill_tokens_total") == rest
            await at_rest(stack, "prefill-0", "prefill-1", "decode-0")


def grown(before: Metrics, after: Metrics, name: str, **labels: str) -> float:
    return after.value(name, **labels) - before.value(name, **labels)
