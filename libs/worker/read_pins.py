"""Lends blocks of this instance to others: pins and grants what they may read (DESIGN §3 step 6).

Carries out what `protocol.read_pin` says of each pin. Owns the lent blocks' pins and grants from the request
to the release or the end of the lease. Works alike on prefill, decode and coupled workers: whatever the pool
holds may be read. What moves between tiers is the mover's.
"""

import asyncio
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import count

import numpy as np

from cluster.bus import Handler, Received
from cluster.errors import ProtocolError
from cluster.messages import PinRefused, PinReleased, ReadPin, ReadPinned, RefusalReason, ReleasePin
from kvhash import BlockHash, unpack
from kvindex.core import InstanceId
from kvtransfer import Access, Grant, TransferError
from protocol import read_pin
from protocol.read_pin import AwaitAnswer, Begin, Pin, PinPhase, Reader
from worker.handover import block_ranges
from worker.node import Node

PINS_MAX = 256
"""Pins that rise or are held at once; each may hold a conversation's worth of blocks."""
REMEMBERED_MAX = 4096
"""Pins remembered at once, tombstones included."""
RISE_TTL_SHARE = 0.5
"""Of the lease, the most that bringing blocks up may take: the rest is for the read."""
RISE_S_MAX = 2.0
"""The reader waits meanwhile, and a request waits for the reader."""
RISING_MAX = 64
"""Pins whose blocks are being brought up at once, a part of the messages that an instance works on at once: a
disk that hangs is not to keep it from its other duties."""
TICK_S = 0.25
"""How often leases and tombstones are looked at."""
READER_GRACE_S = 10.0
"""A reader whose registration is gone for longer is lost; a lost lease alone is not enough."""

PinKey = tuple[Reader, str]


class _LentBlocks:
    """One pin, what it holds, and who waits for its answer. `block_ids` are pinned while it has a grant."""

    def __init__(self, pin: Pin) -> None:
        self.pin = pin
        self.answer: asyncio.Future[ReadPinned | PinRefused] = asyncio.get_running_loop().create_future()
        self.block_ids: list[int] = []
        self.grant: Grant | None = None


class ReadPins:
    """All methods are for the event loop's thread."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self._lent: dict[PinKey, _LentBlocks] = {}
        self._generations = count(1)
        self._missing_since_s: dict[InstanceId, float] = {}
        self._rising = 0
        self._draining = False

    def handlers(self) -> Mapping[type, Handler]:
        return {ReadPin: self._on_read_pin, ReleasePin: self._on_release_pin}

    async def run(self) -> None:
        """Let time pass for every pin, until cancelled."""
        while True:
            await asyncio.sleep(TICK_S)
            for lent in list(self._lent.values()):
                self._feed(lent, read_pin.TimePassed())
            self._look_for_lost_readers()

    def refuse_new(self) -> None:
        """From now on nothing more is lent; what is lent already may be read to the end."""
        self._draining = True

    def pins(self) -> int:
        """Pins that rise or are held."""
        return sum(lent.pin.phase is not PinPhase.CLOSED for lent in self._lent.values())

    async def _on_read_pin(self, received: Received) -> ReadPinned | PinRefused:
        asked = received.body
        assert isinstance(asked, ReadPin)
        reader = Reader(received.envelope.sender, received.envelope.incarnation)
        answer = await self._asked(asked, reader)
        outcome = "pinned" if isinstance(answer, ReadPinned) else str(answer.reason)
        self._node.metrics.read_pins.labels(outcome).inc()
        return answer

    async def _on_release_pin(self, received: Received) -> PinReleased:
        """Answered at once: the reader has no use for knowing when the blocks are free. ProtocolError for an
        id that no pin can have."""
        release = received.body
        assert isinstance(release, ReleasePin)
        problem = read_pin.id_problem(release.pin_id)
        if problem:
            raise ProtocolError(problem)
        reader = Reader(received.envelope.sender, received.envelope.incarnation)
        lent = self._lent.get((reader, release.pin_id))
        if lent is not None:
            self._feed(lent, read_pin.ReleaseAsked())
        elif len(self._lent) < REMEMBERED_MAX:
            self._remember(read_pin.tombstone(reader, release.pin_id, self._node.now_s()))
        return PinReleased(release.pin_id)

    async def _asked(self, asked: ReadPin, reader: Reader) -> ReadPinned | PinRefused:
        lent = self._lent.get((reader, asked.pin_id))
        refused = self._refusal(asked, known=lent is not None)
        if refused is not None:
            return refused
        admission = read_pin.admit(lent.pin if lent else None, asked, reader, self._node.now_s())
        if isinstance(admission, Begin):
            lent = self._remember(admission.pin)
            lending = self._lend(lent, unpack(asked.block_hashes))
            self._node.spawn(lending, "lend blocks", partial(self._lending_failed, lent))
        elif not isinstance(admission, AwaitAnswer):
            return admission
        assert lent is not None
        return await asyncio.shield(lent.answer)

    def _refusal(self, asked: ReadPin, known: bool) -> PinRefused | None:
        """What needs no look at the pool. One that is known already may be asked again, also in a drain."""
        if asked.fingerprint != self._node.model.fingerprint:
            detail = f"fingerprint is {asked.fingerprint[:64]!r}, not ours"
            return PinRefused(asked.pin_id, RefusalReason.WRONG_MODEL, detail)
        problem = read_pin.problem(asked)
        if problem:
            return PinRefused(asked.pin_id, RefusalReason.BAD_REQUEST, problem)
        if known:
            return None
        if self._draining:
            return PinRefused(asked.pin_id, RefusalReason.DRAINING, "the instance drains")
        if self.pins() >= PINS_MAX or len(self._lent) >= REMEMBERED_MAX:
            return PinRefused(asked.pin_id, RefusalReason.QUEUE_FULL, f"{PINS_MAX} pins are held already")
        return None

    def _remember(self, pin: Pin) -> _LentBlocks:
        lent = _LentBlocks(pin)
        self._lent[(pin.reader, pin.pin_id)] = lent
        return lent

    def _feed(self, lent: _LentBlocks, event: read_pin.Event) -> None:
        """One event through the machine; its effects are carried out or begun when this returns."""
        lent.pin, effects = read_pin.step(lent.pin, event, self._node.now_s())
        for effect in effects:
            match effect:
                case read_pin.Answer(message):
                    lent.answer.set_result(message)
                case read_pin.RevokeAndUnpin():
                    self._node.spawn(self._take_back(lent), "take back lent blocks")
                case read_pin.Forget():
                    self._forget(lent)

    def _lending_failed(self, lent: _LentBlocks, detail: str) -> None:
        self._feed(lent, read_pin.NotPinned(RefusalReason.UNKNOWN, detail))

    async def _lend(self, lent: _LentBlocks, hashes: Sequence[BlockHash]) -> None:
        """Bring up what lies below, pin and grant what came; the machine says what of it still counts."""
        pin = lent.pin
        block_ids = await self._pinned(hashes, pin)
        if len(block_ids) <= pin.first_block:
            self._unpin(block_ids)
            self._feed(lent, self._nothing_to_lend(hashes, pin.first_block))
            return
        try:
            answer = self._granted(lent, block_ids)
        except TransferError as error:
            self._unpin(block_ids)
            self._feed(lent, read_pin.NotPinned(RefusalReason.QUEUE_FULL, str(error)))
            return
        self._feed(lent, read_pin.Pinned(answer))

    async def _pinned(self, hashes: Sequence[BlockHash], pin: Pin) -> list[int]:
        """Blocks of the chain, from its start, that are pinned now: as many as are held and can be lent."""
        pool = self._node.pool
        leading = pool.acquire(hashes[: self._lendable_blocks(hashes)])
        if not len(leading) == pool.match(hashes) < pool.match_held(hashes):
            return leading
        room = self._lendable_blocks(hashes) - len(leading)
        if room < 1 or len(leading) + room <= pin.first_block or self._rising >= RISING_MAX:
            return leading
        self._rising += 1
        try:
            timeout_s = min(RISE_TTL_SHARE * (pin.ends_at_s - self._node.now_s()), RISE_S_MAX)
            risen = await self._node.mover.rise(hashes, timeout_s, room)
        except BaseException:
            self._unpin(leading)
            raise
        finally:
            self._rising -= 1
        # Who else brought up a part of the chain meanwhile has it pinned by itself.
        block_ids = pool.acquire(hashes[: len(leading) + len(risen)])
        pool.release(leading)
        pool.release(risen)
        return block_ids

    def _lendable_blocks(self, hashes: Sequence[BlockHash]) -> int:
        """How far into the chain pins and fresh blocks may reach now, whatever of it is held. Blocks that are
        in use anyway are lent for nothing."""
        return self._node.pool.match_in_use(hashes) + self._node.spare_blocks()

    def _nothing_to_lend(self, hashes: Sequence[BlockHash], first_block: int) -> read_pin.NotPinned:
        if self._node.pool.match_held(hashes) <= first_block:
            return read_pin.NotPinned(RefusalReason.UNKNOWN, f"no block from {first_block} on is held")
        if self._lendable_blocks(hashes) > first_block:
            return read_pin.NotPinned(RefusalReason.NO_BLOCKS, "the blocks did not come up in time")
        return read_pin.NotPinned(RefusalReason.NO_BLOCKS, "the instance needs its blocks itself")

    def _granted(self, lent: _LentBlocks, block_ids: list[int]) -> ReadPinned:
        """Let the reader at the blocks from the first that it asked for. Raises TransferError."""
        node, pin = self._node, lent.pin
        readable = block_ids[pin.first_block :]
        lent.grant = node.endpoint.grant(
            node.region,
            block_ranges(readable, node.layout.block_bytes),
            peer=pin.reader.instance,
            generation=next(self._generations),
            access=Access.READ,
        )
        lent.block_ids = block_ids
        packed = np.asarray(readable, "<i4").tobytes()
        return ReadPinned(pin.pin_id, pin.first_block, packed, lent.grant.token, ttl_s=0.0)

    async def _take_back(self, lent: _LentBlocks) -> None:
        """No byte is read any more; then the blocks may be evicted."""
        assert lent.grant is not None
        await self._node.endpoint.revoke(lent.grant)
        block_ids, lent.block_ids, lent.grant = lent.block_ids, [], None
        self._unpin(block_ids)

    def _unpin(self, block_ids: Sequence[int]) -> None:
        self._node.pool.release(block_ids)
        self._node.pool_changed()

    def _forget(self, lent: _LentBlocks) -> None:
        key = (lent.pin.reader, lent.pin.pin_id)
        if self._lent.get(key) is lent:
            del self._lent[key]

    def _look_for_lost_readers(self) -> None:
        """The lease ends a pin anyway; a reader that is known to be gone needs it no longer."""
        now_s = self._node.now_s()
        instances = self._node.context.registry.instances
        held = [lent for lent in self._lent.values() if lent.pin.phase is not PinPhase.CLOSED]
        missing = {lent.pin.reader.instance for lent in held} - instances.keys()
        self._missing_since_s = {reader: self._missing_since_s.get(reader, now_s) for reader in missing}
        for lent in held:
            reader = lent.pin.reader
            record = instances.get(reader.instance)
            replaced = record is not None and record.incarnation > reader.incarnation
            if replaced or now_s - self._missing_since_s.get(reader.instance, now_s) >= READER_GRACE_S:
                self._feed(lent, read_pin.ReaderLost())
