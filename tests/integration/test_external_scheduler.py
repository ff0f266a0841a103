"""The example in examples/external_scheduler.py takes over placement, and gives it back by going.

Meanwhile everything that is said on the bus is as docs/asyncapi.json says.
"""

import asyncio
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import nats
import orjson
import pytest
from nats.aio.msg import Msg
from tests.support.bus_document import BusDocument
from tests.support.eventually import eventually
from tests.support.loose_stack import LooseStack, loose_stack
from tests.support.scrape import metrics

from engine.tiny import make_tiny_model
from moonpool.api import Api

pytestmark = [pytest.mark.integration, pytest.mark.timeout(180)]

EXAMPLE = Path(__file__).parents[2] / "examples" / "external_scheduler.py"
WORKERS = ("prefill-0", "prefill-1", "decode-0", "decode-1")
REQUESTS = 6
PROMPT = "before it comes, and after it has gone. " * 4
"""Some blocks long: a conductor asks who holds them."""
ANSWER_TOKENS = 20
LONG_ANSWER_TOKENS = 400
LINE_S_MAX = 30.0
ANSWER_S_MAX = 60.0


class Scheduler:
    """The example as a process, and what it prints."""

    def __init__(self, url: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, str(EXAMPLE), url], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        self.lines: list[str] = []
        self._changed = threading.Condition()
        threading.Thread(target=self._read, daemon=True).start()

    def wait_lines(self, count: int) -> Sequence[str]:
        with self._changed:
            came = self._changed.wait_for(lambda: len(self.lines) >= count, LINE_S_MAX)
            assert came, f"{count} lines wanted: {self.lines}"
            return tuple(self.lines)

    def placements(self) -> list[dict[str, str]]:
        """In the order in which it made them; it prints `scheduling` first, and makes no rejections here."""
        told = [line.split(" ", 1) for line in self.lines if line != "scheduling"]
        assert {kind for kind, _ in told} <= {"placement"}, self.lines
        return [orjson.loads(body) for _, body in told]

    def end(self) -> None:
        self.process.kill()
        self.process.wait()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            with self._changed:
                self.lines.append(line.rstrip("\n"))
                self._changed.notify_all()


@contextmanager
def external_scheduler(url: str) -> Iterator[Scheduler]:
    scheduler = Scheduler(url)
    try:
        scheduler.wait_lines(1)
        yield scheduler
    finally:
        scheduler.end()


class Spy:
    """Hears everything on the bus, and holds it against the document."""

    def __init__(self) -> None:
        self.document = BusDocument()
        self.faults: list[str] = []
        self.kinds: set[str] = set()
        self.workers_of: dict[str, set[str]] = {}
        """By request: who streamed its tokens."""

    async def hear(self, message: Msg) -> None:
        if not message.data:
            return
        try:
            kind = self.document.check(message.data)
        except Exception as error:
            self.faults.append(f"{message.subject}: {error}")
            return
        is_reply = message.subject.startswith("_INBOX.")
        known = self.document.kinds_in_replies() if is_reply else self.document.kinds_on(message.subject)
        if kind not in known:
            self.faults.append(f"{kind} on {message.subject}")
        self.kinds.add(kind)
        if kind == "stream":
            told = orjson.loads(message.data)
            for entry in told["body"]["finished"]:
                self.workers_of.setdefault(entry["request_id"], set()).add(told["sender"])


@asynccontextmanager
async def spy(url: str) -> AsyncIterator[Spy]:
    listening = Spy()
    client = await nats.connect(url)
    try:
        for subject in ("moonpool.v1.>", "_INBOX.>"):
            await client.subscribe(subject, cb=listening.hear)
        await client.flush()
        yield listening
    finally:
        await client.close()


@pytest.fixture
def stack(tmp_path: Path) -> Iterator[LooseStack]:
    folder = tmp_path / "tiny"
    make_tiny_model(folder)
    with loose_stack(tmp_path, folder) as made:
        made.start("conductor-0", flags=("--standby",))
        made.start("kvmeta-0", *WORKERS)
        made.start("gateway-0")
        yield made


async def ask(stack: LooseStack, prompt: str, tokens: int = ANSWER_TOKENS) -> str:
    body = {"model": "tiny", "prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
    api = Api(stack.url("gateway-0"), timeout_s=ANSWER_S_MAX)
    answer = await asyncio.to_thread(api.post, "/completions", body)
    assert answer["usage"]["completion_tokens"] == tokens
    return str(answer["choices"][0]["text"])


def decided(stack: LooseStack) -> float:
    return metrics(stack.url("conductor-0")).value("moonpool_conductor_decisions_total")


async def test_it_places_while_it_is_there_and_the_standby_conductor_before_and_after(
    stack: LooseStack,
) -> None:
    async with spy(stack.addresses.nats_url) as heard:
        first = await ask(stack, PROMPT)
        assert decided(stack) == 1

        with external_scheduler(stack.addresses.nats_url) as scheduler:
            await asyncio.gather(*(ask(stack, f"request {number}") for number in range(REQUESTS)))
            scheduler.wait_lines(1 + REQUESTS)
            placements = scheduler.placements()
            assert decided(stack) == 1
            assert {placed["prefill"] for placed in placements} == {"prefill-0", "prefill-1"}
            assert {placed["decode"] for placed in placements} == {"decode-0", "decode-1"}
            told = {placed["request_id"]: {placed["decode"]} for placed in placements}
            await eventually(lambda: told.keys() <= heard.workers_of.keys())
            assert {name: heard.workers_of[name] for name in told} == told

            long_answer = asyncio.create_task(ask(stack, "it goes away meanwhile", LONG_ANSWER_TOKENS))
            await asyncio.to_thread(scheduler.wait_lines, 2 + REQUESTS)
            scheduler.end()
            # Who placed it is not needed any more.
            assert await long_answer

        assert await ask(stack, PROMPT) == first
        assert decided(stack) == 2
    assert heard.faults == []
    assert {"schedule", "placement", "load", "submit", "reserve", "commit", "stream", "match"} <= heard.kinds
