"""What the view says about the near future: how long prefills are busy, how full decodes will be.

Load counts once: a request that prefill lists and decode has reserved for is decode's; a booking
counts until a snapshot lists it.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from kvindex.core import InstanceId
from policy.core import CostCoefficients, LoadSnapshot, QueuedRequest
from policy.cost import ASSUMED_COST, prefill_s, step_s
from policy.view import Booking, ClusterView, InstanceView, RequestKey


@dataclass(frozen=True, slots=True)
class PrefillBacklog:
    """Work before a new request's first chunk."""

    requests: int = 0
    wait_s: float = 0.0


@dataclass(frozen=True, slots=True)
class DecodeLoad:
    """What a decode will hold once all that is on its way has arrived."""

    requests: int = 0
    """As a step sees them: the samples of one request are one each."""
    kv_tokens: int = 0
    blocks_pending: int = 0
    """Blocks that requests on their way will need and have not reserved yet."""


def cost_of(instance: InstanceView) -> CostCoefficients:
    if instance.load is None or instance.load.cost is None:
        return ASSUMED_COST
    return instance.load.cost


def prefill_backlogs(view: ClusterView, now_s: float) -> Mapping[InstanceId, PrefillBacklog]:
    """Per instance: one queue that takes its snapshot's work, then what was booked, and drains meanwhile."""
    requests: dict[InstanceId, int] = {}
    free_at_s: dict[InstanceId, float] = {}
    for name, instance in view.instances.items():
        queued = instance.load.queued if instance.load is not None else ()
        cost = cost_of(instance)
        requests[name] = len(queued)
        free_at_s[name] = instance.heard_at_s + sum(
            prefill_s(cost, request.new_tokens, request.prefix_tokens) for request in queued
        )
    for booking in sorted(view.bookings.values(), key=lambda booking: booking.booked_at_s):
        name = booking.prefill
        if name in requests:
            work_s = prefill_s(cost_of(view.instances[name]), booking.new_tokens, booking.prefix_tokens)
            requests[name] += 1
            free_at_s[name] = max(free_at_s[name], booking.booked_at_s) + work_s
    return {
        name: PrefillBacklog(requests[name], max(0.0, free_at_s[name] - now_s)) for name in view.instances
    }


def present_loads(view: ClusterView) -> Mapping[InstanceId, DecodeLoad]:
    """Per instance: running and reserved, as its snapshot says; nothing of what is on its way."""
    return {name: _running_load(instance.load) for name, instance in view.instances.items()}


def decode_loads(view: ClusterView) -> Mapping[InstanceId, DecodeLoad]:
    """Per instance: running and reserved, plus queued at a prefill for it, plus booked on it."""
    loads = dict(present_loads(view))
    counted = {name: _running_keys(instance.load) for name, instance in view.instances.items()}
    coming: list[QueuedRequest | Booking] = list(view.bookings.values())
    for instance in view.instances.values():
        if instance.load is not None:
            coming.extend(instance.load.queued)
    for request in coming:
        keys = counted.get(request.decode)
        key = (request.request_id, request.attempt)
        if keys is None or key in keys:
            continue
        keys.add(key)
        load = loads[request.decode]
        block_tokens = view.instances[request.decode].block_tokens
        kv_tokens = request.new_tokens + request.prefix_tokens
        loads[request.decode] = DecodeLoad(
            load.requests + 1,
            load.kv_tokens + kv_tokens,
            load.blocks_pending + reserved_blocks(kv_tokens, block_tokens),
        )
    return loads


def step_with_s(instance: InstanceView, load: DecodeLoad, kv_tokens: int) -> float:
    """Time of a step at `instance` once a request of `kv_tokens` has joined `load`."""
    return step_s(cost_of(instance), load.requests + 1, load.kv_tokens + kv_tokens)


def reserved_blocks(prompt_tokens: int, block_tokens: int) -> int:
    """Blocks of a reservation: the prompt's, the last one perhaps partial, plus one."""
    return -(-prompt_tokens // block_tokens) + 1


def room_blocks(instance: InstanceView, load: DecodeLoad) -> int:
    """Blocks that a further reservation can take; negative where more is on its way than fits."""
    snapshot = instance.load
    if snapshot is None:
        return instance.blocks - load.blocks_pending
    return snapshot.blocks_free + snapshot.blocks_cached - load.blocks_pending


def next_finish_s(instance: InstanceView, load: DecodeLoad) -> float:
    """Time until the first running request must end, by its output limit; 0 where none runs."""
    if instance.load is None or not instance.load.running:
        return 0.0
    tokens = min(
        max(0, request.output_tokens_max - request.output_tokens) for request in instance.load.running
    )
    return tokens * step_s(cost_of(instance), load.requests, load.kv_tokens)


def _running_load(load: LoadSnapshot | None) -> DecodeLoad:
    if load is None:
        return DecodeLoad()
    sequences = sum(request.samples for request in load.running)
    return DecodeLoad(sequences, sum(request.kv_tokens for request in load.running))


def _running_keys(load: LoadSnapshot | None) -> set[RequestKey]:
    if load is None:
        return set()
    return {(request.request_id, request.attempt) for request in load.running}
