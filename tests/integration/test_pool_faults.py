"""What breaks under the pool costs a recompute, and never an answer: it is logged, counted, and goes on."""

import asyncio
import random
import resource
import subprocess
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import pytest
from tests.support.bus_gateway import BusGateway, bus_gateway
from tests.support.eventually import eventually
from tests.support.loose_stack import LooseStack, loose_stack
from tests.support.scrape import metrics, pool
from tests.support.soak_reference import SoakReference

from engine.tiny import make_tiny_model
from policy.core import SamplingParams

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]

BLOCK_TOKENS = 16
PREFIX_TOKENS = 600
PREFIX_BLOCKS = PREFIX_TOKENS // BLOCK_TOKENS
PREFIXES = 4
ANSWER_TOKENS = 12
POOL_BYTES = 16 << 20
"""Of a worker with an SSD: some 170 blocks, not room for five prefixes."""
FILLING_PREFIXES = 7
"""More than it has room for in memory: the first of them lies on the SSD alone then."""
SSD_BYTES = 64 << 20
SMALL_DISK_BYTES = 24 << 20
MOVED_S_MAX = 20.0


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """So much larger than `tiny` that to move a block is quicker than to compute it, as with real ones."""
    folder = tmp_path_factory.mktemp("models") / "small"
    make_tiny_model(folder, hidden_size=256, intermediate_size=512, layers=6)
    return folder


@pytest.fixture(scope="module")
def reference(model_folder: Path) -> SoakReference:
    return SoakReference(model_folder)


@pytest.fixture
def stack(tmp_path: Path, model_folder: Path) -> Iterator[LooseStack]:
    with loose_stack(tmp_path, model_folder) as made:
        yield made


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


@pytest.mark.parametrize("frozen", [True, False], ids=["while they wait for it", "while they read"])
async def test_an_instance_is_killed_that_others_read_from(
    stack: LooseStack, reference: SoakReference, frozen: bool
) -> None:
    stack.start("prefill-0", "prefill-1", "decode-0")
    async with asking(stack, reference) as asker:
        for number in range(PREFIXES):
            await asker.ask(f"prefix {number}", "prefill-0")
        if frozen:
            stack.pause("prefill-0")
        reading = [
            await asker.submit(
                f"prefix {number}", "prefill-1", source="prefill-0", prefix_blocks=PREFIX_BLOCKS
            )
            for number in range(PREFIXES)
        ]
        stack.kill("prefill-0")
        for request in reading:
            await asker.check(*request)
        # Also whoever asks later, while the record of the killed one is still there.
        late = await asker.submit("prefix 0", "prefill-1", source="prefill-0", prefix_blocks=PREFIX_BLOCKS)
        await asker.check(*late)
        assert asker.gateway.ear.failed == []
        if frozen:
            assert metrics(stack.url("prefill-1")).value("moonpool_fetch_failures_total") > 0
            assert told(stack, "prefill-1", "prefix not brought in")
        await at_rest(stack, "prefill-1", "decode-0")


async def test_bytes_of_the_ssd_are_corrupt(stack: LooseStack, reference: SoakReference) -> None:
    start_with_ssd(stack)
    async with asking(stack, reference) as asker:
        await sunk_prefix(stack, asker)
        corrupt(stack.ssd_folder / "prefill-0")
        assert failures(stack, "corrupt") == 0
        await asker.ask("prefix 0", "prefill-0")
        assert failures(stack, "corrupt") > 0
        assert ssd_tier(stack)["lost_total"] > 0
        assert told(stack, "prefill-0", "tier trouble")
        # What was computed again is whole, and comes from the pool the next time.
        cached = metrics(stack.url("prefill-0")).value("moonpool_cached_tokens_total")
        await asker.ask("prefix 0", "prefill-0")
        grown = metrics(stack.url("prefill-0")).value("moonpool_cached_tokens_total") - cached
        assert grown >= PREFIX_BLOCKS * BLOCK_TOKENS
        await at_rest(stack, "prefill-0", "decode-0")


async def test_the_disk_takes_no_more_while_it_runs(stack: LooseStack, reference: SoakReference) -> None:
    """A limit on file sizes fails every write beyond it, as a full disk does whose files are sparse."""
    start_with_ssd(stack)
    async with asking(stack, reference) as asker:
        limit(stack, "prefill-0", 1 << 20)
        for number in range(FILLING_PREFIXES):
            await asker.ask(f"prefix {number}", "prefill-0")
        await asker.ask("prefix 0", "prefill-0")
        assert failures(stack, "write") > 0
        assert told(stack, "prefill-0", "tier trouble")
        await at_rest(stack, "prefill-0", "decode-0")
        limit(stack, "prefill-0", resource.RLIM_INFINITY)
        sunk = ssd_tier(stack)["sunk_total"]
        for number in range(FILLING_PREFIXES):
            await asker.ask(f"later {number}", "prefill-0")
        await eventually(lambda: ssd_tier(stack)["sunk_total"] >= sunk + PREFIX_BLOCKS, MOVED_S_MAX)
        await at_rest(stack, "prefill-0", "decode-0")


async def test_the_disk_has_less_room_than_was_configured(
    stack: LooseStack, reference: SoakReference
) -> None:
    with small_disk(stack.ssd_folder):
        start_with_ssd(stack)
        assert told(stack, "prefill-0", "no room for all of ssd_bytes")
        blocks = ssd_tier(stack)["blocks"]
        async with asking(stack, reference) as asker:
            assert 0 < blocks * asker.gateway.block_bytes <= SMALL_DISK_BYTES
            await sunk_prefix(stack, asker)
            await asker.ask("prefix 0", "prefill-0")
            assert ssd_tier(stack)["risen_total"] > 0
            await at_rest(stack, "prefill-0", "decode-0")
        assert stack.stop("prefill-0") == 0


async def test_blocks_on_the_ssd_are_found_again_after_a_kill(
    stack: LooseStack, reference: SoakReference
) -> None:
    start_with_ssd(stack)
    async with asking(stack, reference) as asker:
        await sunk_prefix(stack, asker)
        stack.kill("prefill-0")
        start_prefill_with_ssd(stack)
        await asker.ask("prefix 0", "prefill-0")
        after = metrics(stack.url("prefill-0"))
        assert after.value("moonpool_fetched_blocks_total", source="local_ssd") > 0
        assert after.value("moonpool_cached_tokens_total") > 0
        await at_rest(stack, "prefill-0", "decode-0")


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


def ssd_tier(stack: LooseStack) -> dict[str, int]:
    return next(tier for tier in pool(stack.url("prefill-0"))["tiers"] if tier["tier"] == "ssd")


def failures(stack: LooseStack, what: str) -> float:
    """Blocks that its SSD failed to keep."""
    return metrics(stack.url("prefill-0")).value("moonpool_tier_failures_total", tier="ssd", what=what)


@contextmanager
def small_disk(folder: Path) -> Iterator[None]:
    """A file system of its own, in memory, at this folder."""
    folder.mkdir()
    mount = ("mount", "-t", "tmpfs", "-o", f"size={SMALL_DISK_BYTES}", "tmpfs", str(folder))
    mounted = subprocess.run(mount, capture_output=True, text=True, check=False)
    if mounted.returncode:
        pytest.skip(f"no file system can be mounted here: {mounted.stderr.strip()}")
    try:
        yield
    finally:
        subprocess.run(("umount", "--lazy", str(folder)), check=True)


def corrupt(folder: Path) -> None:
    """Change one byte in every page of its data."""
    for path in folder.rglob("segment-*.data"):
        with path.open("r+b") as file:
            data = bytearray(file.read())
            data[100::4096] = bytes(byte ^ 1 for byte in data[100::4096])
            file.seek(0)
            file.write(data)


def limit(stack: LooseStack, name: str, file_bytes: int) -> None:
    _, hard = resource.prlimit(stack.pid(name), resource.RLIMIT_FSIZE)
    resource.prlimit(stack.pid(name), resource.RLIMIT_FSIZE, (file_bytes, hard))


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
