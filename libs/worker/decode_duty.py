"""Decode: reserve blocks, take over by commit, generate, keep tokens until the gateway has them.

The shell around `protocol.reservation`: owns blocks, grants and sequences of the requests held here.
"""

import asyncio
from collections.abc import Iterator, Mapping
from itertools import count

import numpy as np

from cluster.bus import Handler, Received
from cluster.messages import (
    Accepted,
    Commit,
    Finish,
    RefusalReason,
    Refused,
    Release,
    Renew,
    Reserve,
    Reserved,
    Resume,
)
from kvindex.core import InstanceId
from kvpool import NoBlocksError
from kvtransfer import Grant, TransferError, checksum
from policy.core import RequestId, RunningRequest
from protocol import reservation
from protocol.parts import PartBuffer
from protocol.reservation import Admit, Hold, Phase
from worker.handover import block_ranges
from worker.held import HeldRequest
from worker.intake import WorkError, check_commit, checked_prompt
from worker.node import Node
from worker.sequence import Sequence

TICK_S = 0.25
"""How often deadlines of reservations, retentions and tombstones are looked at."""
HOLDS_MAX = 65_536
"""Requests remembered at once, tombstones included."""
HOLDING_PER_BATCH_MAX = 2
"""Reserved and running requests, in batches: what waits for its turn already holds its blocks."""


class DecodeDuty:
    def __init__(self, node: Node, parts: PartBuffer) -> None:
        self._node = node
        self._parts = parts
        self._held: dict[RequestId, HeldRequest] = {}
        self._generations = count(1)
        self._draining = False
        self._changed = asyncio.Event()

    def handlers(self) -> Mapping[type, Handler]:
        return {
            Reserve: self._on_reserve,
            Renew: self._on_renew,
            Commit: self._on_commit,
            Release: self._on_release,
            Finish: self._on_finish,
        }

    def running(self) -> tuple[RunningRequest, ...]:
        """Everything that holds blocks here."""
        return tuple(
            RunningRequest(
                held.hold.request_id,
                held.hold.attempt,
                len(sequence.token_ids),
                sequence.output_tokens,
                sequence.work.sampling.output_tokens_max,
                committed=held.hold.phase is Phase.RUNNING,
            )
            for held, sequence in self._holding()
        )

    def _holding(self) -> Iterator[tuple[HeldRequest, Sequence]]:
        for held in self._held.values():
            if held.sequence is not None and held.hold.phase in (Phase.RESERVED, Phase.RUNNING):
                yield held, held.sequence

    async def run(self) -> None:
        """Let time pass for everything held, until cancelled."""
        while True:
            await asyncio.sleep(TICK_S)
            for held in list(self._held.values()):
                self._feed(held, reservation.TimePassed())

    def refuse_new(self) -> None:
        """From now on no new reservation is given; what is prefilled here may still be adopted."""
        self._draining = True

    async def drain(self, timeout_s: float) -> None:
        """Refuse new reservations and wait until every answer was taken; what is left then is handed
        back to its gateway, which places it elsewhere."""
        self.refuse_new()
        try:
            async with asyncio.timeout(timeout_s):
                while any(held.hold.phase is not Phase.CLOSED for held in self._held.values()):
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            self.hand_back("the instance drains")

    def hand_back(self, detail: str) -> None:
        """Give up what runs: its gateways are told, and place it elsewhere."""
        self.refuse_new()
        for held in list(self._held.values()):
            if held.hold.phase is Phase.RUNNING:
                held.failed(detail)

    def adopt(self, sequence: Sequence, first_token_id: int) -> bool:
        """Coupled: a sequence that was prefilled here decodes on; it is in the step loop already.

        False, and nothing was taken over, where this attempt was given up for a later one."""
        known = self._held.get(sequence.request_id)
        if known is not None:
            if known.hold.attempt >= sequence.work.attempt:
                return False
            self._feed(known, reservation.CancelAsked(known.hold.attempt))
        hold = reservation.adopted(sequence.request_id, sequence.work.attempt, self._node.now_s())
        held = self._remember(hold, sequence)
        sequence.owner = held
        held.tell_tokens(sequence.output_tokens - 1, (first_token_id,), sequence.cached_prompt_tokens)
        return True

    def cancel(self, request_id: RequestId, attempt: int) -> None:
        """Drop everything of this request up to `attempt`; what comes late meets a tombstone."""
        held = self._held.get(request_id)
        if held is not None:
            self._feed(held, reservation.CancelAsked(attempt))
        elif len(self._held) < HOLDS_MAX:
            self._remember(reservation.tombstone(request_id, attempt, self._node.now_s()), None)

    def gateways(self) -> set[InstanceId]:
        return {held.sequence.work.gateway for held in self._held.values() if held.sequence is not None}

    def cancel_gateway(self, gateway: InstanceId) -> None:
        """The gateway is lost: nobody waits for its answers."""
        for held in list(self._held.values()):
            if held.sequence is not None and held.sequence.work.gateway == gateway:
                self._feed(held, reservation.CancelAsked(held.hold.attempt))

    async def _on_reserve(self, received: Received) -> Reserved | Refused:
        reserve = received.body
        assert isinstance(reserve, Reserve)
        answer = self._reserve(reserve)
        self._parts.discard(reserve.work.request_id, reserve.work.attempt)
        outcome = "reserved" if isinstance(answer, Reserved) else str(answer.reason)
        self._node.metrics.reservations.labels(outcome).inc()
        return answer

    def _reserve(self, reserve: Reserve) -> Reserved | Refused:
        work = reserve.work
        held = self._held.get(work.request_id)
        admission = reservation.admit(held.hold if held else None, reserve)
        if not isinstance(admission, Admit):
            return admission
        if held is not None and admission.supersedes:
            self._feed(held, reservation.CancelAsked(held.hold.attempt))
        refusal = self._second_admission()
        if refusal is not None:
            return Refused(work.request_id, work.attempt, refusal, retry_after_s=1.0)
        try:
            prompt = checked_prompt(work, self._parts, self._node.work_limits)
            sequence = Sequence.of(work, prompt, self._node.space(work), self._node.model.context_tokens_max)
            sequence.take_blocks(self._node.pool, spare_blocks=1)
        except WorkError as error:
            return Refused(work.request_id, work.attempt, error.reason, error.detail)
        except NoBlocksError as error:
            return Refused(work.request_id, work.attempt, RefusalReason.NO_BLOCKS, str(error), 1.0)
        try:
            return self._hold(reserve, sequence)
        except TransferError as error:
            sequence.give_back(self._node.pool)
            reason = RefusalReason.QUEUE_FULL if error.retryable else RefusalReason.BAD_REQUEST
            return Refused(work.request_id, work.attempt, reason, str(error))

    def _second_admission(self) -> RefusalReason | None:
        """Load may have changed since the conductor placed the request (DESIGN §3 step 5)."""
        if self._draining:
            return RefusalReason.DRAINING
        holding_max = HOLDING_PER_BATCH_MAX * self._node.config.batch_requests_max
        if sum(1 for _ in self._holding()) >= holding_max or len(self._held) >= HOLDS_MAX:
            return RefusalReason.QUEUE_FULL
        if self._node.steps.preempted:
            # Who waits for blocks to come back goes first, or never would.
            return RefusalReason.NO_BLOCKS
        return None

    def _hold(self, reserve: Reserve, sequence: Sequence) -> Reserved:
        """Grant the blocks that are to be written: those after the held prefix, without the spare one.
        Raises TransferError, with nothing remembered."""
        node = self._node
        held_blocks = sequence.stored_blocks
        prompt_blocks = sequence.blocks_needed()
        generation = next(self._generations)
        writable = sequence.block_ids[held_blocks:prompt_blocks]
        ranges = block_ranges(writable, node.layout.block_bytes)
        grant = node.endpoint.grant(node.region, ranges, peer=reserve.owner, generation=generation)
        answer = Reserved(
            sequence.request_id,
            sequence.work.attempt,
            generation,
            held_blocks,
            np.asarray(sequence.block_ids[:prompt_blocks], "<i4").tobytes(),
            grant.token,
            min(max(reserve.ttl_s, TICK_S), reservation.RESERVATION_TTL_S),
        )
        bytes_to_write = len(writable) * node.layout.block_bytes
        hold = reservation.reserve(answer, reserve.owner, len(writable), bytes_to_write, node.now_s())
        sequence.unclear_block_ids = sequence.block_ids[prompt_blocks:]
        self._remember(hold, sequence).grant = grant
        node.context.load_changed()
        return answer

    async def _on_renew(self, received: Received) -> Accepted | Refused:
        renew = received.body
        assert isinstance(renew, Renew)
        return self._ask(renew, reservation.RenewAsked(renew.generation, renew.ttl_s))

    async def _on_commit(self, received: Received) -> Accepted | Refused:
        commit = received.body
        assert isinstance(commit, Commit)
        try:
            check_commit(commit, self._node.work_limits)
        except WorkError as error:
            return Refused(commit.request_id, commit.attempt, error.reason, error.detail)
        held = self._held.get(commit.request_id)
        if held is None or held.hold.phase is not Phase.RESERVED or held.grant is None:
            return self._ask(commit, reservation.CommitAsked(commit, 0, ""))
        landed_bytes = self._node.endpoint.written_bytes(held.grant)
        digest = await self._checksum(held) if commit.checksum else ""
        return self._ask(commit, reservation.CommitAsked(commit, landed_bytes, digest))

    async def _checksum(self, held: HeldRequest) -> str:
        """Of the blocks as they lie in memory now. Where they are freed meanwhile the machine says so
        before it looks at the sum."""
        assert held.hold.answer is not None
        assert held.sequence is not None
        sequence, answer = held.sequence, held.hold.answer
        written = sequence.block_ids[answer.held_blocks : sequence.blocks_needed()]
        ranges = block_ranges(written, self._node.layout.block_bytes)
        return await asyncio.to_thread(checksum, self._node.region, ranges)

    async def _on_release(self, received: Received) -> Accepted | Refused:
        release = received.body
        assert isinstance(release, Release)
        return self._ask(release, reservation.ReleaseAsked(release.generation))

    async def _on_finish(self, received: Received) -> Accepted | Refused:
        finish = received.body
        assert isinstance(finish, Finish)
        return self._ask(finish, reservation.FinishAsked(finish.attempt))

    def resume(self, resume: Resume) -> Accepted | Refused:
        """Everything emitted from `from_index` on goes out again; what still prefills has nothing yet."""
        held = self._held.get(resume.request_id)
        if held is None or held.hold.attempt != resume.attempt or held.sequence is None:
            return Refused(resume.request_id, resume.attempt, RefusalReason.UNKNOWN)
        if held.hold.phase is not Phase.RESERVED:
            held.tell_again(resume.from_index)
        return Accepted(resume.request_id, resume.attempt)

    def _ask(self, asked: Renew | Commit | Release | Finish, event: reservation.Event) -> Accepted | Refused:
        """Feed a message and find its answer among the effects."""
        held = self._held.get(asked.request_id)
        if held is None:
            return Refused(asked.request_id, asked.attempt, RefusalReason.UNKNOWN)
        reply = self._feed(held, event)
        assert reply is not None
        return reply

    def _feed(self, held: HeldRequest, event: reservation.Event) -> Accepted | Refused | None:
        """One event through the machine; its effects are carried out or begun when this returns."""
        held.hold, effects = reservation.step(held.hold, event, self._node.now_s())
        reply = None
        for effect in effects:
            match effect:
                case reservation.Reply(message):
                    reply = message
                case reservation.StartDecoding(commit):
                    self._node.spawn(self._start(held, commit), "start decoding", held.failed)
                case reservation.TellExpired(owner):
                    held.tell_expired(owner)
                case reservation.RevokeAndFree() | reservation.StopAndFree():
                    assert held.sequence is not None
                    # At once: a step that ends in this turn of the event loop tells a closed record nothing.
                    self._node.steps.leave(held.sequence)
                    self._node.spawn(self._free(held.sequence, held.grant), "free")
                    held.sequence = None
                case reservation.TellEnd():
                    held.tell_end()
                case reservation.ForgetTokens():
                    held.sequence = None
                case reservation.Forget():
                    self._forget(held)
        self._changed.set()
        return reply

    async def _start(self, held: HeldRequest, commit: Commit) -> None:
        """The grant ends before the first step: from now on the blocks are written here only."""
        assert held.grant is not None
        await self._node.endpoint.revoke(held.grant)
        sequence = held.sequence
        if held.hold.phase is not Phase.RUNNING or sequence is None:
            return
        sequence.context_tokens = len(sequence.token_ids)
        sequence.store_full_blocks(self._node.pool)
        sequence.goes_on = True
        sequence.owner = held
        sequence.append(commit.first_token_id)
        held.tell_tokens(sequence.output_tokens - 1, (commit.first_token_id,), commit.cached_tokens)
        self._node.steps.add(sequence)
        self._node.pool_changed()

    async def _free(self, sequence: Sequence, grant: Grant | None) -> None:
        """No byte lands and no step runs in the blocks any more; then they go back."""
        if grant is not None:
            await self._node.endpoint.revoke(grant)
        await self._node.steps.remove(sequence)
        sequence.give_back(self._node.pool)
        self._node.pool_changed()

    def _remember(self, hold: Hold, sequence: Sequence | None) -> HeldRequest:
        held = HeldRequest(hold, self._node.outbox, self._answer_ended, self._broken, sequence)
        self._held[hold.request_id] = held
        return held

    def _forget(self, held: HeldRequest) -> None:
        if self._held.get(held.hold.request_id) is held:
            del self._held[held.hold.request_id]

    def _answer_ended(self, held: HeldRequest) -> None:
        """The blocks go back at once and stay cached; the tokens wait for the gateway's finish."""
        assert held.sequence is not None
        held.sequence.give_back(self._node.pool)
        self._node.pool_changed()
        self._feed(held, reservation.AnswerEnded())

    def _broken(self, held: HeldRequest) -> None:
        self._feed(held, reservation.CancelAsked(held.hold.attempt))
