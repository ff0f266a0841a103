"""A prefix that is asked for often is copied to where it was not, by one kvmeta, then by its successor."""

import asyncio
import random
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support.bus_gateway import BusGateway, bus_gateway
from tests.support.eventually import eventually
from tests.support.loose_stack import LooseStack, loose_stack
from tests.support.scrape import metrics

from cluster import subjects
from cluster.bus import Received
from cluster.messages import BlockEvents, MatchReply, MatchRequest
from engine.tiny import make_tiny_model
from kvhash import HASH_BYTES
from kvindex.core import BlockAction, InstanceId

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]

BLOCK_TOKENS = 16
PREFIX_TOKENS = 600
PREFIX_BLOCKS = PREFIX_TOKENS // BLOCK_TOKENS
ANSWER_TOKENS = 4
REQUESTS_MIN = 6
LEASE_S = 2.0
COPIED_S_MAX = 20.0
ASK_INTERVAL_S = 0.1
KVMETAS = ("kvmeta-0", "kvmeta-1")
FLAGS = ("--heat-interval-s", "0.2", "--replication-requests-min", str(REQUESTS_MIN))


@pytest.fixture
def stack(tmp_path: Path) -> Iterator[LooseStack]:
    folder = tmp_path / "tiny"
    make_tiny_model(folder)
    with loose_stack(tmp_path, folder, lease_ttl_s=LEASE_S) as made:
        made.start(*KVMETAS, flags=FLAGS)
        made.start("prefill-0", "prefill-1", "decode-0")
        yield made


class Asker:
    """Requests at named instances, and conductors' questions to kvmeta."""

    def __init__(self, gateway: BusGateway) -> None:
        self._gateway = gateway
        self._stored: dict[str, bytearray] = {}

    async def listen(self, *names: str) -> None:
        """Learn the hashes of what these store from now on."""
        for name in names:
            await self._gateway.ear.bus.subscribe(
                subjects.kv_events(InstanceId(name)), self._hear, concurrency_max=1
            )

    async def store(self, name: str, at: str) -> bytes:
        """Have the prefix of that name computed `at` an instance; its chain."""
        stored = self._stored[at] = bytearray()
        await self.request(name, at)
        await eventually(lambda: len(stored) >= PREFIX_BLOCKS * HASH_BYTES)
        return bytes(stored[: PREFIX_BLOCKS * HASH_BYTES])

    async def request(self, prefix: str, at: str) -> int:
        """One with this prefix; how many tokens of it were cached."""
        name = f"{prefix}-{at}"
        prompt = [*drawn(prefix, PREFIX_TOKENS), *drawn(name, 10)]
        await self._gateway.submit(name, prompt, ANSWER_TOKENS, at=(at, "decode-0"))
        assert len(await self._gateway.answer(name)) == ANSWER_TOKENS
        return self._gateway.ear.cached_tokens[name]

    async def holders(self, chain: bytes) -> dict[str, int]:
        """What a kvmeta answers; this counts as a request."""
        reply = await self._gateway.ear.bus.request(
            subjects.KVMETA_MATCH, MatchRequest(chain), timeout_s=COPIED_S_MAX
        )
        assert isinstance(reply, MatchReply)
        return {match.instance: match.prefix_blocks for match in reply.matches}

    async def ask_until_held(self, chain: bytes, by: str) -> None:
        """Ask for the prefix, as many requests would, until that instance has all of it."""
        async with asyncio.timeout(COPIED_S_MAX):
            while (await self.holders(chain)).get(by) != PREFIX_BLOCKS:  # noqa: ASYNC110  # each round asks
                await asyncio.sleep(ASK_INTERVAL_S)

    async def _hear(self, received: Received) -> None:
        assert isinstance(received.body, BlockEvents)
        for event in received.body.events:
            if event.action is BlockAction.STORED:
                self._stored[received.envelope.sender] += event.block_hashes


def drawn(seed: str, tokens: int) -> list[int]:
    numbers = random.Random(seed)
    return [numbers.randrange(10, 250) for _ in range(tokens)]


def counted(stack: LooseStack, kvmeta: str, name: str, **labels: str) -> float:
    return metrics(stack.url(kvmeta)).value(f"moonpool_kvmeta_{name}", **labels)


async def test_hot_prefixes_are_copied_once_and_on_after_the_holder_died(stack: LooseStack) -> None:
    async with bus_gateway(stack.addresses) as gateway:
        asker = Asker(gateway)
        await asker.listen("prefill-0")
        await eventually(lambda: sum(counted(stack, name, "replication_duty") for name in KVMETAS) == 1, 10)
        first, second = sorted(KVMETAS, key=lambda name: -counted(stack, name, "replication_duty"))

        chain = await asker.store("first", "prefill-0")
        await asker.ask_until_held(chain, "decode-0")
        assert "prefill-1" not in await asker.holders(chain)
        await asker.ask_until_held(chain, "prefill-1")
        await eventually(lambda: counted(stack, first, "replications_total", outcome="done") == 1)
        assert counted(stack, first, "replicated_bytes_total") == PREFIX_BLOCKS * gateway.block_bytes
        assert counted(stack, second, "replication_rounds_total") == 0
        assert await asker.request("first", "prefill-1") == PREFIX_BLOCKS * BLOCK_TOKENS

        stack.kill(first)
        chain = await asker.store("second", "prefill-0")
        await asker.ask_until_held(chain, "prefill-1")
        await eventually(lambda: counted(stack, second, "replications_total", outcome="done") == 1)
        assert counted(stack, second, "replications_total") == 1
