"""What a soaked stack says about itself: sizes while it runs, order when it has come to rest.

Sizes are looked at again and again by a thread; the rest once, at the end: no block in use, every pool in
order, and a directory that knows exactly what the instances hold, chain by chain and tier by tier.
"""

import asyncio
import threading
from collections.abc import Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.support.scrape import Metrics, metrics, pool
from tests.support.stack import RunningStack, Status

from cluster import keys, subjects
from cluster.bus import Bus
from cluster.messages import InstanceRecord, MatchReply, MatchRequest
from cluster.wire import decode_record
from kvhash import BlockHash, block_hashes, namespace, unpack
from kvindex.core import HeldRun, InstanceId, InstanceMatch, Tier, TierRun
from kvmeta.fetch import fetch_inventory
from moonpool.cluster_client import bus, control_plane

LOOK_S = 1.0
ASK_S_MAX = 20.0
SETTLE_S_MAX = 20.0
"""Copies that are under way, and events on their way to the directory."""
SETTLE_POLL_S = 0.5
EXTENTS_BYTES_MAX = 16 << 10
"""Of one file, which the file system counts as the file's."""
DISK_BLOCK_BYTES = 512
"""Unit of `st_blocks`, whatever the file system's is."""

Held = dict[BlockHash, Tier]
"""What one instance holds, by where it lies."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What was configured, for each worker."""

    pool_bytes: int
    ssd_bytes: int


@dataclass
class Sizes:
    """The largest seen of each worker."""

    dram_bytes: dict[str, int] = field(default_factory=dict)
    ssd_bytes: dict[str, int] = field(default_factory=dict)
    looks: int = 0


class SizeWatch:
    """Looks every LOOK_S at what the workers' pools and files take. `trouble` names what was too large."""

    def __init__(self, stack: RunningStack, limits: Limits) -> None:
        self.sizes = Sizes()
        self.trouble: list[str] = []
        self._limits = limits
        self._workers = worker_urls(stack)
        self._ssd_folder = stack.folder / "ssd"
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="size watch")
        self._thread.start()

    def close(self) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stop.wait(LOOK_S):
            try:
                for name, url in self._workers.items():
                    self._look(name, url)
                self.sizes.looks += 1
            except Exception as error:
                self.trouble.append(repr(error))

    def _look(self, name: str, url: str) -> None:
        told = pool(url)
        for tier in told["tiers"]:
            if tier["copies"] + tier["moving"] > tier["blocks"]:
                self.trouble.append(f"{name}: {tier}")
        # On a CPU what is computed on lies in DRAM, and nothing else does.
        dram_bytes = told["blocks"] * told["block_bytes"]
        ssd_bytes = folder_bytes(self._ssd_folder / name)
        for what, found, limit in (
            ("dram", dram_bytes, self._limits.pool_bytes),
            ("ssd", ssd_bytes, self._limits.ssd_bytes),
        ):
            if found > limit:
                self.trouble.append(f"{name}: {what} takes {found} bytes, at most {limit}")
        self.sizes.dram_bytes[name] = max(dram_bytes, self.sizes.dram_bytes.get(name, 0))
        self.sizes.ssd_bytes[name] = max(ssd_bytes, self.sizes.ssd_bytes.get(name, 0))


@contextmanager
def sizes_watched(stack: RunningStack, limits: Limits):
    watch = SizeWatch(stack, limits)
    with closing(watch):
        yield watch


def worker_urls(stack: RunningStack) -> dict[str, str]:
    rows = [row for row in stack.status()["instances"] if {"prefill", "decode"} & {*row["roles"]}]
    return {row["instance"]: row["http_url"] for row in rows}


def folder_bytes(folder: Path) -> int:
    """What its files take, by their length and on the disk, whichever is more. What a file system needs to
    say where a file lies is part of the latter and nobody's to configure."""
    stats = [path.stat() for path in folder.rglob("*") if path.is_file()]
    on_disk = sum(s.st_blocks * DISK_BLOCK_BYTES - EXTENTS_BYTES_MAX for s in stats)
    return max(sum(s.st_size for s in stats), on_disk)


def at_rest(status: Status) -> bool:
    totals = status["totals"]
    return not (totals["blocks_in_use"] or totals["queued"] or totals["running"] or totals["requests"])


def check_pools(stack: RunningStack) -> None:
    """AssertionError where a block is in use or lost, or a pool contradicts itself. The stack is at rest."""
    for row in stack.status()["instances"]:
        assert row["blocks_free"] + row["blocks_cached"] == row["blocks"], row
    for url in worker_urls(stack).values():
        pool(url, check=True)


def all_metrics(stack: RunningStack) -> dict[str, Metrics]:
    return {row["instance"]: metrics(row["http_url"]) for row in stack.status()["instances"]}


def logged_errors(stack: RunningStack) -> list[str]:
    """Lines of the services' logs that tell of an error: a soak has none."""
    return [
        f"{path.name}: {line}"
        for path in sorted((stack.folder / "logs").glob("*.log"))
        for line in path.read_text(errors="replace").splitlines()
        if '"level":"error"' in line
    ]


async def directory_differences(stack: RunningStack, chains: Sequence[Sequence[int]]) -> list[str]:
    """Where kvmeta's answer for these token ids is not what the instances' inventories say, once it had its
    time to hear of everything."""
    found = ["nothing was compared"]
    async with (
        bus(stack.state.nats_url, timeout_s=ASK_S_MAX) as connection,
        control_plane(stack.state.etcd_url, timeout_s=ASK_S_MAX) as control,
    ):
        entries = await control.get_prefix(keys.INSTANCES)
        records = [decode_record(value, InstanceRecord) for value in entries.values()]
        seed = await control.get(keys.SEED)
        assert seed is not None
        fingerprint = next(record.model.fingerprint for record in records if record.model is not None)
        space = namespace(seed, fingerprint)
        hashed = [block_hashes(space, list(chain)) for chain in chains]
        waited_s = 0.0
        while found and waited_s < SETTLE_S_MAX:
            await asyncio.sleep(SETTLE_POLL_S)
            waited_s += SETTLE_POLL_S
            found = await _differences(stack, connection, records, hashed)
    return found


async def _differences(
    stack: RunningStack, connection: Bus, records: list[InstanceRecord], hashed: list[bytes]
) -> list[str]:
    held: dict[InstanceId, Held] = {}
    for record in records:
        if record.blocks:
            held[record.instance] = await _inventory(connection, record)
    indexed = sum(row["blocks_indexed"] for row in stack.status()["instances"])
    total = sum(map(len, held.values()))
    found = [] if indexed == total else [f"{indexed} blocks in the directory, {total} in the inventories"]
    for chain in hashed:
        reply = await connection.request(subjects.KVMETA_MATCH, MatchRequest(chain), timeout_s=ASK_S_MAX)
        assert isinstance(reply, MatchReply), reply
        told = {match.instance: match for match in reply.matches}
        expected = {name: match for name in held if (match := _match(name, held[name], unpack(chain)))}
        if told != expected:
            found.append(f"told {told}, held {expected}")
    return found


async def _inventory(connection: Bus, record: InstanceRecord) -> Held:
    held: Held = {}

    def take(run: HeldRun) -> None:
        held.update(dict.fromkeys(unpack(run.block_hashes), run.tier))

    await fetch_inventory(connection, record.instance, record.incarnation, take, chunk_timeout_s=ASK_S_MAX)
    return held


def _match(instance: InstanceId, held: Held, chain: list[BlockHash]) -> InstanceMatch | None:
    runs: list[TierRun] = []
    for block_hash in chain:
        tier = held.get(block_hash)
        if tier is None:
            break
        if runs and runs[-1].tier is tier:
            runs[-1] = TierRun(tier, runs[-1].blocks + 1)
        else:
            runs.append(TierRun(tier, 1))
    blocks = sum(run.blocks for run in runs)
    return InstanceMatch(instance, blocks, tuple(runs)) if blocks else None


def tier_totals(pools: Sequence[dict[str, Any]], name: str) -> dict[str, int]:
    """Sums over workers of one number, by tier."""
    found: dict[str, int] = {}
    for one in pools:
        for tier in one["tiers"]:
            found[tier["tier"]] = found.get(tier["tier"], 0) + tier.get(name, 0)
    return found
