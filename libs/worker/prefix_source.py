"""Another instance whose cached prefix is read, as its reader speaks to it: pin, connect, read, release.

Owns the messages and calls and how long each may take. What is read into which block, and what follows
from a failure, is `prefix_fetch`'s.
"""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from itertools import count
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from cluster import subjects
from cluster.errors import MoonpoolError, ProtocolError
from cluster.messages import PinRefused, ReadPin, ReadPinned, RefusalReason, ReleasePin
from kvhash import HASH_BYTES, BlockHash, pack
from kvindex.core import InstanceId
from kvtransfer import (
    ChecksumError,
    Peer,
    RetryableTransferError,
    TransferError,
    Transferred,
    TransferTimeout,
)
from worker.fetch_metrics import FetchFailure
from worker.handover import block_slices

if TYPE_CHECKING:  # the node has its PrefixFetch, which has sources
    from worker.node import Node

PIN_S_MAX = 4.0
"""How long the source may take to answer: longer than it lets its own lower tiers take."""
PIN_TTL_MARGIN_S = 1.0
"""The lease outlives the last read by this, so that a read on its way at the end is cut here, not there."""
CONNECT_S_MAX = 5.0
RELEASE_S_MAX = 2.0
RELEASE_TRIES_MAX = 3
"""A release nobody answers is given up after this; the pin then ends by its time."""
RELEASE_PAUSE_S = 0.2
DETAIL_CHARS_MAX = 200
"""Of what a source says about its refusal: it is passed on."""
READ_TRIES_MAX = 2
"""A read whose transport fails is made again, over the next one that works."""


class SourceError(Exception):
    """Nothing, or nothing more, comes from this source."""

    def __init__(self, reason: FetchFailure, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason


@dataclass(frozen=True, slots=True)
class PinnedBlocks:
    """Blocks of the source that stay where they are while they are read."""

    peer: Peer
    grant: str
    block_ids: npt.NDArray[np.int64]
    ends_at_s: float


class PrefixSource:
    """Methods raise SourceError."""

    def __init__(self, node: "Node", instance: InstanceId) -> None:
        self._node = node
        self.instance = instance

    @asynccontextmanager
    async def pinned(
        self, pin_id: str, hashes: Sequence[BlockHash], first_block: int, ends_at_s: float
    ) -> AsyncIterator[PinnedBlocks]:
        """The blocks of the chain from `first_block` on, at least one of them. Given back at the end, also
        where no answer came: it may be on the way."""
        descriptor = self._descriptor()
        try:
            answer = await self._ask_pin(pin_id, hashes, first_block, ends_at_s)
            peer = await self._connect(descriptor, ends_at_s)
            block_ids = np.frombuffer(answer.block_ids, "<i4").astype(np.int64)
            ends_at_s = min(ends_at_s, self._node.now_s() + answer.ttl_s - PIN_TTL_MARGIN_S)
            yield PinnedBlocks(peer, answer.grant, block_ids, ends_at_s)
        finally:
            self._node.spawn(self._release(pin_id), "release pin")

    async def read(self, pinned: PinnedBlocks, first: int, block_ids: Sequence[int]) -> Transferred:
        """Into our blocks `block_ids`, from the pinned ones from index `first` on; verified."""
        node = self._node
        block_bytes = node.layout.block_bytes
        local = block_slices(np.asarray(block_ids, np.int64), block_bytes, 0, block_bytes)
        remote_ids = pinned.block_ids[first : first + len(block_ids)]
        remote = block_slices(remote_ids, block_bytes, 0, block_bytes)
        tries_left = READ_TRIES_MAX
        while True:
            tries_left -= 1
            timeout_s = pinned.ends_at_s - node.now_s()
            try:
                with node.cost_meter.transfer(len(block_ids) * block_bytes):
                    return await pinned.peer.read(
                        node.region, local, pinned.grant, remote, timeout_s=timeout_s, verify=True
                    )
            except TransferTimeout as error:
                raise SourceError(FetchFailure.TIMEOUT, str(error)) from error
            except RetryableTransferError as error:
                if not tries_left:
                    checksum = isinstance(error, ChecksumError)
                    reason = FetchFailure.CHECKSUM if checksum else FetchFailure.TRANSFER
                    raise SourceError(reason, str(error)) from error
            except TransferError as error:
                raise SourceError(FetchFailure.TRANSFER, str(error)) from error

    def _descriptor(self) -> str:
        record = self._node.context.registry.instances.get(self.instance)
        if record is None or record.transfer is None:
            detail = f"{self.instance} is not registered with a transfer endpoint"
            raise SourceError(FetchFailure.UNREGISTERED, detail)
        return record.transfer

    async def _ask_pin(
        self, pin_id: str, hashes: Sequence[BlockHash], first_block: int, ends_at_s: float
    ) -> ReadPinned:
        time_left_s = max(0.0, ends_at_s - self._node.now_s())
        ttl_s = time_left_s + PIN_TTL_MARGIN_S
        asked = ReadPin(pin_id, self._node.model.fingerprint, pack(hashes), first_block, ttl_s)
        try:
            answer = await self._node.context.bus.request(
                subjects.instance(self.instance), asked, timeout_s=min(PIN_S_MAX, time_left_s)
            )
            if isinstance(answer, PinRefused):
                gone = answer.reason is RefusalReason.UNKNOWN
                reason = FetchFailure.GONE if gone else FetchFailure.REFUSED
                raise SourceError(reason, f"{answer.reason} {answer.detail[:DETAIL_CHARS_MAX]}")
            return _checked(answer, asked)
        except ProtocolError as error:
            raise SourceError(FetchFailure.NONSENSE, str(error)) from error
        except MoonpoolError as error:
            raise SourceError(FetchFailure.UNANSWERED, str(error)) from error

    async def _connect(self, descriptor: str, ends_at_s: float) -> Peer:
        timeout_s = min(CONNECT_S_MAX, ends_at_s - self._node.now_s())
        try:
            return await self._node.endpoint.connect(descriptor, timeout_s=timeout_s)
        except TransferError as error:
            raise SourceError(FetchFailure.TRANSFER, str(error)) from error

    async def _release(self, pin_id: str) -> None:
        """Nobody waits for it; raises nothing."""
        subject = subjects.instance(self.instance)
        for tries_left in reversed(range(RELEASE_TRIES_MAX)):
            try:
                await self._node.context.bus.request(subject, ReleasePin(pin_id), timeout_s=RELEASE_S_MAX)
                return
            except MoonpoolError as error:
                if not tries_left:
                    detail = {"source": self.instance, "pin_id": pin_id, "detail": str(error)}
                    self._node.context.log.info("pin release unanswered", **detail)
                    return
            await asyncio.sleep(RELEASE_PAUSE_S)


class PinIds:
    """Names for the pins of one process; a successor of the same name has others."""

    def __init__(self, incarnation: int) -> None:
        self._incarnation = incarnation
        self._numbers = count(1)

    def next(self) -> str:
        return f"{self._incarnation}-{next(self._numbers)}"


def _checked(answer: object, asked: ReadPin) -> ReadPinned:
    """ProtocolError where it is no answer to what was asked."""
    if not isinstance(answer, ReadPinned):
        raise ProtocolError(f"read pin was answered by {type(answer).__name__}")
    if (answer.pin_id, answer.first_block) != (asked.pin_id, asked.first_block):
        raise ProtocolError(f"asked for pin {asked.pin_id} from block {asked.first_block} on, got {answer}")
    blocks, rest = divmod(len(answer.block_ids), np.dtype("<i4").itemsize)
    asked_blocks = len(asked.block_hashes) // HASH_BYTES - asked.first_block
    if rest or not 1 <= blocks <= asked_blocks:
        raise ProtocolError(f"block_ids has {len(answer.block_ids)} bytes, not 1 to {asked_blocks} ids")
    if np.frombuffer(answer.block_ids, "<i4").min() < 0 or not answer.ttl_s > 0:
        raise ProtocolError(f"a block id is negative or ttl_s is {answer.ttl_s}, must be above 0")
    return answer
