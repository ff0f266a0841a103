"""Counters per peer: what we moved by our calls, and what we served of theirs."""

from collections import OrderedDict
from dataclasses import dataclass

PEERS_COUNTED_MAX = 4096
"""Peers with counters; beyond it those of the peer not seen for longest are forgotten."""


@dataclass(slots=True)
class PeerStatistics:
    """`transfer_s` is the sum of the calls' durations; calls overlap, so it may exceed the clock."""

    writes: int = 0
    reads: int = 0
    written_bytes: int = 0
    read_bytes: int = 0
    failures: int = 0
    transfer_s: float = 0.0
    served_writes: int = 0
    served_reads: int = 0
    served_written_bytes: int = 0
    served_read_bytes: int = 0
    served_failures: int = 0


class Statistics:
    """The counters of one endpoint, by peer name."""

    def __init__(self) -> None:
        self._peers: OrderedDict[str, PeerStatistics] = OrderedDict()

    def of(self, peer: str) -> PeerStatistics:
        counters = self._peers.setdefault(peer, PeerStatistics())
        self._peers.move_to_end(peer)
        if len(self._peers) > PEERS_COUNTED_MAX:
            self._peers.popitem(last=False)
        return counters

    def snapshot(self) -> dict[str, PeerStatistics]:
        return dict(self._peers)
