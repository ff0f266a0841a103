"""The requests that ended here last, for the load snapshots: what came and went between two of them shows
in neither, and how long its answer was tells how long the next ones will be."""

from collections import deque

from kvhash import BLOCK_TOKENS
from policy.core import ENDED_LISTED_MAX, EndedRequest
from worker.sequence import Sequence


class EndedRequests:
    def __init__(self) -> None:
        self._ended: deque[EndedRequest] = deque(maxlen=ENDED_LISTED_MAX)
        self.total = 0

    def add(self, sequence: Sequence, output_tokens: int | None) -> None:
        """`output_tokens`: length of the answer, over all attempts; None where it did not come to its end."""
        work = sequence.work
        family = bytes(sequence.hashes[0]) if work.prompt_tokens >= BLOCK_TOKENS else b""
        self._ended.append(EndedRequest(work.request_id, work.attempt, output_tokens, work.tenant, family))
        self.total += 1

    def latest(self) -> tuple[EndedRequest, ...]:
        """Oldest first."""
        return tuple(self._ended)
