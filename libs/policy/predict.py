"""What the view says about the near future: how long prefills are busy, and what comes to each decode when.

Load counts once: a request that prefill lists and decode has reserved for is decode's; a booking
counts until a snapshot lists it. Times are seconds from now.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kvindex.core import InstanceId
from policy.core import CostCoefficients, QueuedRequest
from policy.cost import ASSUMED_COST, prefill_s, step_s
from policy.load_sums import RequestKey
from policy.view import Booking, ClusterView, InstanceView


@dataclass(frozen=True, slots=True)
class PrefillBacklog:
    """Work before a new request's first chunk."""

    requests: int = 0
    wait_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request on its way to a decode, which has reserved nothing for it yet."""

    at_s: float
    """When its prefill is done."""
    kv_tokens: int
    samples: int
    output_tokens_expected: int | None
    blocks: int
    """Of its reservation."""


@dataclass(frozen=True, slots=True)
class DecodeLoad:
    """What a decode will hold once all that is on its way has arrived, and nothing has ended."""

    sequences: int = 0
    """As a step sees them: the samples of one request are one each."""
    kv_tokens: int = 0
    blocks_pending: int = 0
    """Blocks that requests on their way will need and have not reserved yet."""


@dataclass(frozen=True, slots=True)
class Outlook:
    """The view as far as decisions read it, put together once a decision."""

    backlogs: Mapping[InstanceId, PrefillBacklog]
    arrivals: Mapping[InstanceId, Sequence[Arrival]]
    """By decode; one that nothing comes to is left out."""
    loads: Mapping[InstanceId, DecodeLoad]
    priority_max: int
    """Of all requests that the cluster is busy with; at least 0, which is a request's that names none."""


def cost_of(instance: InstanceView) -> CostCoefficients:
    if instance.load is None or instance.load.cost is None:
        return ASSUMED_COST
    return instance.load.cost


def outlook(view: ClusterView, now_s: float) -> Outlook:
    """Each prefill is a queue of its snapshot's work, then of what was booked, that drains meanwhile."""
    requests: dict[InstanceId, int] = {}
    free_at_s: dict[InstanceId, float] = {}
    coming: list[tuple[float, QueuedRequest | Booking]] = []
    for name, instance in view.instances.items():
        queued = instance.load.queued if instance.load is not None else ()
        requests[name] = len(queued)
        free_at_s[name] = instance.heard_at_s + instance.sums.queue_s
        done_s = (instance.heard_at_s + computed_s for computed_s in instance.sums.computed_s)
        coming.extend(zip(done_s, queued, strict=True))
    for booking in sorted(view.bookings.values(), key=lambda booking: booking.booked_at_s):
        name = booking.prefill
        if name in requests:
            work_s = prefill_s(cost_of(view.instances[name]), booking.new_tokens, booking.prefix_tokens)
            requests[name] += 1
            free_at_s[name] = max(free_at_s[name], booking.booked_at_s) + work_s
            coming.append((free_at_s[name], booking))
    arrivals = _arrivals(view, coming, now_s)
    return Outlook(
        backlogs={
            name: PrefillBacklog(requests[name], max(0.0, free_at_s[name] - now_s)) for name in requests
        },
        arrivals=arrivals,
        loads={name: _load(instance, arrivals.get(name, ())) for name, instance in view.instances.items()},
        priority_max=max(
            0,
            max((instance.sums.priority_max for instance in view.instances.values()), default=0),
            max((booking.priority for booking in view.bookings.values()), default=0),
        ),
    )


def step_with_s(instance: InstanceView, load: DecodeLoad, kv_tokens: int, samples: int = 1) -> float:
    """Time of a step at `instance` once a request of `kv_tokens` a sample has joined `load`."""
    return step_s(cost_of(instance), load.sequences + samples, load.kv_tokens + samples * kv_tokens)


def reserved_blocks(prompt_tokens: int, block_tokens: int, samples: int = 1) -> int:
    """Blocks of a reservation: the prompt's, the last one perhaps partial, plus one for each sample."""
    return -(-prompt_tokens // block_tokens) + samples


def present_load(instance: InstanceView) -> DecodeLoad:
    """Running and reserved, as its snapshot says; nothing of what is on its way."""
    return DecodeLoad(instance.sums.sequences, instance.sums.kv_tokens)


def room_blocks(instance: InstanceView, load: DecodeLoad) -> int:
    """Blocks that a further reservation can take; negative where more is on its way than fits."""
    snapshot = instance.load
    if snapshot is None:
        return instance.blocks - load.blocks_pending
    return snapshot.blocks_free + snapshot.blocks_cached - load.blocks_pending


def _arrivals(
    view: ClusterView, coming: Sequence[tuple[float, QueuedRequest | Booking]], now_s: float
) -> dict[InstanceId, list[Arrival]]:
    arrivals: dict[InstanceId, list[Arrival]] = {}
    counted: set[RequestKey] = set()
    for done_s, request in coming:
        decode = view.instances.get(request.decode)
        key = (request.request_id, request.attempt)
        if decode is None or key in counted or key in decode.sums.running_keys:
            continue
        counted.add(key)
        kv_tokens = request.new_tokens + request.prefix_tokens
        arrivals.setdefault(request.decode, []).append(
            Arrival(
                max(0.0, done_s - now_s),
                kv_tokens,
                request.samples,
                request.output_tokens_expected,
                reserved_blocks(kv_tokens, decode.block_tokens, request.samples),
            )
        )
    return arrivals


def _load(instance: InstanceView, arrivals: Sequence[Arrival]) -> DecodeLoad:
    return DecodeLoad(
        instance.sums.sequences + sum(arrival.samples for arrival in arrivals),
        instance.sums.kv_tokens + sum(arrival.samples * arrival.kv_tokens for arrival in arrivals),
        sum(arrival.blocks for arrival in arrivals),
    )
