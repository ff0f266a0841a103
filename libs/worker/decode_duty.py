"""Decode: reserve blocks, take over by commit, generate, keep tokens until the gateway has them.

Answers what comes in and says who is admitted; what is held is `held_table`'s.
"""

import asyncio
from collections.abc import Mapping
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
from kvtransfer import TransferError, checksum
from policy.core import RequestId, RunningRequest
from protocol import reservation
from protocol.parts import PartBuffer
from protocol.reservation import Admit, Phase
from structures.matcher import CompiledStructure
from worker.handover import block_ranges
from worker.held import HeldRequest
from worker.held_table import HeldTable
from worker.intake import WorkError, check_commit, checked_prompt
from worker.node import Node
from worker.second_admission import HOLDS_MAX, RETRY_AFTER_S, second_admission
from worker.sequence import Sequence
from worker.structures import compiled, resumed

TICK_S = 0.25
"""How often deadlines of reservations, retentions and tombstones are looked at."""


class DecodeDuty:
    def __init__(self, node: Node, parts: PartBuffer) -> None:
        self._node = node
        self._parts = parts
        self._held = HeldTable(node)
        self._generations = count(1)
        self._draining = False

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
        return tuple(held.running() for held in self._held.holding())

    async def run(self) -> None:
        """Let time pass for everything held, until cancelled."""
        while True:
            await asyncio.sleep(TICK_S)
            for held in self._held:
                self._held.feed(held, reservation.TimePassed())

    def refuse_new(self) -> None:
        """From now on no new reservation is given; what is prefilled here may still be adopted."""
        self._draining = True

    async def drain(self, timeout_s: float) -> None:
        """Refuse new reservations and wait until every answer was taken; what is left then is handed
        back to its gateway, which places it elsewhere."""
        self.refuse_new()
        try:
            async with asyncio.timeout(timeout_s):
                while any(held.hold.phase is not Phase.CLOSED for held in self._held):
                    self._held.changed.clear()
                    await self._held.changed.wait()
        except TimeoutError:
            self.hand_back("the instance drains")

    def hand_back(self, detail: str) -> None:
        """Give up what runs: its gateways are told, and place it elsewhere."""
        self.refuse_new()
        for held in self._held:
            if held.hold.phase is Phase.RUNNING:
                held.failed(detail)

    def adopt(self, sequence: Sequence, first_token_id: int) -> bool:
        """Coupled: a sequence that was prefilled here decodes on; it is in the step loop already.

        False, and nothing was taken over, where this attempt was given up for a later one."""
        known = self._held.get(sequence.request_id)
        if known is not None:
            if known.hold.attempt >= sequence.work.attempt:
                return False
            self._held.feed(known, reservation.CancelAsked(known.hold.attempt))
        hold = reservation.adopted(sequence.request_id, sequence.work.attempt, self._node.now_s())
        self._held.adopt(self._held.remember(hold), sequence, first_token_id)
        return True

    def cancel(self, request_id: RequestId, attempt: int) -> None:
        """Drop everything of this request up to `attempt`; what comes late meets a tombstone."""
        held = self._held.get(request_id)
        if held is not None:
            self._held.feed(held, reservation.CancelAsked(attempt))
        elif len(self._held) < HOLDS_MAX:
            self._held.remember(reservation.tombstone(request_id, attempt, self._node.now_s()))

    def gateways(self) -> set[InstanceId]:
        return {held.work.gateway for held in self._held if held.work is not None}

    def cancel_gateway(self, gateway: InstanceId) -> None:
        """The gateway is lost: nobody waits for its answers."""
        for held in self._held:
            if held.work is not None and held.work.gateway == gateway:
                self._held.feed(held, reservation.CancelAsked(held.hold.attempt))

    async def _on_reserve(self, received: Received) -> Reserved | Refused:
        reserve = received.body
        assert isinstance(reserve, Reserve)
        work = reserve.work
        answer: Reserved | Refused
        try:
            structure = await compiled(self._node.structures, work.sampling.structure)
        except WorkError as error:
            answer = Refused(work.request_id, work.attempt, error.reason, error.detail, error.retry_after_s)
        else:
            answer = self._reserve(reserve, structure)
        self._parts.discard(work.request_id, work.attempt)
        outcome = "reserved" if isinstance(answer, Reserved) else str(answer.reason)
        self._node.metrics.reservations.labels(outcome).inc()
        return answer

    def _reserve(self, reserve: Reserve, structure: CompiledStructure | None) -> Reserved | Refused:
        work = reserve.work
        held = self._held.get(work.request_id)
        admission = reservation.admit(held.hold if held else None, reserve)
        if not isinstance(admission, Admit):
            return admission
        if held is not None and admission.supersedes:
            self._held.feed(held, reservation.CancelAsked(held.hold.attempt))
        refused = second_admission(self._node, self._held, reserve, draining=self._draining)
        if refused is not None:
            return refused
        try:
            prompt = checked_prompt(work, self._parts, self._node.work_limits)
            matcher = resumed(structure, work.output_token_ids)
            context_tokens_max = self._node.model.context_tokens_max
            sequence = Sequence.of(work, prompt, self._node.space(work), context_tokens_max, matcher)
            sequence.take_blocks(self._node.pool, spare_blocks=work.sampling.samples)
        except WorkError as error:
            return Refused(work.request_id, work.attempt, error.reason, error.detail)
        except NoBlocksError as error:
            return Refused(work.request_id, work.attempt, RefusalReason.NO_BLOCKS, str(error), RETRY_AFTER_S)
        try:
            return self._hold(reserve, sequence)
        except TransferError as error:
            sequence.give_back(self._node.pool)
            reason = RefusalReason.QUEUE_FULL if error.retryable else RefusalReason.BAD_REQUEST
            return Refused(work.request_id, work.attempt, reason, str(error))

    def _hold(self, reserve: Reserve, sequence: Sequence) -> Reserved:
        """Grant the blocks that are to be written: those after the held prefix, without the spare ones.
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
        held = self._held.remember(hold)
        held.open(sequence)
        held.grant = grant
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
        sequence, answer = held.answers[0].sequence, held.hold.answer
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
        """What a sample emitted from `from_index` on goes out again; what still prefills has nothing yet."""
        held = self._held.get(resume.request_id)
        if held is None or held.hold.attempt != resume.attempt or held.work is None:
            return Refused(resume.request_id, resume.attempt, RefusalReason.UNKNOWN)
        if not 0 <= resume.sample < held.work.sampling.samples:
            detail = f"sample is {resume.sample}, the request has {held.work.sampling.samples}"
            return Refused(resume.request_id, resume.attempt, RefusalReason.BAD_REQUEST, detail)
        if held.hold.phase is not Phase.RESERVED:
            for answer in held.answers:
                if answer.sequence.sample == resume.sample:
                    answer.tell_again(resume.from_index)
        return Accepted(resume.request_id, resume.attempt)

    def _ask(self, asked: Renew | Commit | Release | Finish, event: reservation.Event) -> Accepted | Refused:
        """Feed a message and find its answer among the effects."""
        held = self._held.get(asked.request_id)
        if held is None:
            return Refused(asked.request_id, asked.attempt, RefusalReason.UNKNOWN)
        reply = self._held.feed(held, event)
        assert reply is not None
        return reply
