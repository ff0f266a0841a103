"""The tiers of an instance's pool, made from its settings: sizes, stores and the mover between them.

Owns which tiers there are, how large each is, and their start and end. What moves when is kvpool's.
"""

import struct
from dataclasses import dataclass

import xxhash

from cluster.errors import ConfigError
from engine.layout import KVLayout
from kvhash import namespace
from kvindex.core import Tier
from worker.config import WorkerConfig


@dataclass(frozen=True, slots=True)
class TierSizes:
    """How many blocks each tier has. The arena holds the compute tier's, then those that only DRAM has."""

    compute_tier: Tier
    compute_blocks: int
    dram_blocks: int
    """Arena blocks behind those of the compute tier."""
    ssd_bytes: int

    @property
    def arena_blocks(self) -> int:
        return self.compute_blocks + self.dram_blocks


def tier_sizes(config: WorkerConfig, block_bytes: int, own_cache: bool) -> TierSizes:
    """What the settings come to in whole blocks. Raises ConfigError, naming setting and limit."""
    _check_ssd(config, block_bytes)
    arena_blocks = max(1, config.pool_bytes // block_bytes)
    if not own_cache:
        if config.device_bytes:
            raise ConfigError("device_bytes must be 0: this engine computes on the DRAM arena itself")
        return TierSizes(Tier.DRAM, arena_blocks, 0, config.ssd_bytes)
    if not config.device_bytes:
        return TierSizes(Tier.DEVICE, arena_blocks, 0, config.ssd_bytes)
    compute_blocks = config.device_bytes // block_bytes
    if compute_blocks < 1:
        raise ConfigError(f"device_bytes is {config.device_bytes}, must be at least a block, {block_bytes}")
    if compute_blocks > arena_blocks:
        raise ConfigError(
            f"device_bytes is {config.device_bytes}, must be at most pool_bytes, {config.pool_bytes}: "
            "what lies on the device has its mirror in DRAM"
        )
    return TierSizes(Tier.DEVICE, compute_blocks, arena_blocks - compute_blocks, config.ssd_bytes)


def _check_ssd(config: WorkerConfig, block_bytes: int) -> None:
    if not config.ssd_bytes:
        if config.ssd_folder:
            raise ConfigError("ssd_folder is set but ssd_bytes is 0: set both or neither")
        return
    if config.ssd_bytes < block_bytes:
        raise ConfigError(f"ssd_bytes is {config.ssd_bytes}, must be at least a block, {block_bytes}, or 0")
    if not config.ssd_folder:
        raise ConfigError("ssd_folder is not set, must be a folder where ssd_bytes is above 0")
    if not config.instance:
        raise ConfigError("instance is not set, must be where ssd_bytes is above 0: its files have its name")


def ssd_identity(cluster_seed: bytes, fingerprint: str, layout: KVLayout) -> bytes:
    """What must be equal before blocks on an SSD are the same blocks: 16 bytes."""
    shape = struct.pack("<4I", layout.layers, layout.kv_heads, layout.block_tokens, layout.head_dim)
    space = namespace(cluster_seed, fingerprint)
    return xxhash.xxh3_128_digest(space + shape + layout.dtype_name.encode())
