"""Eras of a pair's links: what a caller left behind on one transport never lands after bytes on another.

A transport keeps its own order: a new link of a peer ends the peer's older one there. Across transports
that order is the era's, which each link carries in its id, under the handshake's MAC. A caller that lost a
link with a write on it, or that moves on from a write it gave up, begins a new era; before an owner welcomes
the first link of an era, it ends what is left of the peer's earlier one on every transport. The eras of one
process are numbered, so that a dial which took its time is known for what it is however many came since.
"""

import secrets
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from typing import Any

_PROCESS_BYTES = 5
_NUMBER_BYTES = 3
ERA_BYTES = _PROCESS_BYTES + _NUMBER_BYTES
_LINK_BYTES = 8
PEERS_MAX = 4096
"""Peers remembered, as caller and as owner. One that is forgotten begins a new era."""

EndSessions = Callable[[str, bytes], Awaitable[None]]
"""End the links of the named peer whose ids do not begin with this era: no byte of theirs lands any more."""


class Eras:
    """The eras of one endpoint: its own, as the caller of each peer, and those of the peers that call it."""

    def __init__(self) -> None:
        self._process = secrets.token_bytes(_PROCESS_BYTES)
        self._number = 0
        self._own: OrderedDict[str, bytes] = OrderedDict()
        self._served: OrderedDict[str, tuple[bytes, bytes]] = OrderedDict()
        self._end_sessions: list[EndSessions] = []

    def link_id(self, peer: str) -> bytes:
        """For a new link to `peer`."""
        era = self._own.get(peer)
        if era is None:
            era = self._own[peer] = self._next()
        _keep(self._own, peer)
        return era + secrets.token_bytes(_LINK_BYTES)

    def begin(self, peer: str) -> None:
        """Links to `peer` that are dialled from now on are of a new era."""
        self._own[peer] = self._next()
        _keep(self._own, peer)

    def watch(self, end_sessions: EndSessions) -> None:
        """One more transport serves peers."""
        self._end_sessions.append(end_sessions)

    async def admit(self, peer: str, link_id: bytes) -> bool:
        """A peer that proved itself comes with this link. False if the link is of an era that is over."""
        era = link_id[:ERA_BYTES]
        current, before = self._served.get(peer, (era, b""))
        if era == before or _is_older(era, current):
            return False
        if era != current:
            before = current
        self._served[peer] = (era, before)
        _keep(self._served, peer)
        for end_sessions in self._end_sessions:
            await end_sessions(peer, era)
        # While copies of the old era came to their end, the peer may have begun yet another one.
        return self._served.get(peer, (era, b""))[0] == era

    def _next(self) -> bytes:
        self._number += 1
        if self._number >> 8 * _NUMBER_BYTES:
            self._process, self._number = secrets.token_bytes(_PROCESS_BYTES), 1
        return self._process + self._number.to_bytes(_NUMBER_BYTES, "big")


def _is_older(era: bytes, than: bytes) -> bool:
    """Of the same process, and begun before."""
    return era[:_PROCESS_BYTES] == than[:_PROCESS_BYTES] and era < than


def _keep(known: OrderedDict[str, Any], peer: str) -> None:
    known.move_to_end(peer)
    if len(known) > PEERS_MAX:
        known.popitem(last=False)
