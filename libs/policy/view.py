"""The cluster as the conductor sees it, and how each message folds into it.

Everything is frozen: a fold takes a view and returns the next one, and time is an argument. Owns what
is known (records, latest load snapshots, bookings); what follows from it is `policy.predict`.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from kvindex.core import InstanceId
from policy.board import Board
from policy.core import (
    ENDED_LISTED_MAX,
    CostCoefficients,
    EndedRequest,
    InstanceState,
    LoadSnapshot,
    Placement,
    RequestId,
    Role,
)
from policy.instances import Instances
from policy.lengths import OutputLengths, with_ended
from policy.load_sums import NO_LOAD, LoadSums, RequestKey, load_sums, reserved_blocks


@dataclass(frozen=True, slots=True)
class InstanceView:
    """One registered instance. Times are the conductor's own clock."""

    instance: InstanceId
    incarnation: int
    roles: tuple[Role, ...]
    host: str
    model: str
    fingerprint: str
    blocks: int
    block_bytes: int
    block_tokens: int
    heard_at_s: float
    """When its record or its latest snapshot came."""
    load: LoadSnapshot | None = None
    load_seq: int = 0
    """The snapshot's number on its subject: an older one that comes late is ignored."""
    sums: LoadSums = field(init=False, compare=False, repr=False)
    """Of `load`, once a snapshot and not once a decision."""

    def __post_init__(self) -> None:
        sums = NO_LOAD if self.load is None else load_sums(self.load, self.block_tokens)
        object.__setattr__(self, "sums", sums)

    @property
    def draining(self) -> bool:
        return self.load is not None and self.load.state is InstanceState.DRAINING

    @property
    def cost(self) -> CostCoefficients:
        """What it announced, or what is assumed until then."""
        return self.sums.cost

    @property
    def free_blocks(self) -> int:
        """Blocks that a reservation could take now."""
        return self.blocks if self.load is None else self.load.blocks_free + self.load.blocks_cached


@dataclass(frozen=True, slots=True)
class Booking:
    """Load that a decision will bring and no snapshot shows yet."""

    request_id: RequestId
    attempt: int
    prefill: InstanceId
    decode: InstanceId
    new_tokens: int
    prefix_tokens: int
    booked_at_s: float
    blocks: int
    """Of its reservation at decode."""
    samples: int = 1
    priority: int = 0
    output_tokens_expected: int | None = None
    elsewhere: bool = field(default=False, compare=False)
    """Another conductor decided it: a booking is the same wherever it was decided."""

    @property
    def key(self) -> RequestKey:
        return (self.request_id, self.attempt)

    @property
    def kv_tokens(self) -> int:
        """What decode will hold at the first token."""
        return self.new_tokens + self.prefix_tokens


@dataclass(frozen=True, slots=True)
class ClusterView:
    instances: Mapping[InstanceId, InstanceView] = field(default_factory=dict)
    bookings: Mapping[RequestId, Booking] = field(default_factory=dict)
    """At most one a request, that of its latest attempt, in the order in which they came."""
    lengths: OutputLengths = field(default_factory=OutputLengths)
    board: Board = field(default_factory=Board, compare=False, repr=False)
    """A cache of what decisions read, handed on from fold to fold: see `policy.board`."""


def with_instance(view: ClusterView, instance: InstanceView) -> ClusterView:
    """A new record. One of the same incarnation keeps the load we know; another starts afresh."""
    known = view.instances.get(instance.instance)
    if known is not None and known.incarnation == instance.incarnation:
        instance = replace(instance, load=known.load, load_seq=known.load_seq, heard_at_s=known.heard_at_s)
    elif known is not None:
        view = without_instance(view, instance.instance)
    if instance.instance in view.instances:
        return replace(view, instances=Instances.of(view.instances).with_replaced(instance))
    return replace(view, instances=Instances.of({**view.instances, instance.instance: instance}))


def without_instance(view: ClusterView, instance: InstanceId) -> ClusterView:
    """The instance is gone, and the bookings that count on it."""
    return replace(
        view,
        instances=Instances.of({name: known for name, known in view.instances.items() if name != instance}),
        bookings={
            request_id: booking
            for request_id, booking in view.bookings.items()
            if instance not in (booking.prefill, booking.decode)
        },
    )


def with_instances(view: ClusterView, registered: Iterable[InstanceView]) -> ClusterView:
    """The whole registry: drops who is not in it, adds who is new, leaves unchanged records alone."""
    by_name = {instance.instance: instance for instance in registered}
    for name in view.instances.keys() - by_name.keys():
        view = without_instance(view, name)
    for name, instance in by_name.items():
        known = view.instances.get(name)
        if known is None or _record(known) != _record(instance):
            view = with_instance(view, instance)
    return view


def with_load(view: ClusterView, load: LoadSnapshot, incarnation: int, seq: int, now_s: float) -> ClusterView:
    """A load snapshot, received at `now_s`. Ends the bookings it lists, and learns from what ended.

    One of an unknown instance, a dead predecessor, or older than what we have changes nothing.
    """
    known = view.instances.get(load.instance)
    if (
        known is None
        or known.incarnation != incarnation
        or (known.load is not None and seq <= known.load_seq)
    ):
        return view
    instance = replace(known, load=load, load_seq=seq, heard_at_s=now_s)
    return ClusterView(
        Instances.of(view.instances).with_replaced(instance),
        _without_listed(view.bookings, instance),
        with_ended(view.lengths, _newly_ended(known.load, load)),
        view.board,
    )


def with_booking(view: ClusterView, booking: Booking) -> ClusterView:
    """Takes the place of an earlier attempt's booking; a stale attempt changes nothing."""
    known = view.bookings.get(booking.request_id)
    if known is not None and known.attempt > booking.attempt:
        return view
    earlier = view.bookings
    if known is not None:
        earlier = {name: other for name, other in earlier.items() if other is not known}
    return replace(view, bookings={**earlier, booking.request_id: booking})


def with_placement(
    view: ClusterView,
    placement: Placement,
    prompt_tokens: int,
    now_s: float,
    *,
    samples: int = 1,
    priority: int = 0,
    elsewhere: bool = False,
) -> ClusterView:
    """Books what a placement will bring; one on instances that we do not know (yet), or that could never hold
    it, changes nothing."""
    prefill, decode = view.instances.get(placement.prefill), view.instances.get(placement.decode)
    if prefill is None or decode is None:
        return view
    prefix_tokens = placement.prefix_blocks * prefill.block_tokens
    blocks = reserved_blocks(max(prompt_tokens, prefix_tokens), prefill.block_tokens, samples)
    if blocks > min(prefill.blocks, decode.blocks):
        return view
    booking = Booking(
        request_id=placement.request_id,
        attempt=placement.attempt,
        prefill=placement.prefill,
        decode=placement.decode,
        new_tokens=max(0, prompt_tokens - prefix_tokens),
        prefix_tokens=prefix_tokens,
        booked_at_s=now_s,
        blocks=blocks,
        samples=samples,
        priority=priority,
        output_tokens_expected=placement.output_tokens_expected,
        elsewhere=elsewhere,
    )
    return with_booking(view, booking)


def expire(view: ClusterView, now_s: float, booking_ttl_s: float) -> ClusterView:
    """Without the bookings that no snapshot confirmed within `booking_ttl_s`."""
    oldest_s = now_s - booking_ttl_s
    if all(booking.booked_at_s > oldest_s for booking in view.bookings.values()):
        return view
    return replace(
        view,
        bookings={name: booking for name, booking in view.bookings.items() if booking.booked_at_s > oldest_s},
    )


def _record(instance: InstanceView) -> InstanceView:
    return replace(instance, heard_at_s=0.0, load=None, load_seq=0)


def _without_listed(
    bookings: Mapping[RequestId, Booking], instance: InstanceView
) -> Mapping[RequestId, Booking]:
    """Either of a placement's instances shows its load: prefill names the decode it works for. What came
    and went between two snapshots is among the ended."""
    sums = instance.sums
    told = [name for name in bookings.keys() & sums.listed if bookings[name].key in sums.listed_keys]
    if not told:
        return bookings
    kept = dict(bookings)
    for name in told:
        del kept[name]
    return kept


def _newly_ended(known: LoadSnapshot | None, load: LoadSnapshot) -> tuple[EndedRequest, ...]:
    """What ended before we first heard of the instance counts too: it is as telling."""
    known_total = 0 if known is None else known.ended_total
    new = min(max(0, load.ended_total - known_total), len(load.ended), ENDED_LISTED_MAX)
    return load.ended[len(load.ended) - new :]
