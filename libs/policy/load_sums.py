"""What decisions read of a load snapshot again and again, summed up once when it comes."""

from collections.abc import Iterator
from dataclasses import dataclass

from policy.core import LoadSnapshot, QueuedRequest, RequestId, RunningRequest
from policy.cost import ASSUMED_COST, prefill_s

RequestKey = tuple[RequestId, int]
"""A request and its attempt: one placement's name in bookings and snapshots."""


@dataclass(frozen=True, slots=True)
class LoadSums:
    sequences: int
    """Of running and reserved requests, as a step sees them: the samples of one request are one each."""
    kv_tokens: int
    """That these hold."""
    running_keys: frozenset[RequestKey]
    listed_keys: frozenset[RequestKey]
    """Running, queued or ended: what no booking need stand for any more."""
    computed_s: tuple[float, ...]
    """For each queued request, when its prefill is done, counted from the snapshot."""
    priority_max: int

    @property
    def queue_s(self) -> float:
        return self.computed_s[-1] if self.computed_s else 0.0


NO_LOAD = LoadSums(0, 0, frozenset(), frozenset(), (), 0)


def load_sums(load: LoadSnapshot) -> LoadSums:
    running_keys = frozenset((request.request_id, request.attempt) for request in load.running)
    queued_keys = {(request.request_id, request.attempt) for request in load.queued}
    ended_keys = {(request.request_id, request.attempt) for request in load.ended}
    busy: tuple[QueuedRequest | RunningRequest, ...] = (*load.running, *load.queued)
    return LoadSums(
        sequences=sum(request.samples for request in load.running),
        kv_tokens=sum(request.kv_tokens for request in load.running),
        running_keys=running_keys,
        listed_keys=running_keys | queued_keys | ended_keys,
        computed_s=tuple(_computed_s(load)),
        priority_max=max((request.priority for request in busy), default=0),
    )


def _computed_s(load: LoadSnapshot) -> Iterator[float]:
    cost = load.cost or ASSUMED_COST
    done_s = 0.0
    for request in load.queued:
        done_s += prefill_s(cost, request.new_tokens, request.prefix_tokens)
        yield done_s
