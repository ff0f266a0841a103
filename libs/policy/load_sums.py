"""What decisions read of a load snapshot again and again, summed up once when it comes."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from kvindex.core import InstanceId
from policy.columns import Floats
from policy.core import CostCoefficients, LoadSnapshot, QueuedRequest, RequestId, RunningRequest
from policy.cost import ASSUMED_COST, prefill_s
from policy.lengths import tokens_left

RequestKey = tuple[RequestId, int]
"""A request and its attempt: one placement's name in bookings and snapshots."""


@dataclass(frozen=True, slots=True)
class DecodeLoad:
    """What a decode will hold once all that is on its way has arrived, and nothing has ended."""

    sequences: int = 0
    """As a step sees them: the samples of one request are one each."""
    kv_tokens: int = 0
    blocks_pending: int = 0
    """Blocks that requests on their way will need and have not reserved yet."""


@dataclass(frozen=True, slots=True)
class Coming:
    """A queued request as the decode will see it that it is meant for."""

    key: RequestKey
    decode: InstanceId
    begins_s: float
    """When its prefill begins, counted from the snapshot: it reserves at decode then."""
    done_s: float
    """When its prefill is done."""
    kv_tokens: int
    samples: int
    output_tokens_expected: int | None
    blocks: int
    """Of its reservation."""

    def brings_what(self, other: "Coming") -> bool:
        """The same load, whenever it comes."""
        return (
            self.kv_tokens == other.kv_tokens
            and self.samples == other.samples
            and self.blocks == other.blocks
        )


@dataclass(frozen=True, slots=True)
class RunningColumns:
    """Running requests, one place in each column for each."""

    tokens_left: Floats
    """As far as is expected."""
    sequences: Floats
    kv_tokens: Floats
    blocks: Floats


@dataclass(frozen=True)
class LoadSums:
    present: DecodeLoad
    """Running and reserved requests alone."""
    running_keys: frozenset[RequestKey]
    listed: frozenset[RequestId]
    """Running, queued or ended, in any attempt: of these bookings may be over."""
    listed_keys: frozenset[RequestKey]
    """The same with their attempts: what no booking need stand for any more."""
    coming: tuple[Coming, ...]
    """All that is queued, in order."""
    queue_s: float
    """When the last of it is done, counted from the snapshot."""
    priority_max: int
    cost: CostCoefficients
    running: tuple[RunningRequest, ...]
    block_tokens: int

    @cached_property
    def running_columns(self) -> RunningColumns:
        """Made when first wanted: most snapshots are never looked at so closely."""
        kv_tokens = np.array([request.kv_tokens for request in self.running], np.float64)
        return RunningColumns(
            np.array([_tokens_left(request) for request in self.running], np.float64),
            np.array([request.samples for request in self.running], np.float64),
            kv_tokens,
            np.ceil(kv_tokens / self.block_tokens),
        )


NO_LOAD = LoadSums(DecodeLoad(), frozenset(), frozenset(), frozenset(), (), 0.0, 0, ASSUMED_COST, (), 1)


def load_sums(load: LoadSnapshot, block_tokens: int) -> LoadSums:
    """Blocks are of one size at an instance and at the decodes that it works for."""
    cost = load.cost or ASSUMED_COST
    coming = tuple(_coming(load, cost, block_tokens))
    running_keys = frozenset([(request.request_id, request.attempt) for request in load.running])
    listed_keys = running_keys.union(
        [request.key for request in coming],
        [(request.request_id, request.attempt) for request in load.ended],
    )
    busy: tuple[QueuedRequest | RunningRequest, ...] = (*load.running, *load.queued)
    return LoadSums(
        present=decode_load(load.running),
        running_keys=running_keys,
        listed=frozenset([request_id for request_id, _ in listed_keys]),
        listed_keys=listed_keys,
        coming=coming,
        queue_s=coming[-1].done_s if coming else 0.0,
        priority_max=max([request.priority for request in busy], default=0),
        cost=cost,
        running=load.running,
        block_tokens=block_tokens,
    )


def decode_load(running: Sequence[RunningRequest]) -> DecodeLoad:
    """Of what runs and is reserved, with nothing on its way."""
    return DecodeLoad(
        sequences=sum([request.samples for request in running]),
        kv_tokens=sum([request.kv_tokens for request in running]),
    )


def reserved_blocks(prompt_tokens: int, block_tokens: int, samples: int = 1) -> int:
    """Blocks of a reservation: the prompt's, the last one perhaps partial, plus one for each sample."""
    return -(-prompt_tokens // block_tokens) + samples


def _coming(load: LoadSnapshot, cost: CostCoefficients, block_tokens: int) -> Iterator[Coming]:
    done_s, listed = 0.0, set[RequestKey]()
    for request in load.queued:
        key = (request.request_id, request.attempt)
        if key in listed:  # a second time it is no further request, wherever that one goes
            continue
        listed.add(key)
        begins_s = done_s
        if request.new_tokens:  # else it is computed, and only being handed over
            done_s += prefill_s(cost, request.new_tokens, request.prefix_tokens)
        kv_tokens = request.new_tokens + request.prefix_tokens
        yield Coming(
            key,
            request.decode,
            begins_s,
            done_s,
            kv_tokens,
            request.samples,
            request.output_tokens_expected,
            reserved_blocks(kv_tokens, block_tokens, request.samples),
        )


def _tokens_left(request: RunningRequest) -> int:
    return tokens_left(request.output_tokens_expected, request.output_tokens, request.output_tokens_max)
