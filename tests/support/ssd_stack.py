"""A worker with an SSD on a loose stack, and requests that make a prefix lie where a test wants it."""

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from tests.support.bus_gateway import BusGateway, bus_gateway
from tests.support.eventually import eventually
from tests.support.loose_stack import LooseStack
from tests.support.scrape import metrics, pool
from tests.support.soak_reference import SoakReference

from policy.core import SamplingParams

BLOCK_TOKENS = 16
PREFIX_TOKENS = 600
PREFIX_BLOCKS = PREFIX_TOKENS // BLOCK_TOKENS
ANSWER_TOKENS = 12
POOL_BYTES = 16 << 20
"""Of a worker with an SSD: some 170 blocks, not room for five prefixes."""
FILLING_PREFIXES = 7
"""More than it has room for in memory: the first of them lies on the SSD alone then."""
SSD_BYTES = 64 << 20
MOVED_S_MAX = 20.0


def drawn(seed: str, tokens: int) -> list[int]:
    numbers = random.Random(seed)
    return [numbers.randrange(10, 500) for _ in range(tokens)]


class Asker:
    """Asks for answers and knows whether they are right."""

    def __init__(self, gateway: BusGateway, reference: SoakReference) -> None:
        self.gateway = gateway
        self._reference = reference
        self._number = 0

    async def submit(
        self, prefix: str, prefill: str, *, source: str | None = None, prefix_blocks: int = 0
    ) -> tuple[str, list[int]]:
        """A request with the prefix of that name and an end of its own: its name and prompt."""
        self._number += 1
        name = f"request-{self._number}"
        prompt = [*drawn(prefix, PREFIX_TOKENS), *drawn(name, 25)]
        await self.gateway.submit(
            name,
            prompt,
            ANSWER_TOKENS,
            at=(prefill, "decode-0"),
            source=source,
            prefix_blocks=prefix_blocks,
        )
        return name, prompt

    async def check(self, name: str, prompt: list[int]) -> None:
        answer = await self.gateway.answer(name)
        assert len(answer) == ANSWER_TOKENS
        assert self._reference.judge(prompt, answer, SamplingParams(ANSWER_TOKENS)).wrong is None, name

    async def ask(self, prefix: str, prefill: str) -> None:
        await self.check(*await self.submit(prefix, prefill))


@asynccontextmanager
async def asking(stack: LooseStack, reference: SoakReference) -> AsyncIterator[Asker]:
    async with bus_gateway(stack.addresses) as gateway:
        yield Asker(gateway, reference)


def start_with_ssd(stack: LooseStack) -> None:
    stack.launch("decode-0")
    start_prefill_with_ssd(stack)
    stack.wait_ready("decode-0")


def start_prefill_with_ssd(stack: LooseStack) -> None:
    flags = ("--pool-bytes", str(POOL_BYTES), "--ssd-bytes", str(SSD_BYTES))
    stack.start("prefill-0", flags=(*flags, "--ssd-folder", str(stack.ssd_folder)))


async def sunk_prefix(stack: LooseStack, asker: Asker) -> None:
    """Prefix 0 lies on the SSD of prefill-0 alone: others took its place in memory."""
    for number in range(FILLING_PREFIXES):
        await asker.ask(f"prefix {number}", "prefill-0")
    await eventually(lambda: ssd_tier(stack)["lying"] >= PREFIX_BLOCKS, MOVED_S_MAX)


def ssd_tier(stack: LooseStack) -> dict[str, Any]:
    return next(tier for tier in pool(stack.url("prefill-0"))["tiers"] if tier["tier"] == "ssd")


def told(stack: LooseStack, name: str, text: str) -> bool:
    """Whether its log warns of it."""
    return any(
        line.get("level") in ("warning", "error") and text in str(line.get("message"))
        for line in stack.log_lines(name)
    )


async def at_rest(stack: LooseStack, *names: str) -> None:
    """Nothing is in use any more, and every pool is in order."""
    for name in names:
        await eventually(
            lambda name=name: metrics(stack.url(name)).value("moonpool_blocks", state="in_use") == 0,
            MOVED_S_MAX,
        )
        await asyncio.to_thread(pool, stack.url(name), check=True)
