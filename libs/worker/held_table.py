"""All requests that decode holds: carries out what `protocol.reservation` says of each.

Owns their blocks, grants and sequences from the reservation to the tombstone; what comes in and what is
admitted is `decode_duty`'s.
"""

import asyncio
from collections.abc import Iterator

from cluster.messages import Accepted, Commit, Refused
from kvtransfer import Grant
from policy.core import RequestId
from protocol import reservation
from protocol.reservation import Hold, Phase
from worker.held import HeldAnswer, HeldRequest
from worker.node import Node
from worker.sequence import Sequence

_HOLDING = (Phase.RESERVED, Phase.RUNNING)
"""Blocks are held, and load snapshots list it."""
_WHOLE = (reservation.AnswerEnded, reservation.FinishAsked)
"""An answer is whole at its last token, or where the gateway cut it: at a stop string, mostly."""


class HeldTable:
    """`changed` is set whenever something happened to one of them."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self._held: dict[RequestId, HeldRequest] = {}
        self.changed = asyncio.Event()

    def __len__(self) -> int:
        return len(self._held)

    def __iter__(self) -> Iterator[HeldRequest]:
        """A copy: while one is looked at others may go."""
        return iter(list(self._held.values()))

    def get(self, request_id: RequestId) -> HeldRequest | None:
        return self._held.get(request_id)

    def holding(self) -> Iterator[HeldRequest]:
        """Those that are reserved or running."""
        return (held for held in self if held.hold.phase in _HOLDING)

    def remember(self, hold: Hold) -> HeldRequest:
        held = HeldRequest(hold, self._node.outbox, self._answer_ended, self._broken)
        self._held[hold.request_id] = held
        return held

    def feed(self, held: HeldRequest, event: reservation.Event) -> Accepted | Refused | None:
        """One event through the machine; its effects are carried out or begun when this returns."""
        before = held.hold.phase
        held.hold, effects = reservation.step(held.hold, event, self._node.now_s())
        if before in _HOLDING and held.hold.phase not in _HOLDING:
            self._ended(held, whole=before is Phase.RUNNING and isinstance(event, _WHOLE))
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
                    self._begin_free(held)
                case reservation.TellEnd():
                    held.tell_end()
                case reservation.ForgetTokens():
                    held.close()
                case reservation.Forget():
                    self._forget(held)
        self.changed.set()
        return reply

    def adopt(self, held: HeldRequest, sequence: Sequence, first_token_id: int) -> None:
        """Coupled: the sequence has its first token, and its place in the step loop."""
        answer = held.open(sequence)
        sequence.owner = answer
        self._begin_answers(held, answer, first_token_id, sequence.cached_prompt_tokens)

    async def _start(self, held: HeldRequest, commit: Commit) -> None:
        """The grant ends before the first step: from now on the blocks are written here only."""
        assert held.grant is not None
        await self._node.endpoint.revoke(held.grant)
        if held.hold.phase is not Phase.RUNNING or not held.answers:
            return
        answer = held.answers[0]
        sequence = answer.sequence
        await self._node.engine.load_blocks(sequence.block_ids[sequence.stored_blocks :])
        if held.hold.phase is not Phase.RUNNING or not held.answers:
            return
        sequence.owner = answer
        sequence.goes_on = sequence.decodes = True
        sequence.context_tokens = len(sequence.token_ids)
        sequence.store_full_blocks(self._node.pool)
        if sequence.append(commit.first_token_id, commit.first_token_logprobs) is None:
            self._node.steps.add(sequence)
        self._begin_answers(held, answer, commit.first_token_id, commit.cached_tokens)
        self._node.pool_changed()

    def _begin_answers(
        self, held: HeldRequest, first: HeldAnswer, first_token_id: int, cached_tokens: int
    ) -> None:
        """The other samples fork from the first one's prompt; each draws its own first token here."""
        sequence = first.sequence
        prompt_tokens = len(sequence.token_ids) - 1
        for sample in range(1, sequence.work.sampling.samples):
            answer = held.open(sequence.fork(self._node.pool, sample, prompt_tokens))
            answer.sequence.owner = answer
            self._node.steps.add(answer.sequence)
        first.tell_tokens(sequence.output_tokens - 1, (first_token_id,), cached_tokens)
        if sequence.ending is not None:
            first.tell_end()
            self._answer_ended(first)

    def _ended(self, held: HeldRequest, *, whole: bool) -> None:
        if held.answers:
            sequences = [answer.sequence for answer in held.answers]
            output_tokens = max(sequence.output_tokens for sequence in sequences) if whole else None
            self._node.ended.add(sequences[0], output_tokens)

    def _begin_free(self, held: HeldRequest) -> None:
        sequences = [answer.sequence for answer in held.answers]
        for sequence in sequences:
            # At once: a step that ends in this turn of the event loop tells a closed record nothing.
            self._node.steps.leave(sequence)
        self._node.spawn(self._free(sequences, held.grant), "free")
        held.close()

    async def _free(self, sequences: list[Sequence], grant: Grant | None) -> None:
        """No byte lands and no step runs in the blocks any more; then they go back."""
        if grant is not None:
            await self._node.endpoint.revoke(grant)
        for sequence in sequences:
            await self._node.steps.remove(sequence)
        for sequence in sorted(sequences, key=lambda sequence: sequence.broken):
            sequence.give_back(self._node.pool)  # a broken one last: what others use cannot be forgotten
        self._node.pool_changed()

    def _answer_ended(self, answer: HeldAnswer) -> None:
        """The blocks go back at once and stay cached; the tokens wait for the gateway's finish."""
        answer.sequence.give_back(self._node.pool)
        self._node.pool_changed()
        if answer.request.ended:
            self.feed(answer.request, reservation.AnswerEnded())

    def _broken(self, held: HeldRequest) -> None:
        self.feed(held, reservation.CancelAsked(held.hold.attempt))

    def _forget(self, held: HeldRequest) -> None:
        if self._held.get(held.hold.request_id) is held:
            del self._held[held.hold.request_id]
