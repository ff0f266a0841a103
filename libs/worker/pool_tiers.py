"""The tiers of an instance's pool, made from its settings: sizes, stores and the mover between them.

Owns which tiers there are, how large each is, and their start and end. What moves when is kvpool's.
"""

import asyncio
import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import xxhash

from cluster.errors import ConfigError
from cluster.logs import Logger
from engine.cost_profile import PROFILE_BLOCKS_MIN
from engine.layout import KVLayout
from kvhash import namespace
from kvindex.core import Tier
from kvpool import (
    Arena,
    BlockPool,
    BlockStore,
    DramStore,
    Opened,
    Opening,
    SsdLayoutError,
    SsdStore,
    StoreError,
)
from kvpool.ssd_speed import ReadSpeed, measure_read
from worker.config import WorkerConfig


@dataclass(frozen=True, slots=True)
class TierSizes:
    """How many blocks each tier has. The arena holds the compute tier's, then those that only DRAM has."""

    compute_tier: Tier
    compute_blocks: int
    dram_blocks: int
    """Arena blocks behind those of the compute tier."""

    @property
    def arena_blocks(self) -> int:
        return self.compute_blocks + self.dram_blocks


def tier_sizes(config: WorkerConfig, block_bytes: int, own_cache: bool) -> TierSizes:
    """What the settings come to in whole blocks. Raises ConfigError, naming setting and limit."""
    arena_blocks = config.pool_bytes // block_bytes
    least = f"must be at least {PROFILE_BLOCKS_MIN} blocks, {PROFILE_BLOCKS_MIN * block_bytes}"
    if arena_blocks < PROFILE_BLOCKS_MIN:
        raise ConfigError(f"pool_bytes is {config.pool_bytes}, {least}")
    if not own_cache:
        if config.device_bytes:
            raise ConfigError("device_bytes must be 0: this engine computes on the DRAM arena itself")
        return TierSizes(Tier.DRAM, arena_blocks, 0)
    if not config.device_bytes:
        return TierSizes(Tier.DEVICE, arena_blocks, 0)
    compute_blocks = config.device_bytes // block_bytes
    if compute_blocks < PROFILE_BLOCKS_MIN:
        raise ConfigError(f"device_bytes is {config.device_bytes}, {least}")
    if compute_blocks > arena_blocks:
        raise ConfigError(
            f"device_bytes is {config.device_bytes}, must be at most pool_bytes, {config.pool_bytes}: "
            "what lies on the device has its mirror in DRAM"
        )
    return TierSizes(Tier.DEVICE, compute_blocks, arena_blocks - compute_blocks)


def ssd_identity(cluster_seed: bytes, fingerprint: str, layout: KVLayout) -> bytes:
    """What must be equal before blocks on an SSD are the same blocks: 16 bytes."""
    shape = struct.pack("<4I", layout.layers, layout.kv_heads, layout.block_tokens, layout.head_dim)
    space = namespace(cluster_seed, fingerprint)
    return xxhash.xxh3_128_digest(space + shape + layout.dtype_name.encode())


def open_tiers(
    config: WorkerConfig, sizes: TierSizes, arena: Arena, identity: bytes, log: Logger
) -> tuple[BlockPool, dict[Tier, BlockStore]]:
    """The pool of all tiers, holding nothing yet, and what keeps the bytes of the lower ones, fastest first.

    Blocks while the files are allocated: for a thread. Raises ConfigError.
    """
    stores: dict[Tier, BlockStore] = {}
    if sizes.dram_blocks:
        stores[Tier.DRAM] = DramStore(arena, sizes.compute_blocks, sizes.dram_blocks)
    ssd = _open_ssd(config, arena.block_bytes, identity, log)
    if ssd is not None:
        stores[Tier.SSD] = ssd
    pool = BlockPool(
        sizes.compute_blocks,
        eviction=config.eviction,
        tier=sizes.compute_tier,
        lower=[(tier, store.slots) for tier, store in stores.items()],
        sink_ahead_blocks=math.ceil(config.sink_ahead_share * sizes.compute_blocks),
    )
    return pool, stores


async def restore(pool: BlockPool, stores: Mapping[Tier, BlockStore], log: Logger) -> ReadSpeed | None:
    """Take in what the stores kept from an earlier life of this instance; what cannot be read is lost. To be
    called once, before anything moves. Returns how fast the SSD is read, where there is one."""
    speed = None
    for tier, store in stores.items():
        try:
            copies = await asyncio.to_thread(store.recover)
            if isinstance(store, SsdStore):
                speed = await asyncio.to_thread(measure_read, store, copies)
        except StoreError as error:
            log.warning("nothing found again", tier=tier, error=error)
            continue
        if copies:
            log.info("blocks found again", tier=tier, found=len(copies), taken=pool.restore(tier, copies))
    return speed


def _open_ssd(config: WorkerConfig, block_bytes: int, identity: bytes, log: Logger) -> SsdStore | None:
    if not config.ssd_bytes:
        if config.ssd_folder:
            raise ConfigError("ssd_folder is set, so ssd_bytes must be as well")
        return None
    if not config.ssd_folder:
        raise ConfigError("ssd_folder is not set, must be a folder where ssd_bytes is above 0")
    if not config.instance:
        raise ConfigError("instance is not set, must be where ssd_bytes is above 0: its files have its name")
    folder = Path(config.ssd_folder).expanduser() / config.instance
    try:
        folder.mkdir(parents=True, exist_ok=True)
        store = SsdStore.open(folder, config.ssd_bytes, block_bytes, identity)
    except SsdLayoutError as error:
        raise ConfigError(f"ssd_bytes: {error}") from error
    except (StoreError, OSError) as error:
        raise ConfigError(f"ssd_folder: {error}") from error
    _tell_opening(folder, store.opening, log)
    return store


def _tell_opening(folder: Path, opening: Opening, log: Logger) -> None:
    log.info("ssd store", folder=str(folder), files=opening.folder, blocks=opening.slots)
    if opening.folder is Opened.REPLACED:
        log.warning("the ssd store held blocks of another cluster, model or layout, which are gone")
    if opening.slots < opening.slots_asked:
        log.warning("the disk has no room for all of ssd_bytes", blocks_asked=opening.slots_asked)
    for damaged in opening.damaged:
        log.warning("a file of the ssd store was damaged, what it held is lost", file=damaged)
