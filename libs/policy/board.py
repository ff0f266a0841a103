"""A view added up for decisions: columns over its instances, and what is on its way to each decode.

Between two decisions little of a view changes, so a board is brought from one view to another by what differs
between them, and costs the work of a change, not of a cluster. It is a cache and no state of its own: from
any view it comes to the same. It stands at one view at a time; each chain of views has its own
(`ClusterView.board`). Load counts once: a request that prefill lists and decode has reserved for is decode's;
a booking counts until a snapshot lists it.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from math import inf
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from kvindex.core import InstanceId
from policy.columns import Bools, HolderColumns, empty
from policy.core import CostCoefficients, RequestId, Role
from policy.cost import prefill_s
from policy.fleets import Fleet, decode_values, fleets_of, place_of, places_of, prefill_values, readable_rows
from policy.instances import Instances
from policy.load_sums import Coming, DecodeLoad, RequestKey

if TYPE_CHECKING:
    from policy.view import Booking, ClusterView, InstanceView

Arriving: TypeAlias = "tuple[float, float, Coming | Booking]"
"""What is on its way to a decode, after when its prefill begins and is done by the conductor's clock."""


@dataclass(frozen=True, slots=True)
class Queue:
    """What a prefill has to do, as the snapshot and the bookings say."""

    requests: int
    free_at_s: float
    """When the last of it is done, by the conductor's clock; -inf without any."""


NO_QUEUE = Queue(0, -inf)


class Board:
    """`move_to` first; what is read then is of that view, until the next move."""

    def __init__(self) -> None:
        self._bookings: Mapping[RequestId, Booking] = {}
        self._instances: Instances
        self._build(Instances.of({}))

    def move_to(self, view: ClusterView) -> None:
        if view.instances is not self._instances:
            self._take_instances(view.instances)
        if view.bookings is not self._bookings:
            self._take_bookings(view.bookings)
        known = self._by_name
        for name in self._moved_prefills & known.keys():
            self._add_up_prefill(known[name])
        for name in self._moved_decodes & known.keys():
            self._add_up_decode(known[name])
        self._moved_prefills.clear()
        self._moved_decodes.clear()

    def fleet(self, model: str, fingerprint: str) -> Fleet | None:
        return self._fleets.get((model, fingerprint))

    def readable(self, fingerprint: str) -> Bools | None:
        """Which rows of `holders` have blocks of that kind and take requests; None where none has."""
        return self._readable.get(fingerprint)

    def instance(self, name: InstanceId) -> InstanceView:
        return self._by_name[name]

    def queue(self, prefill: InstanceId) -> Queue:
        return self._queues.get(prefill, NO_QUEUE)

    def load(self, decode: InstanceId) -> DecodeLoad:
        """With all that is on its way."""
        return self._loads[decode]

    def arriving(self, decode: InstanceId) -> list[Arriving]:
        """What is on its way there, each request once, without what decode has reserved for already."""
        found: dict[RequestKey, Arriving] = {}
        running = self._by_name[decode].sums.running_keys
        for (prefill, key), coming in self._queued.get(decode, {}).items():
            if key not in running and key not in found:
                heard_at_s = self._by_name[prefill].heard_at_s
                found[key] = (heard_at_s + coming.begins_s, heard_at_s + coming.done_s, coming)
        for booking in self._booked_for.get(decode, {}).values():
            if booking.key not in running and booking.key not in found:
                found[booking.key] = (*self._prefilled_s[booking.request_id], booking)
        return list(found.values())

    def told_queues_s(self, now_s: float) -> list[float]:
        """How long each prefill instance, draining ones too, is still busy with what its snapshot lists."""
        free_at_s = self.holders.columns.told_free_at_s[self._prefill_rows]
        told: list[float] = np.maximum(0.0, free_at_s - now_s).tolist()
        return told

    @property
    def priority_max(self) -> int:
        """Of all requests that the cluster is busy with; at least 0, which is one's that names none."""
        return max(0, *self._priorities)

    def _take_instances(self, instances: Mapping[InstanceId, InstanceView]) -> None:
        later = Instances.of(instances)
        replaced = self._instances.replaced_in(later)
        if replaced is None or any(place_of(known) != place_of(instance) for known, instance in replaced):
            self._build(later)
            return
        self._instances = later
        for known, instance in replaced:
            self._learn(known, instance)

    def _build(self, instances: Instances) -> None:
        """From nothing: who there is, or what one of them can do, is another."""
        self._instances, self._bookings = instances, {}
        self._by_name: dict[InstanceId, InstanceView] = dict(zip(instances, instances.values(), strict=True))
        names = sorted(instances)
        self.row_of: Mapping[InstanceId, int] = {name: row for row, name in enumerate(names)}
        self.holders = empty(HolderColumns, names, range(len(names)))
        serving = [instances[name] for name in names if not instances[name].draining]
        self._prefill_rows = np.array(
            [row for row, name in enumerate(names) if Role.PREFILL in instances[name].roles], np.intp
        )
        self._readable = readable_rows(serving, self.row_of)
        self._fleets = fleets_of(serving, self.row_of)
        self._prefills = places_of(fleet.prefills for fleet in self._fleets.values())
        self._decodes = places_of(fleet.decodes for fleet in self._fleets.values())
        self._queues: dict[InstanceId, Queue] = {}
        self._loads: dict[InstanceId, DecodeLoad] = {}
        self._queued: dict[InstanceId, dict[tuple[InstanceId, RequestKey], Coming]] = defaultdict(dict)
        """By decode: what prefills list for it."""
        self._booked_for: dict[InstanceId, dict[RequestId, Booking]] = defaultdict(dict)
        """By decode."""
        self._booked_at: dict[InstanceId, dict[RequestId, tuple[Booking, float]]] = defaultdict(dict)
        """By prefill, with its seconds of work there."""
        self._prefilled_s: dict[RequestId, tuple[float, float]] = {}
        """When the prefill of a booking begins and is done."""
        self._priorities: Counter[int] = Counter()
        self._moved_prefills: set[InstanceId] = set()
        self._moved_decodes: set[InstanceId] = set()
        """What has to be added up again."""
        for instance in instances.values():
            self._learn(None, instance)

    def _learn(self, known: InstanceView | None, instance: InstanceView) -> None:
        name, sums, cost = instance.instance, instance.sums, instance.cost
        self._by_name[name] = instance
        if known is not None:
            _uncount(self._priorities, known.sums.priority_max)
        self._priorities[sums.priority_max] += 1
        if known is not None and known.cost != cost:
            for booking, _ in self._booked_at[name].values():
                self._booked_at[name][booking.request_id] = booking, _work_s(booking, cost)
        if sums.coming or (known is not None and known.sums.coming):
            self._take_queued(name, () if known is None else known.sums.coming, sums.coming)
        self._moved_prefills.add(name)
        self._moved_decodes.add(name)
        self.holders.write(
            self.row_of[name],
            (
                instance.heard_at_s,
                instance.heard_at_s + sums.queue_s,
                cost.transfer_fixed_s,
                cost.transfer_bytes_per_s,
            ),
        )

    def _take_queued(
        self, prefill: InstanceId, known: tuple[Coming, ...], queued: tuple[Coming, ...]
    ) -> None:
        """What waits from one snapshot to the next, and only gets nearer, is nothing new to its decode."""
        before = {(coming.key, coming.decode): coming for coming in known}
        for coming in known:
            self._queued[coming.decode].pop((prefill, coming.key), None)
        for coming in queued:
            self._queued[coming.decode][prefill, coming.key] = coming
            was = before.pop((coming.key, coming.decode), None)
            if was is None or not coming.brings_what(was):
                self._moved_decodes.add(coming.decode)
        self._moved_decodes.update([coming.decode for coming in before.values()])

    def _take_bookings(self, bookings: Mapping[RequestId, Booking]) -> None:
        known = self._bookings
        gone = [booking for name, booking in known.items() if bookings.get(name) is not booking]
        fresh = [booking for name, booking in bookings.items() if known.get(name) is not booking]
        self._bookings = bookings
        for booking in gone:
            _uncount(self._priorities, booking.priority)
            self._booked_at[booking.prefill].pop(booking.request_id, None)
            self._booked_for[booking.decode].pop(booking.request_id, None)
            self._prefilled_s.pop(booking.request_id, None)
        for booking in fresh:
            self._priorities[booking.priority] += 1
            if booking.prefill in self._by_name:
                work_s = _work_s(booking, self._by_name[booking.prefill].cost)
                self._booked_at[booking.prefill][booking.request_id] = booking, work_s
                self._booked_for[booking.decode][booking.request_id] = booking
        for booking in (*gone, *fresh):
            self._moved_prefills.add(booking.prefill)
            self._moved_decodes.add(booking.decode)

    def _add_up_prefill(self, prefill: InstanceView) -> None:
        """A queue of its snapshot's work, then of what was booked, that drains meanwhile."""
        name, sums = prefill.instance, prefill.sums
        requests, free_at_s = len(sums.coming), prefill.heard_at_s + sums.queue_s
        booked, prefilled_s = self._booked_at[name], self._prefilled_s
        for booking, work_s in sorted(booked.values(), key=_booked_at_s):
            booked_at_s = booking.booked_at_s
            begins_s = free_at_s if free_at_s > booked_at_s else booked_at_s
            free_at_s = begins_s + work_s
            prefilled_s[booking.request_id] = begins_s, free_at_s
        requests += len(booked)
        self._queues[name] = queue = Queue(requests, free_at_s) if requests else NO_QUEUE
        if name in self._prefills:
            table, place = self._prefills[name]
            table.write(place, prefill_values(prefill, queue.requests, queue.free_at_s))

    def _add_up_decode(self, decode: InstanceView) -> None:
        """What runs there, and what is on its way."""
        name, present, running = decode.instance, decode.sums.present, decode.sums.running_keys
        sequences, kv_tokens, blocks = present.sequences, present.kv_tokens, 0
        arriving: dict[RequestKey, Coming | Booking] = {
            booking.key: booking for booking in self._booked_for[name].values()
        }
        for (_, key), coming in self._queued[name].items():
            arriving[key] = coming
        for key, request in arriving.items():
            if key not in running:
                sequences += request.samples
                kv_tokens += request.samples * request.kv_tokens
                blocks += request.blocks
        self._loads[name] = load = DecodeLoad(sequences, kv_tokens, blocks)
        if name in self._decodes:
            table, place = self._decodes[name]
            table.write(place, decode_values(decode, load))


def _work_s(booking: Booking, cost: CostCoefficients) -> float:
    return prefill_s(cost, booking.new_tokens, booking.prefix_tokens)


def _booked_at_s(booked: tuple[Booking, float]) -> float:
    return booked[0].booked_at_s


def _uncount(counts: Counter[int], value: int) -> None:
    counts[value] -= 1
    if not counts[value]:
        del counts[value]
