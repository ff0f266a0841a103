"""One request as decode holds it: its state, an answer for each sample, and what the gateway is told."""

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from cluster.messages import FailedEntry, FinishEntry, RefusalReason, TokensEntry, Work
from kvindex.core import InstanceId
from kvtransfer import Grant
from policy.core import FinishReason, RunningRequest
from protocol.reservation import Hold, Phase
from worker.outbox import Outbox, tokens_per_entry
from worker.sequence import Sequence


@dataclass(slots=True, eq=False)
class HeldAnswer:
    """One sample's answer: the owner of its sequence. What it tells is told in the name of its request."""

    request: "HeldRequest"
    sequence: Sequence

    def layer_done(self, layer: int, computed_tokens: int, last_layer: bool) -> None:
        """Nothing is streamed from a decoding sequence."""

    def chunk_done(self, computed_tokens: int) -> None:
        """Recomputing after a preemption: the gateway has these tokens."""

    def token_sampled(self, token_id: int, ending: FinishReason | None) -> None:
        self.tokens_forced((token_id,), ending)

    def tokens_forced(self, token_ids: tuple[int, ...], ending: FinishReason | None) -> None:
        self.tell_tokens(self.sequence.output_tokens - len(token_ids), token_ids)
        if ending is not None:
            self.tell_end()
            self.request.answer_ended(self)

    def failed(self, detail: str) -> None:
        self.request.failed(detail)

    def refused(self, detail: str) -> None:
        self.request.failed(detail, RefusalReason.BAD_REQUEST)

    def tell_tokens(self, first_index: int, token_ids: tuple[int, ...], cached_tokens: int = 0) -> None:
        work = self.sequence.work
        packed = np.asarray(token_ids, "<i4").tobytes()
        entry = TokensEntry(
            work.request_id,
            work.attempt,
            self.sequence.sample,
            first_index,
            packed,
            cached_tokens,
            self.sequence.logprobs_of(first_index, first_index + len(token_ids)),
        )
        self.request.outbox.put(work.gateway, entry)

    def tell_again(self, from_index: int) -> None:
        """All tokens from `from_index` on, and the end where it was reached."""
        sequence = self.sequence
        tokens_max = tokens_per_entry(sequence.work.sampling.logprobs)
        for start in range(max(0, from_index), sequence.output_tokens, tokens_max):
            first = sequence.work.prompt_tokens + start
            self.tell_tokens(start, tuple(sequence.token_ids[first : first + tokens_max]))
        self.tell_end()

    def tell_end(self) -> None:
        """The end, where it was reached; after it nothing follows that would show that it was lost."""
        sequence = self.sequence
        if sequence.ending is None:
            return
        work = sequence.work
        entry = FinishEntry(
            work.request_id, work.attempt, sequence.sample, sequence.output_tokens, sequence.ending
        )
        self.request.outbox.put(work.gateway, entry)


@dataclass(slots=True, eq=False)
class HeldRequest:
    """`work` and `answers` are empty once it is closed: only the tombstone is left.

    `answer_ended(answer)` is called after the last token of an answer, `broken(held)` after a failure; both
    were told to the gateway then. A reserved request has one answer, which the others fork from.
    """

    hold: Hold
    outbox: Outbox
    answer_ended: Callable[[HeldAnswer], None]
    broken: Callable[["HeldRequest"], None]
    work: Work | None = None
    answers: list[HeldAnswer] = field(default_factory=list)
    grant: Grant | None = None

    def open(self, sequence: Sequence) -> HeldAnswer:
        """Begin one sample's answer."""
        answer = HeldAnswer(self, sequence)
        self.work = sequence.work
        self.answers.append(answer)
        return answer

    def close(self) -> None:
        """Forget the tokens: nobody will ask for them again."""
        self.work = None
        self.answers = []

    @property
    def ended(self) -> bool:
        """Every sample's answer is complete."""
        return all(answer.sequence.ending is not None for answer in self.answers)

    def running(self) -> RunningRequest:
        """As load snapshots list it while blocks are held: all answers that still grow, or will, their KV
        together, the longest output."""
        assert self.work is not None
        sequences = [answer.sequence for answer in self.answers]
        growing = [sequence for sequence in sequences if sequence.ending is None]
        reserved = self.hold.phase is Phase.RESERVED
        return RunningRequest(
            self.hold.request_id,
            self.hold.attempt,
            sum(len(sequence.token_ids) for sequence in growing),
            max(sequence.output_tokens for sequence in sequences),
            self.work.sampling.output_tokens_max,
            committed=not reserved,
            samples=self.work.sampling.samples if reserved else len(growing),
            priority=self.work.priority,
            output_tokens_expected=sequences[0].output_tokens_expected,
        )

    def failed(self, detail: str, refusal: RefusalReason | None = None) -> None:
        """One sample that cannot go on ends them all: the request is placed again as a whole, but for a
        refusal, which it would meet everywhere."""
        work = self.work
        if work is None:
            return
        entry = FailedEntry(work.request_id, work.attempt, refusal is None, detail, reason=refusal)
        self.outbox.put(work.gateway, entry)
        self.broken(self)

    def tell_expired(self, owner: InstanceId | None) -> None:
        """The reservation's owner did not renew it: the request is better placed without that one."""
        assert self.work is not None, "closed"
        detail = "the reservation expired: prefill neither renewed nor committed it"
        entry = FailedEntry(self.work.request_id, self.work.attempt, True, detail, owner)
        self.outbox.put(self.work.gateway, entry)

    def tell_end(self) -> None:
        for answer in self.answers:
            answer.tell_end()
