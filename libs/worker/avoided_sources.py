"""Which blocks are not to be read from which instance for a while, because that came to nothing. Pure."""

from collections import OrderedDict
from collections.abc import Sequence

from kvhash import BlockHash
from kvindex.core import InstanceId

SOURCE_AVOIDED_S = 30.0
"""After a failed read its source is not asked again for that block so long: whoever says that the block is
there (the directory, a placement) will know better by then."""
SILENT_SOURCE_AVOIDED_S = 5.0
"""A source that did not answer at all is left alone about every block so long, which is about a lease: else
each request would wait for it in turn."""
AVOIDED_MAX = 4096
"""(source, block) remembered, those that are avoided the longest forgotten first."""


class AvoidedSources:
    """What a source holds is prefix-closed: where one block is avoided, so are all behind it."""

    def __init__(self) -> None:
        self._until_s: OrderedDict[tuple[InstanceId, BlockHash], float] = OrderedDict()
        self._sources: dict[InstanceId, int] = {}
        self._silent_until_s: dict[InstanceId, float] = {}

    def __len__(self) -> int:
        return len(self._until_s)

    def avoid(self, source: InstanceId, block_hash: BlockHash, now_s: float) -> None:
        """From now on, for SOURCE_AVOIDED_S."""
        self._expire(now_s)
        self._forget((source, block_hash))
        self._until_s[source, block_hash] = now_s + SOURCE_AVOIDED_S
        self._sources[source] = self._sources.get(source, 0) + 1
        while len(self._until_s) > AVOIDED_MAX:
            self._forget(next(iter(self._until_s)))

    def avoid_all(self, source: InstanceId, now_s: float) -> None:
        """From now on, for SILENT_SOURCE_AVOIDED_S."""
        silent = {other: until_s for other, until_s in self._silent_until_s.items() if until_s > now_s}
        self._silent_until_s = {**silent, source: now_s + SILENT_SOURCE_AVOIDED_S}

    def askable_blocks(
        self, source: InstanceId, hashes: Sequence[BlockHash], first_block: int, now_s: float
    ) -> int:
        """How many leading blocks of the chain may be had from `source`, of which the blocks before
        `first_block` need not be asked for."""
        self._expire(now_s)
        if self._silent_until_s.get(source, now_s) > now_s:
            return min(first_block, len(hashes))
        if source not in self._sources:
            return len(hashes)
        for block in range(first_block, len(hashes)):
            if (source, hashes[block]) in self._until_s:
                return block
        return len(hashes)

    def _expire(self, now_s: float) -> None:
        """They are in the order in which they end."""
        while self._until_s:
            key, until_s = next(iter(self._until_s.items()))
            if until_s > now_s:
                return
            self._forget(key)

    def _forget(self, key: tuple[InstanceId, BlockHash]) -> None:
        if self._until_s.pop(key, None) is None:
            return
        source, _ = key
        self._sources[source] -= 1
        if not self._sources[source]:
            del self._sources[source]
