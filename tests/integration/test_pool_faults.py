"""What breaks under the pool costs a recompute, and never an answer: it is logged, counted, and goes on."""

import resource
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from tests.support.eventually import eventually
from tests.support.loose_stack import LooseStack, loose_stack
from tests.support.scrape import metrics
from tests.support.soak_reference import SoakReference
from tests.support.ssd_stack import (
    BLOCK_TOKENS,
    FILLING_PREFIXES,
    MOVED_S_MAX,
    PREFIX_BLOCKS,
    asking,
    at_rest,
    ssd_tier,
    start_prefill_with_ssd,
    start_with_ssd,
    sunk_prefix,
    told,
)

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]

PREFIXES = 4
SMALL_DISK_BYTES = 24 << 20
STARTS_MAX = 3
"""What an instance measures at its start while the machine is busy may say that computing is quicker."""


@pytest.fixture
def stack(tmp_path: Path, small_folder: Path) -> Iterator[LooseStack]:
    with loose_stack(tmp_path, small_folder) as made:
        yield made


@pytest.mark.parametrize("frozen", [True, False], ids=["while they wait for it", "while they read"])
async def test_an_instance_is_killed_that_others_read_from(
    stack: LooseStack, small_reference: SoakReference, frozen: bool
) -> None:
    stack.start("prefill-0", "prefill-1", "decode-0")
    async with asking(stack, small_reference) as asker:
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


async def test_bytes_of_the_ssd_are_corrupt(stack: LooseStack, small_reference: SoakReference) -> None:
    start_with_ssd(stack)
    async with asking(stack, small_reference) as asker:
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


async def test_the_disk_takes_no_more_while_it_runs(
    stack: LooseStack, small_reference: SoakReference
) -> None:
    """A limit on file sizes fails every write beyond it, as a full disk does whose files are sparse."""
    start_with_ssd(stack)
    async with asking(stack, small_reference) as asker:
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
    stack: LooseStack, small_reference: SoakReference
) -> None:
    with small_disk(stack.ssd_folder):
        start_with_ssd(stack)
        assert told(stack, "prefill-0", "no room for all of ssd_bytes")
        blocks = ssd_tier(stack)["blocks"]
        async with asking(stack, small_reference) as asker:
            assert 0 < blocks * asker.gateway.block_bytes <= SMALL_DISK_BYTES
            await sunk_prefix(stack, asker)
            await asker.ask("prefix 0", "prefill-0")
            assert ssd_tier(stack)["risen_total"] > 0
            await at_rest(stack, "prefill-0", "decode-0")
        assert stack.stop("prefill-0") == 0


async def test_blocks_on_the_ssd_are_found_again_after_a_kill(
    stack: LooseStack, small_reference: SoakReference
) -> None:
    start_with_ssd(stack)
    async with asking(stack, small_reference) as asker:
        await sunk_prefix(stack, asker)
        for _ in range(STARTS_MAX):
            stack.kill("prefill-0")
            start_prefill_with_ssd(stack)
            await asker.ask("prefix 0", "prefill-0")
            after = metrics(stack.url("prefill-0"))
            if after.value("moonpool_fetched_blocks_total", source="local_ssd") > 0:
                break
        else:
            pytest.fail(f"nothing was read from the SSD after {STARTS_MAX} starts")
        assert after.value("moonpool_cached_tokens_total") > 0
        await at_rest(stack, "prefill-0", "decode-0")


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


def failures(stack: LooseStack, what: str) -> float:
    """Blocks that its SSD failed to keep."""
    return metrics(stack.url("prefill-0")).value("moonpool_tier_failures_total", tier="ssd", what=what)


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
