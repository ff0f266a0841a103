"""One node's share of the pool: the arena, which blocks are free, cached or in use, and its event stream.

Owns pins, generations and eviction on this node. Knows neither the model nor the network: the bytes in
the arena are the engine's and the transfer's, events are taken and published by the worker.
"""

from kvpool.arena import Arena, ArenaError
from kvpool.block_store import BlockStore, CorruptBlock, StoreError
from kvpool.dram_store import DramStore
from kvpool.mover import TierMover
from kvpool.mover_limits import MoverCounters, MoverLimits, TierCounters
from kvpool.pool import BlockPool, NoBlocksError
from kvpool.ssd_layout import SsdLayoutError
from kvpool.ssd_speed import ReadSpeed, measure_read
from kvpool.ssd_store import Opened, Opening, SsdStore
from kvpool.swap_slots import SwapSlots
from kvpool.tiers import Copy, PoolStats, Rise, Sink, TierStats

__all__ = [
    "Arena",
    "ArenaError",
    "BlockPool",
    "BlockStore",
    "Copy",
    "CorruptBlock",
    "DramStore",
    "MoverCounters",
    "MoverLimits",
    "NoBlocksError",
    "Opened",
    "Opening",
    "PoolStats",
    "ReadSpeed",
    "Rise",
    "Sink",
    "SsdLayoutError",
    "SsdStore",
    "StoreError",
    "SwapSlots",
    "TierCounters",
    "TierMover",
    "TierStats",
    "measure_read",
]
