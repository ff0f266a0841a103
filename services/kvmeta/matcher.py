"""Answers what prefix of a prompt each instance holds, and counts which prefixes are asked for."""

from collections.abc import Callable

from cluster.bus import Received
from cluster.errors import ProtocolError
from cluster.messages import MATCH_BLOCKS_MAX, MatchReply, MatchRequest
from kvhash import HASH_BYTES
from kvindex.directory import Directory
from kvmeta.metrics import KvmetaMetrics
from policy.heat import HeatCounter


class Matcher:
    def __init__(
        self, directory: Directory, heat: HeatCounter, metrics: KvmetaMetrics, clock: Callable[[], float]
    ) -> None:
        self._directory = directory
        self._heat = heat
        self._metrics = metrics
        self._clock = clock

    async def match(self, received: Received) -> MatchReply:
        """Handler of the match subject. ProtocolError where the hashes are none, or too many."""
        request = received.body
        if not isinstance(request, MatchRequest):
            raise ProtocolError(f"{type(request).__name__} is no match request")
        blocks, rest = divmod(len(request.block_hashes), HASH_BYTES)
        if rest or blocks > MATCH_BLOCKS_MAX:
            raise ProtocolError(
                f"block_hashes: {len(request.block_hashes)} bytes, must be {HASH_BYTES} for each of at most "
                f"{MATCH_BLOCKS_MAX} blocks"
            )
        started_s = self._clock()
        matches = self._directory.match(request.block_hashes)
        self._metrics.match_s.observe(self._clock() - started_s)
        if matches:
            self._heat.count(request.block_hashes, matches[0].prefix_blocks, started_s)
        return MatchReply(matches)
