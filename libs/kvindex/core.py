"""Words of the index: who an instance is and where a block lies."""

from dataclasses import dataclass
from enum import StrEnum
from typing import NewType

InstanceId = NewType("InstanceId", str)
"""Name of one running process in the cluster, unique among those alive."""


class Tier(StrEnum):
    """Where a block's bytes lie on an instance, fastest first."""

    DEVICE = "device"
    DRAM = "dram"
    SSD = "ssd"


@dataclass(frozen=True, slots=True)
class TierRun:
    """`blocks` consecutive blocks of a matched prefix in one tier."""

    tier: Tier
    blocks: int


@dataclass(frozen=True, slots=True)
class InstanceMatch:
    """How many blocks of a prompt, from its start, an instance holds, and where."""

    instance: InstanceId
    prefix_blocks: int
    runs: tuple[TierRun, ...] = ()


class BlockAction(StrEnum):
    STORED = "stored"
    MOVED = "moved"
    REMOVED = "removed"


@dataclass(frozen=True, slots=True)
class BlockEvent:
    """One change of an instance's inventory.

    `stored`: `block_hashes` is a chain, parents first; `parent` is the hash before it (empty for the
    first block of a prompt). `moved`: the blocks are in `tier` now. `removed`: children first.
    """

    action: BlockAction
    block_hashes: bytes
    tier: Tier
    parent: bytes = b""


@dataclass(frozen=True, slots=True)
class HeldRun:
    """Blocks of an inventory in one tier, packed: block i of `block_hashes` has the parent at place i of
    `parents`, all zero where it is the first block of a prompt."""

    tier: Tier
    block_hashes: bytes
    parents: bytes
