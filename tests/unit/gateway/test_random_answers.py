"""Answers to random requests from a cluster that repeats itself, loses instances and sends in pieces of any
size: text, logprobs, finish reasons and usage are those of the whole tokens, in both forms of an answer."""

import asyncio
import json
import random

import pytest
from tests.unit.gateway.fake_cluster import END, chat_body, ids, running_cluster
from tests.unit.gateway.model_files import CORPUS
from tests.unit.gateway.plain_text import cut_naively
from tests.unit.gateway.test_answer_text import BYTE_LEVEL, certain_text

from cluster.messages import Submit
from policy.core import FinishReason, TokenLogprobs

pytestmark = pytest.mark.unit

CHAT = "/v1/chat/completions"
CASES = 25
WORDS = [
    *CORPUS[:100].split(" "),
    "🙂🚀",
    "👩‍👩‍👧",
    "你好世界",
    "e\u0301",
    "façade",
    "END",
    "\n\nUser:",
    "aab",
]


class Script:
    """What one answer's instances send, and what has to come of it."""

    def __init__(self, draw: random.Random, stops: list[str]) -> None:
        self._draw = draw
        text = " ".join(draw.choices(WORDS, k=draw.randint(1, 12)))
        self.ends = draw.random() < 0.5
        self.token_ids = ids(text) + ([END] if self.ends else [])
        self.logprobs = tuple(TokenLogprobs(-float(number)) for number in range(len(self.token_ids)))
        self.text, matched = cut_naively(text, stops)
        self.stopped_after = None
        if matched is not None:
            self.stopped_after = next(
                count
                for count in range(1, len(self.token_ids) + 1)
                if cut_naively(certain_text(BYTE_LEVEL, self.token_ids[:count]), stops)[1] is not None
            )
        self.tokens = self.stopped_after or len(self.token_ids)
        self.reason = "stop" if matched is not None or self.ends else "length"

    async def play(self, cluster, submits: asyncio.Queue[Submit], submit: Submit) -> None:
        sent, losses = 0, self._draw.randint(0, 2)
        while sent < len(self.token_ids):
            # Repeats what was sent before, now and then.
            begin = (
                self._draw.randint(max(0, sent - 2), sent)
                if sent > len(submit.work.output_token_ids) // 4
                else sent
            )
            end = min(len(self.token_ids), sent + self._draw.randint(1, 6))
            piece = slice(begin, end)
            await cluster.decode.tokens(
                submit, self.token_ids[piece], begin, logprobs=self.logprobs[piece], cached_tokens=16
            )
            sent = end
            if losses and sent < self.tokens and self._draw.random() < 0.3:
                losses -= 1
                await cluster.decode.fail(submit, retryable=True)
                submit = await submits.get()
                assert len(submit.work.output_token_ids) == 4 * sent
        reason = FinishReason.STOP if self.ends else FinishReason.LENGTH
        await cluster.decode.finish(submit, len(self.token_ids), reason)


async def answered(cluster, body: dict[str, object], scripts: list[Script]) -> str:
    asking = asyncio.create_task(cluster.post(CHAT, body))
    queues: dict[str, asyncio.Queue[Submit]] = {}
    players: list[asyncio.Task[None]] = []

    async def deal() -> None:
        while True:
            submit = await cluster.prefill.submits.get()
            request_id = submit.work.request_id
            if request_id in queues:
                queues[request_id].put_nowait(submit)
                continue
            queues[request_id] = asyncio.Queue()
            number = int(request_id.partition("-")[2] or 0)
            players.append(asyncio.create_task(scripts[number].play(cluster, queues[request_id], submit)))

    dealing = asyncio.create_task(deal())
    reply = await asyncio.wait_for(asking, 20.0)
    dealing.cancel()
    await asyncio.gather(*players)
    assert reply.status == 200, reply.text
    return reply.text


def told(choice: dict, content: str, logprobs: list[dict]) -> tuple[str, list[float], str]:
    return content, [entry["logprob"] for entry in logprobs], choice["finish_reason"]


def of_whole(text: str) -> tuple[list[tuple], dict]:
    answer = json.loads(text)
    choices = [
        told(choice, choice["message"]["content"], choice["logprobs"]["content"])
        for choice in answer["choices"]
    ]
    return choices, answer["usage"]


def of_stream(text: str, count: int) -> tuple[list[tuple], dict]:
    *events, done = [event for event in text.split("\n\n") if event]
    assert done == "data: [DONE]"
    contents, logprobs = [""] * count, [[] for _ in range(count)]
    last: dict[int, dict] = {}
    for event in events[:-1]:
        (choice,) = json.loads(event.removeprefix("data: "))["choices"]
        index = choice["index"]
        assert "�" not in choice["delta"].get("content", "")
        contents[index] += choice["delta"].get("content", "")
        logprobs[index] += (choice["logprobs"] or {"content": []})["content"]
        last[index] = choice
    usage = json.loads(events[-1].removeprefix("data: "))["usage"]
    return [told(last[i], contents[i], logprobs[i]) for i in range(count)], usage


@pytest.mark.parametrize("seed", range(CASES))
async def test_a_random_answer_is_exact(folder, monkeypatch, seed) -> None:
    monkeypatch.setattr("gateway.answers.running.PLACE_AGAIN_BACKOFF_S", 0.001)
    draw = random.Random(seed)
    count = draw.randint(1, 3)
    stops = draw.sample(["END", "Us", "🚀", "fox j", "世界", "aab ", "of Fr"], draw.randint(0, 3))
    body = chat_body(n=count, stop=stops or None, logprobs=True, max_tokens=150)
    async with running_cluster(folder) as cluster:
        scripts = [Script(draw, stops) for _ in range(count)]
        choices, usage = of_whole(await answered(cluster, body, scripts))
        assert [(text, reason) for text, _, reason in choices] == [(s.text, s.reason) for s in scripts]
        assert usage["completion_tokens"] == sum(script.tokens for script in scripts)
        assert usage["prompt_tokens_details"]["cached_tokens"] == 16
        for (text, logged, _), script in zip(choices, scripts, strict=True):
            # Of the tokens from the first on, those that the text is made of.
            assert logged == [-float(number) for number in range(len(logged))]
            spelled = certain_text(BYTE_LEVEL, script.token_ids[: len(logged)])
            assert spelled.startswith(text)
        body |= {"stream": True, "stream_options": {"include_usage": True}}
        assert of_stream(await answered(cluster, body, scripts), count) == (choices, usage)
        assert not cluster.requests._running
