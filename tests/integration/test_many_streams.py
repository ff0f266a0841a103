"""A thousand streams at once through one gateway: each is whole or refused with 429, within bounded memory;
who does not read is cut off, and the others do not notice.
"""

import asyncio
import random
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import pytest
from tests.support.cluster_watch import cluster_watch
from tests.support.loose_stack import LooseStack
from tests.support.raw_http import RawClient, post_bytes
from tests.support.scrape import metrics
from tests.support.timed_engine import FIRST_TOKEN_ID, LAST_TOKEN_ID, timed_answer
from tests.support.timed_stack import timed_stack
from tokenizers import Tokenizer

pytestmark = [pytest.mark.integration, pytest.mark.timeout(240)]

PATH = "/v1/completions"
STREAMS = 1000
PROMPT_TOKENS, ANSWER_TOKENS = 20, 12
SMALL_REQUESTS_MAX = 200
"""Of the gateway with less room."""
STREAM_BYTES_MAX = 200 * 1024
"""What the gateway's memory may grow by for each stream that is open."""
RSS_LOOK_S = 0.1
FREED_S_MAX = 2.0
SILENT_READERS = 4
SILENT_RECEIVE_BYTES = 4096
SILENT_ANSWERS, SILENT_ANSWER_TOKENS = 32, 10_000
"""Of each: what the kernel takes for it is soon full, long before these answers end."""
WHOLE_ANSWERS, WHOLE_BYTES_MIN = 100, 1 << 20
"""To one prompt that each repeats: more than kernel and process take for a client that does not read."""
CONTEXT_TOKENS = 16_384
WRITE_TIMEOUT_S = 1.0
UNSENT_CHARS_MAX = 5000
CUT_OFF_S_MAX = 60.0
NAMES = ("gateway-0", "gateway-1", "prefill-0", "decode-0")
FAST = ("--step-fixed-s", "0.001", "--step-request-s", "0.00001", "--prefill-token-s", "0.00001")
FLAGS = {
    "gateway-0": ("--write-timeout-s", str(WRITE_TIMEOUT_S), "--unsent-chars-max", str(UNSENT_CHARS_MAX)),
    "gateway-1": ("--requests-max", str(SMALL_REQUESTS_MAX)),
    "prefill-0": (*FAST, "--prefill-requests-max", "64", "--queue-requests-max", "2000"),
    "decode-0": (*FAST, "--batch-requests-max", "1024"),
}


@dataclass(frozen=True, slots=True)
class Stream:
    """What came: `problem` is empty where it is what was asked for."""

    status: int
    problem: str = ""
    retry_after: str = ""
    reason: str = ""


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LooseStack]:
    folder: Path = tmp_path_factory.mktemp("streams")
    with timed_stack(folder, context=CONTEXT_TOKENS) as made:
        names = ("conductor-0", "kvmeta-0", *NAMES)
        for name in names:
            made.launch(name, *FLAGS.get(name, ()))
        for name in names:
            made.wait_ready(name)
        yield made


@pytest.fixture(scope="module")
def tokenizer(stack: LooseStack) -> Tokenizer:
    return Tokenizer.from_file(str(stack.folder / "tiny" / "tokenizer.json"))


def request(prompt: list[int], tokens: int, **parameters: int) -> bytes:
    body = {"model": "tiny", "prompt": prompt, "max_tokens": tokens, "ignore_eos": True, **parameters}
    return post_bytes(PATH, {**body, "stream": True, "return_token_ids": True})


def prompt(numbers: random.Random) -> list[int]:
    return [numbers.randint(FIRST_TOKEN_ID, LAST_TOKEN_ID) for _ in range(PROMPT_TOKENS)]


async def stream(client: RawClient, prompt: list[int], tokens: int, tokenizer: Tokenizer) -> Stream:
    """Ask, read all of it, and compare with what the engine says to that prompt."""
    await client.send(request(prompt, tokens))
    status, headers = await client.head()
    if status != 200:
        named = headers.get("x-moonpool-rejected-reason", "")
        return Stream(status, "", headers.get("retry-after", ""), named)
    texts: list[str] = []
    token_ids: list[int] = []
    reason = None
    while (event := await client.event()) is not None:
        if "error" in event:
            return Stream(status, f"an error event: {event['error']['message']}")
        for choice in event["choices"]:
            texts.append(choice["text"])
            token_ids += choice.get("token_ids") or []
            reason = choice["finish_reason"] or reason
    if token_ids != timed_answer(prompt, tokens):
        return Stream(status, f"other tokens: {token_ids}")
    if "".join(texts) != tokenizer.decode(token_ids):
        return Stream(status, f"other text: {texts}")
    return Stream(status, "" if reason == "length" else f"finish_reason {reason}")


async def all_at_once(url: str, streams: int, seed: int, tokenizer: Tokenizer) -> list[Stream]:
    """Every connection is open before the first request is sent."""
    numbers = random.Random(seed)
    clients = await asyncio.gather(*(RawClient.connect(url) for _ in range(streams)))
    try:
        prompts = [prompt(numbers) for _ in clients]
        return await asyncio.gather(
            *(
                stream(client, asked, ANSWER_TOKENS, tokenizer)
                for client, asked in zip(clients, prompts, strict=True)
            )
        )
    finally:
        for client in clients:
            await client.hang_up()


async def test_a_thousand_streams(stack: LooseStack, tokenizer: Tokenizer) -> None:
    url = stack.url("gateway-0")
    async with cluster_watch(stack, *NAMES) as watch:
        # What is allocated once is no matter of how many there are.
        assert all(not one.problem for one in await all_at_once(url, 50, 1, tokenizer))
        await watch.freed_s(FREED_S_MAX)
        rss_before_bytes = rss_bytes(stack.pid("gateway-0"))
        peak = asyncio.create_task(peak_rss_bytes(stack.pid("gateway-0")))
        outcomes = await all_at_once(url, STREAMS, 2, tokenizer)
        peak.cancel()
        grown_bytes = max(0, await peak - rss_before_bytes)
        statuses = Counter(one.status for one in outcomes)
        print(f"{dict(statuses)}; memory grew by {grown_bytes / STREAMS / 1024:.1f} KiB a stream")
        assert [one.problem for one in outcomes if one.problem] == []
        assert statuses.keys() <= {200, 429}
        assert statuses[200] >= STREAMS * 0.9
        assert grown_bytes <= STREAMS * STREAM_BYTES_MAX
        await watch.freed_s(FREED_S_MAX)
        await watch.check_pools()


async def test_more_than_a_gateway_takes_are_refused_with_429(
    stack: LooseStack, tokenizer: Tokenizer
) -> None:
    url = stack.url("gateway-1")
    async with cluster_watch(stack, *NAMES) as watch:
        outcomes = await all_at_once(url, STREAMS, 3, tokenizer)
        statuses = Counter(one.status for one in outcomes)
        print(dict(statuses))
        assert [one.problem for one in outcomes if one.problem] == []
        assert statuses.keys() == {200, 429}
        assert statuses[200] >= SMALL_REQUESTS_MAX
        refused = [one for one in outcomes if one.status == 429]
        assert {one.reason for one in refused} == {"gateway_full"}
        assert all(int(one.retry_after) >= 1 for one in refused)
        await watch.freed_s(FREED_S_MAX)
    seen = metrics(url)
    assert seen.value("moonpool_gateway_rejected_requests_total", reason="gateway_full") == statuses[429]


async def test_who_does_not_read_is_cut_off_and_harms_nobody(stack: LooseStack, tokenizer: Tokenizer) -> None:
    url = stack.url("gateway-0")
    numbers = random.Random(4)
    async with cluster_watch(stack, *NAMES) as watch:
        rss_before_bytes = rss_bytes(stack.pid("gateway-0"))
        silent = [
            await RawClient.connect(url, receive_bytes=SILENT_RECEIVE_BYTES) for _ in range(SILENT_READERS)
        ]
        for client in silent:
            await client.send(request(prompt(numbers), SILENT_ANSWER_TOKENS, n=SILENT_ANSWERS))
        await watch.until("decode-0", lambda load: len(load.running) >= SILENT_READERS)
        # The others are served meanwhile, and the silent ones have gone long before their answers end.
        rounds = 0
        async with asyncio.timeout(CUT_OFF_S_MAX):
            while (await watch.load("gateway-0")).requests:
                outcomes = await all_at_once(url, 10, 100 + rounds, tokenizer)
                assert {(one.status, one.problem) for one in outcomes} == {(200, "")}
                rounds += 1
        freed_s = await watch.freed_s(FREED_S_MAX)
        grown_bytes = max(0, rss_bytes(stack.pid("gateway-0")) - rss_before_bytes)
        print(f"{rounds} rounds beside them, free after {freed_s:.2f} s, {grown_bytes >> 10} KiB more")
        assert rounds > 0
        told = [await cut_off(client) for client in silent]
        assert all(told), "each was cut off, none got its whole answer"
        await watch.check_pools()
    lines = [line for line in stack.log_lines("gateway-0") if line.get("message") == "request"]
    gone = [line for line in lines if line["status"] in (429, 499)]
    assert len(gone) >= SILENT_READERS
    assert [line for line in stack.log_lines("gateway-0") if line.get("level") == "error"] == []


async def test_slow_bodies_take_nobodys_place(stack: LooseStack, tokenizer: Tokenizer) -> None:
    """More clients than the gateway takes requests send half a body and wait; the others do not notice."""
    url = stack.url("gateway-1")
    half = request(prompt(random.Random(5)), ANSWER_TOKENS)[:-10]
    slow = await asyncio.gather(*(RawClient.connect(url) for _ in range(SMALL_REQUESTS_MAX + 50)))
    for client in slow:
        await client.send(half)
    outcomes = await all_at_once(url, 50, 6, tokenizer)
    assert {(one.status, one.problem) for one in outcomes} == {(200, "")}
    for client in slow:
        await client.reset()


async def test_who_does_not_read_a_whole_answer_is_cut_off(stack: LooseStack) -> None:
    """It counts as in progress until it is read, and is not kept for ever."""
    body = {"model": "tiny", "prompt": [FIRST_TOKEN_ID] * 10_000, "max_tokens": 2, "echo": True}
    async with cluster_watch(stack, *NAMES) as watch:
        client = await RawClient.connect(stack.url("gateway-0"), receive_bytes=SILENT_RECEIVE_BYTES)
        await client.send(post_bytes(PATH, {**body, "n": WHOLE_ANSWERS}))
        await watch.until("gateway-0", lambda load: load.requests == 1)
        await watch.freed_s(CUT_OFF_S_MAX)
        status, headers = await client.head()
        assert status == 200
        assert int(headers["content-length"]) > WHOLE_BYTES_MIN
        with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
            await client.reader.readexactly(int(headers["content-length"]))
        await client.reset()


async def cut_off(client: RawClient) -> bool:
    """Whether the connection ends without a whole answer."""
    try:
        with suppress(ConnectionError, asyncio.IncompleteReadError):
            await client.head()
            while (event := await client.event()) is not None:
                if "error" in event:
                    return event["error"]["code"] == "client_too_slow"
            return False
        return True
    finally:
        await client.reset()


async def peak_rss_bytes(pid: int) -> int:
    """The most that a process took, until this is cancelled."""
    peak = rss_bytes(pid)
    with suppress(asyncio.CancelledError):
        while True:
            await asyncio.sleep(RSS_LOOK_S)
            peak = max(peak, rss_bytes(pid))
    return peak


def rss_bytes(pid: int) -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024
    raise AssertionError(f"process {pid} has no memory")
