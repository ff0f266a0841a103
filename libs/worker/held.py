"""One request as decode holds it: its state, its sequence, and what the gateway is told of it."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from cluster.messages import FailedEntry, FinishEntry, TokensEntry
from kvindex.core import InstanceId
from kvtransfer import Grant
from policy.core import FinishReason
from protocol.reservation import Hold
from worker.outbox import TOKENS_PER_ENTRY_MAX, Outbox
from worker.sequence import Sequence


@dataclass(slots=True, eq=False)
class HeldRequest:
    """The owner of its sequence. `sequence` None: closed, only the tombstone is left.

    `ended(held)` is called after the last token, `broken(held)` after a failure; both were told to the
    gateway then.
    """

    hold: Hold
    outbox: Outbox
    ended: Callable[["HeldRequest"], None]
    broken: Callable[["HeldRequest"], None]
    sequence: Sequence | None = None
    grant: Grant | None = None
    ending: FinishReason | None = None

    def layer_done(self, layer: int, computed_tokens: int, last_layer: bool) -> None:
        """Nothing is streamed from a decoding sequence."""

    def chunk_done(self, computed_tokens: int) -> None:
        """Recomputing after a preemption: the gateway has these tokens."""

    def token_sampled(self, token_id: int, ending: FinishReason | None) -> None:
        sequence = self._open()
        self.tell_tokens(sequence.output_tokens - 1, (token_id,))
        if ending is not None:
            self.ending = ending
            self._tell_finish(ending)
            self.ended(self)

    def failed(self, detail: str) -> None:
        if self.sequence is None:
            return
        work = self.sequence.work
        self.outbox.put(work.gateway, FailedEntry(work.request_id, work.attempt, True, detail))
        self.broken(self)

    def tell_expired(self, owner: InstanceId | None) -> None:
        """The reservation's owner did not renew it: the request is better placed without that one."""
        work = self._open().work
        detail = "the reservation expired: prefill neither renewed nor committed it"
        self.outbox.put(work.gateway, FailedEntry(work.request_id, work.attempt, True, detail, owner))

    def tell_tokens(self, first_index: int, token_ids: tuple[int, ...], cached_tokens: int = 0) -> None:
        work = self._open().work
        packed = np.asarray(token_ids, "<i4").tobytes()
        entry = TokensEntry(work.request_id, work.attempt, 0, first_index, packed, cached_tokens)
        self.outbox.put(work.gateway, entry)

    def tell_again(self, from_index: int) -> None:
        """All tokens from `from_index` on, and the end where it was reached."""
        sequence = self._open()
        for start in range(max(0, from_index), sequence.output_tokens, TOKENS_PER_ENTRY_MAX):
            first = sequence.work.prompt_tokens + start
            self.tell_tokens(start, tuple(sequence.token_ids[first : first + TOKENS_PER_ENTRY_MAX]))
        self.tell_end()

    def tell_end(self) -> None:
        """The end, where it was reached; after it nothing follows that would show that it was lost."""
        if self.ending is not None:
            self._tell_finish(self.ending)

    def _tell_finish(self, ending: FinishReason) -> None:
        sequence = self._open()
        work = sequence.work
        entry = FinishEntry(work.request_id, work.attempt, 0, sequence.output_tokens, ending)
        self.outbox.put(work.gateway, entry)

    def _open(self) -> Sequence:
        assert self.sequence is not None, "closed"
        return self.sequence
