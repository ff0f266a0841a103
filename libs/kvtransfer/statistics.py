"""Counters per peer and transport: what we moved by our calls, and what we served of theirs."""

from collections import OrderedDict
from dataclasses import dataclass, field, replace

from kvtransfer.kinds import TransportKind

PEERS_COUNTED_MAX = 4096
"""Peers with counters; beyond it those of the peer not seen for longest are forgotten."""


@dataclass(slots=True)
class TransferCounters:
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

    def add(self, other: "TransferCounters") -> None:
        self.writes += other.writes
        self.reads += other.reads
        self.written_bytes += other.written_bytes
        self.read_bytes += other.read_bytes
        self.failures += other.failures
        self.transfer_s += other.transfer_s
        self.served_writes += other.served_writes
        self.served_reads += other.served_reads
        self.served_written_bytes += other.served_written_bytes
        self.served_read_bytes += other.served_read_bytes
        self.served_failures += other.served_failures


@dataclass(slots=True)
class PeerStatistics(TransferCounters):
    """The totals of one peer, and the same by transport; a call that reached none is in the totals only."""

    by_transport: dict[TransportKind, TransferCounters] = field(default_factory=dict)


_ByKind = dict[TransportKind | None, TransferCounters]


class Statistics:
    """The counters of one endpoint, by peer name and transport."""

    def __init__(self) -> None:
        self._peers: OrderedDict[str, _ByKind] = OrderedDict()
        self._forgotten: _ByKind = {}

    def of(self, peer: str, kind: TransportKind | None) -> TransferCounters:
        """Where to count; kind None is for calls that reached no transport."""
        kinds = self._peers.setdefault(peer, {})
        self._peers.move_to_end(peer)
        if len(self._peers) > PEERS_COUNTED_MAX:
            _, forgotten = self._peers.popitem(last=False)
            _add_kinds(self._forgotten, forgotten)
        return kinds.setdefault(kind, TransferCounters())

    def peer(self, peer: str) -> PeerStatistics:
        """A sum of this moment; zeros for a peer that is not known."""
        total = PeerStatistics()
        for kind, counters in self._peers.get(peer, {}).items():
            total.add(counters)
            if kind is not None:
                total.by_transport[kind] = replace(counters)
        return total

    def totals(self) -> dict[TransportKind, TransferCounters]:
        """Of all peers, those forgotten too."""
        found: _ByKind = {}
        for kinds in (self._forgotten, *self._peers.values()):
            _add_kinds(found, kinds)
        return {kind: counters for kind, counters in found.items() if kind is not None}

    def snapshot(self) -> dict[str, PeerStatistics]:
        return {peer: self.peer(peer) for peer in self._peers}


def _add_kinds(sums: _ByKind, kinds: _ByKind) -> None:
    for kind, counters in kinds.items():
        sums.setdefault(kind, TransferCounters()).add(counters)
