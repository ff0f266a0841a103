"""How fast an SsdStore is read, measured at the start on a few blocks that are not in memory."""

import os
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median

import xxhash

from kvhash import BlockHash
from kvpool.block_store import CorruptBlock
from kvpool.mover_limits import READ_THREADS
from kvpool.ssd_store import SsdStore
from kvpool.tiers import Copy

SAMPLE_BLOCKS_MAX = 32
SAMPLE_BYTES_MAX = 64 << 20
"""Together; one block at least."""
SINGLE_READS_MAX = 5
ROUNDS = 3
"""Of reading all: the median counts, other processes use the disk too."""

_TAG = b"moonpool.ssd_speed.v1"


@dataclass(frozen=True, slots=True)
class ReadSpeed:
    """To read `n` bytes takes about fixed_s + n / bytes_per_s."""

    fixed_s: float
    bytes_per_s: float


def measure_read(store: SsdStore, found: Sequence[Copy], threads: int = READ_THREADS) -> ReadSpeed:
    """What it takes to bring blocks up, with so many threads at once.

    `found` is what `recover` gave. Where it is too little, other slots are written to and erased again: for
    the time before anything is sunk. Blocks for some tenths of a second. Raises StoreError.
    """
    blocks = min(SAMPLE_BLOCKS_MAX, max(1, SAMPLE_BYTES_MAX // store.block_bytes), store.slots)
    with _samples(store, found, blocks) as samples:
        single_s = [_read_s(store, [sample], 1) for sample in samples[:SINGLE_READS_MAX]]
        all_s = [_read_s(store, samples, threads) for _ in range(ROUNDS)]
    bytes_per_s = len(samples) * store.block_bytes / median(all_s)
    return ReadSpeed(max(0.0, median(single_s) - store.block_bytes / bytes_per_s), bytes_per_s)


@contextmanager
def _samples(store: SsdStore, found: Sequence[Copy], blocks: int) -> Iterator[Sequence[Copy]]:
    """So many slots with what they hold, spread over the store."""
    if len(found) >= blocks:
        yield [found[place * len(found) // blocks] for place in range(blocks)]
        return
    held = {copy.slot for copy in found}
    free = [slot for slot in range(store.slots) if slot not in held]
    slots = [free[place * len(free) // blocks] for place in range(blocks)] if len(free) >= blocks else free
    samples = [Copy(slot, BlockHash(xxhash.xxh3_128_digest(_TAG + b"%d" % slot)), None) for slot in slots]
    data = memoryview(os.urandom(store.block_bytes))
    try:
        for sample in samples:
            store.write(sample.slot, sample.block_hash, None, data)
        yield samples or found
    finally:
        for sample in samples:
            store.erase(sample.slot)


def _read_s(store: SsdStore, samples: Sequence[Copy], threads: int) -> float:
    """How long it takes to read these, from the disk."""
    for sample in samples:
        store.drop_cached(sample.slot)
    buffers = [memoryview(bytearray(store.block_bytes)) for _ in samples]
    with ThreadPoolExecutor(threads, thread_name_prefix="ssd-speed") as executor:
        began_at_s = time.perf_counter()
        list(executor.map(lambda sample, into: _read(store, sample, into), samples, buffers))
        return time.perf_counter() - began_at_s


def _read(store: SsdStore, sample: Copy, into: memoryview) -> None:
    try:
        store.read(sample.slot, sample.block_hash, into)
    except CorruptBlock:
        return  # It took as long.
