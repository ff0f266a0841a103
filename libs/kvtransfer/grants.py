"""Grants: who may write to or read from which ranges, until they are revoked.

Owns the decision "may this peer touch these bytes"; every transport asks here and nowhere else.
A token is 128 random bits and the generation; what it allows is kept on this side only.
"""

import logging
import secrets
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum

import numpy as np
import numpy.typing as npt

from kvtransfer.errors import ArrivalError, BusyError, GrantError, RangeError
from kvtransfer.limits import NAME_BYTES_MAX
from kvtransfer.memory import FEW_RANGES, Ranges, Region, checked_ranges

REVOKED = "the grant was revoked"
"""What a call hears whose grant is withdrawn while it runs."""

_TOKEN_VERSION = "g1"
_INT64 = np.dtype(np.int64)
_Integers = list[int] | npt.NDArray[np.int64]

_log = logging.getLogger(__name__)


class Access(StrEnum):
    """What the peer does with the granted memory."""

    WRITE = "write"
    READ = "read"


@dataclass(frozen=True, slots=True)
class Arrival:
    """A tagged write of `payload_bytes` bytes, all of them visible here."""

    grant: "Grant"
    tag: bytes
    payload_bytes: int


@dataclass(slots=True, eq=False)
class Grant:
    """A right given to one peer. Only its table and the transport that lands bytes change it."""

    token: str
    region: Region
    peer: str
    generation: int
    access: Access
    starts: npt.NDArray[np.int64] = field(repr=False)
    ends: npt.NDArray[np.int64] = field(repr=False)
    revoked: bool = False
    landed_bytes: int = 0
    on_arrival: Callable[[Arrival], None] | None = None
    _stretches: tuple[_Integers, _Integers] = field(init=False, repr=False)
    """`starts` and `ends` to be looked at one by one: of a few, integers are quicker than arrays."""

    def __post_init__(self) -> None:
        few = len(self.starts) <= FEW_RANGES
        self._stretches = (self.starts.tolist(), self.ends.tolist()) if few else (self.starts, self.ends)

    def covers(self, ranges: Ranges) -> bool:
        """Whether each range lies within one of the granted stretches."""
        if len(ranges) == 0:
            return True
        if len(self.starts) == 0:
            return False
        if len(ranges) <= FEW_RANGES:
            return all(self.covers_one(offset, length) for offset, length in ranges.tolist())
        at = np.searchsorted(self.starts, ranges[:, 0], side="right") - 1
        return bool(((at >= 0) & (ranges[:, 0] + ranges[:, 1] <= self.ends[at])).all())

    def covers_one(self, offset: int, length: int) -> bool:
        """Whether a range lies within one of the granted stretches."""
        starts, ends = self._stretches
        at = bisect_right(starts, offset) - 1
        return at >= 0 and bool(offset + length <= ends[at])

    def arrived(self, tag: bytes, payload_bytes: int) -> None:
        """Hand a tag over, once, on the event loop, after the bytes that it belongs to are visible.

        Raises GrantError if the grant takes no tags, ArrivalError if its callback fails.
        """
        if self.on_arrival is None:
            raise GrantError("the grant takes no tags")
        try:
            self.on_arrival(Arrival(self, tag, payload_bytes))
        except Exception as error:
            _log.exception("taking the tag of a write by %s failed", self.peer)
            raise ArrivalError("the bytes are there, but the owner's on_arrival raised an error") from error


class GrantTable:
    """All grants of one endpoint that are not revoked."""

    def __init__(self, grants_max: int) -> None:
        self._grants_max = grants_max
        self._grants: dict[str, Grant] = {}

    def __len__(self) -> int:
        return len(self._grants)

    def issue(
        self,
        region: Region,
        ranges: npt.ArrayLike,
        peer: str,
        generation: int,
        access: Access,
        on_arrival: Callable[[Arrival], None] | None = None,
    ) -> Grant:
        """A new grant. Raises BusyError at the limit, RangeError for bad arguments."""
        if len(self._grants) >= self._grants_max:
            raise BusyError(f"grants_max of {self._grants_max} grants is reached")
        if not 0 <= generation < 1 << 63:
            raise RangeError(f"generation must be from 0 to 2**63 - 1, not {generation}")
        if not 0 < len(peer.encode()) <= NAME_BYTES_MAX:
            raise RangeError(f"peer must have 1 to {NAME_BYTES_MAX} bytes")
        try:
            access = Access(access)
        except ValueError as error:
            raise RangeError(f"access must be one of {[*Access]}: {error}") from error
        starts, ends = _merged(checked_ranges(ranges, region.region_bytes, "ranges"))
        token = f"{_TOKEN_VERSION}.{secrets.token_hex(16)}.{generation}"
        grant = Grant(token, region, peer, generation, access, starts, ends, on_arrival=on_arrival)
        self._grants[_identity(token)] = grant
        return grant

    def revoke(self, grant: Grant) -> None:
        """Withdraw it; again is harmless."""
        grant.revoked = True
        self._grants.pop(_identity(grant.token), None)

    def of_region(self, region: Region) -> list[Grant]:
        return [grant for grant in self._grants.values() if grant.region is region]

    def all(self) -> list[Grant]:
        return list(self._grants.values())

    def check(self, token: str, peer: str, access: Access, ranges: npt.ArrayLike) -> tuple[Grant, Ranges]:
        """The grant behind `token` and the ranges made fit for a cursor.

        Raises GrantError unless all of it matches. The message tells a peer that holds no valid
        token nothing more than that.
        """
        grant = self._grants.get(_identity(token))
        if grant is None or grant.revoked or grant.peer != peer:
            raise GrantError(f"no grant of this token stands for {peer}: unknown, revoked, or another peer's")
        if token != grant.token:
            raise GrantError(f"the grant is of generation {grant.generation}")
        if grant.access is not access:
            raise GrantError(f"the grant is for {grant.access}, not {access}")
        if isinstance(ranges, np.ndarray) and ranges.shape == (1, 2) and ranges.dtype is _INT64:
            # One range in one granted stretch, as most small requests are: it needs no other check.
            ((offset, length),) = ranges.tolist()
            if length > 0 and grant.covers_one(offset, length):
                return grant, ranges
        try:
            checked = checked_ranges(ranges, grant.region.region_bytes, "remote ranges")
        except RangeError as error:
            raise GrantError(str(error)) from error
        if not grant.covers(checked):
            raise GrantError("the ranges leave the granted ones")
        return grant, checked


def _identity(token: str) -> str:
    """The random part; the whole token is compared only after it is found."""
    parts = token.split(".", 2)
    return parts[1] if len(parts) > 1 and parts[0] == _TOKEN_VERSION else ""


def _merged(ranges: Ranges) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Starts and ends of the union of `ranges`, sorted; touching stretches become one."""
    if len(ranges) == 0:
        return ranges[:, 0], ranges[:, 1]
    ordered = ranges[np.argsort(ranges[:, 0], kind="stable")]
    reach = np.maximum.accumulate(ordered[:, 0] + ordered[:, 1])
    firsts = np.concatenate(([True], ordered[1:, 0] > reach[:-1]))
    lasts = np.concatenate((firsts[1:], [True]))
    return ordered[firsts, 0], reach[lasts]
