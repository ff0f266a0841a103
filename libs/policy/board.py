"""A view added up for decisions: columns over its instances, and what is on its way to each decode.

Between two decisions little of a view changes, so a board is brought from one view to another by what differs
between them, and costs the work of a change, not of a cluster. It is a cache and no state of its own: from
any view it comes to the same. It stands at one view at a time; each chain of views has its own
(`ClusterView.board`). Load counts once: a request that prefill lists and decode has reserved for is decode's;
a booking counts until a snapshot lists it.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import compress, count
from math import inf
from operator import is_not
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from kvindex.core import InstanceId
from policy.columns import Bools, DecodeColumns, HolderColumns, PrefillColumns, RoleColumnsT, Table, empty
from policy.core import RequestId, Role
from policy.cost import prefill_s
from policy.load_sums import Coming, DecodeLoad, RequestKey

if TYPE_CHECKING:
    from policy.view import Booking, ClusterView, InstanceView

Arriving: TypeAlias = "tuple[float, Coming | Booking]"
"""What is on its way to a decode, and when its prefill is done by the conductor's clock."""


@dataclass(frozen=True, slots=True)
class Queue:
    """What a prefill has to do, as the snapshot and the bookings say."""

    requests: int
    free_at_s: float
    """When the last of it is done, by the conductor's clock; -inf without any."""


NO_QUEUE = Queue(0, -inf)


@dataclass(frozen=True, slots=True)
class Fleet:
    """Instances of one model and fingerprint that take requests, by what they do."""

    block_tokens: int
    """Of all of them: instances of one fingerprint have blocks of one size."""
    prefills: Table[PrefillColumns]
    decodes: Table[DecodeColumns]


class Board:
    """`move_to` first; what is read then is of that view, until the next move."""

    def __init__(self) -> None:
        self._instances: Mapping[InstanceId, InstanceView] = {}
        self._in_order: list[InstanceView] = []
        """As the view's mapping has them."""
        self._bookings: Mapping[RequestId, Booking] = {}
        self._build(self._instances)

    def move_to(self, view: ClusterView) -> None:
        if view.instances is not self._instances:
            self._take_instances(view.instances)
        if view.bookings is not self._bookings:
            self._take_bookings(view.bookings)
        for name in self._moved_prefills & self._instances.keys():
            self._add_up_prefill(self._instances[name])
        for name in self._moved_decodes & self._instances.keys():
            self._add_up_decode(self._instances[name])
        self._moved_prefills.clear()
        self._moved_decodes.clear()

    def fleet(self, model: str, fingerprint: str) -> Fleet | None:
        return self._fleets.get((model, fingerprint))

    def readable(self, fingerprint: str) -> Bools | None:
        """Which rows of `holders` have blocks of that kind and take requests; None where none has."""
        return self._readable.get(fingerprint)

    def instance(self, name: InstanceId) -> InstanceView:
        return self._instances[name]

    def queue(self, prefill: InstanceId) -> Queue:
        return self._queues.get(prefill, NO_QUEUE)

    def load(self, decode: InstanceId) -> DecodeLoad:
        """With all that is on its way."""
        return self._loads[decode]

    def arriving(self, decode: InstanceId) -> list[Arriving]:
        """What is on its way there, each request once, without what decode has reserved for already."""
        found: dict[RequestKey, Arriving] = {}
        running = self._instances[decode].sums.running_keys
        for (prefill, key), coming in self._queued.get(decode, {}).items():
            if key not in running and key not in found:
                found[key] = (self._instances[prefill].heard_at_s + coming.done_s, coming)
        for booking in self._booked_for.get(decode, {}).values():
            if booking.key not in running and booking.key not in found:
                found[booking.key] = (self._done_s[booking.request_id], booking)
        return list(found.values())

    @property
    def priority_max(self) -> int:
        """Of all requests that the cluster is busy with; at least 0, which is one's that names none."""
        return max(0, *self._priorities)

    def _take_instances(self, instances: Mapping[InstanceId, InstanceView]) -> None:
        known, in_order = self._in_order, list(instances.values())
        changed = list(compress(count(), map(is_not, known, in_order)))
        if len(in_order) != len(known) or any(_place(known[n]) != _place(in_order[n]) for n in changed):
            self._build(instances)
            return
        self._instances, self._in_order = instances, in_order
        for n in changed:
            self._forget(known[n])
            self._learn(in_order[n])

    def _build(self, instances: Mapping[InstanceId, InstanceView]) -> None:
        """From nothing: who there is, or what one of them can do, is another."""
        self._instances, self._in_order, self._bookings = instances, list(instances.values()), {}
        names = sorted(instances)
        self.row_of: Mapping[InstanceId, int] = {name: row for row, name in enumerate(names)}
        self.holders = empty(HolderColumns, names, range(len(names)))
        serving = [instance for _, instance in sorted(instances.items()) if not instance.draining]
        self._readable = _readable(serving, self.row_of)
        self._fleets = _fleets(serving, self.row_of)
        self._prefills = _places(fleet.prefills for fleet in self._fleets.values())
        self._decodes = _places(fleet.decodes for fleet in self._fleets.values())
        self._queues: dict[InstanceId, Queue] = {}
        self._loads: dict[InstanceId, DecodeLoad] = {}
        self._queued: dict[InstanceId, dict[tuple[InstanceId, RequestKey], Coming]] = defaultdict(dict)
        """By decode: what prefills list for it."""
        self._booked_for: dict[InstanceId, dict[RequestId, Booking]] = defaultdict(dict)
        """By decode."""
        self._booked_at: dict[InstanceId, dict[RequestId, Booking]] = defaultdict(dict)
        """By prefill."""
        self._done_s: dict[RequestId, float] = {}
        """When the prefill of a booking is done."""
        self._priorities: Counter[int] = Counter()
        self._moved_prefills: set[InstanceId] = set()
        self._moved_decodes: set[InstanceId] = set()
        """What has to be added up again."""
        for instance in self._in_order:
            self._learn(instance)

    def _learn(self, instance: InstanceView) -> None:
        name, sums = instance.instance, instance.sums
        self._priorities[sums.priority_max] += 1
        for coming in sums.coming:
            self._queued[coming.decode][name, coming.key] = coming
            self._moved_decodes.add(coming.decode)
        self._moved_prefills.add(name)
        self._moved_decodes.add(name)
        cost = sums.cost
        self.holders.write(
            self.row_of[name], (instance.heard_at_s, cost.transfer_fixed_s, cost.transfer_bytes_per_s)
        )

    def _forget(self, instance: InstanceView) -> None:
        name, sums = instance.instance, instance.sums
        _uncount(self._priorities, sums.priority_max)
        for coming in sums.coming:
            self._queued[coming.decode].pop((name, coming.key), None)
            self._moved_decodes.add(coming.decode)

    def _take_bookings(self, bookings: Mapping[RequestId, Booking]) -> None:
        known = self._bookings
        gone = [booking for name, booking in known.items() if bookings.get(name) is not booking]
        fresh = [booking for name, booking in bookings.items() if known.get(name) is not booking]
        self._bookings = bookings
        for booking in gone:
            _uncount(self._priorities, booking.priority)
            self._booked_at[booking.prefill].pop(booking.request_id, None)
            self._booked_for[booking.decode].pop(booking.request_id, None)
            self._done_s.pop(booking.request_id, None)
        for booking in fresh:
            self._priorities[booking.priority] += 1
            if booking.prefill in self._instances:
                self._booked_at[booking.prefill][booking.request_id] = booking
                self._booked_for[booking.decode][booking.request_id] = booking
        for booking in (*gone, *fresh):
            self._moved_prefills.add(booking.prefill)
            self._moved_decodes.add(booking.decode)

    def _add_up_prefill(self, prefill: InstanceView) -> None:
        """A queue of its snapshot's work, then of what was booked, that drains meanwhile."""
        name, sums, cost = prefill.instance, prefill.sums, prefill.sums.cost
        requests, free_at_s = len(sums.coming), prefill.heard_at_s + sums.queue_s
        for booking in sorted(self._booked_at[name].values(), key=lambda booking: booking.booked_at_s):
            work_s = prefill_s(cost, booking.new_tokens, booking.prefix_tokens)
            requests, free_at_s = requests + 1, max(free_at_s, booking.booked_at_s) + work_s
            self._done_s[booking.request_id] = free_at_s
        self._queues[name] = queue = Queue(requests, free_at_s) if requests else NO_QUEUE
        if name in self._prefills:
            table, place = self._prefills[name]
            table.write(place, _prefill_values(prefill, queue))

    def _add_up_decode(self, decode: InstanceView) -> None:
        """What runs there, and what is on its way."""
        name, present = decode.instance, decode.sums.present
        sequences, kv_tokens, blocks = present.sequences, present.kv_tokens, 0
        for _, request in self.arriving(name):
            sequences += request.samples
            kv_tokens += request.samples * request.kv_tokens
            blocks += request.blocks
        self._loads[name] = load = DecodeLoad(sequences, kv_tokens, blocks)
        if name in self._decodes:
            table, place = self._decodes[name]
            table.write(place, _decode_values(decode, load))


def _prefill_values(prefill: InstanceView, queue: Queue) -> tuple[float, ...]:
    """In the order of PrefillColumns."""
    cost = prefill.sums.cost
    return (
        prefill.heard_at_s,
        prefill.blocks,
        prefill.block_bytes,
        queue.requests,
        queue.free_at_s,
        cost.prefill_fixed_s,
        cost.prefill_per_token_s,
        cost.prefill_per_token_pair_s,
        cost.ssd_fixed_s,
        cost.ssd_bytes_per_s,
        cost.first_token_fixed_s,
    )


def _decode_values(decode: InstanceView, load: DecodeLoad) -> tuple[float, ...]:
    """In the order of DecodeColumns."""
    cost = decode.sums.cost
    return (
        decode.heard_at_s,
        decode.blocks,
        decode.block_bytes,
        decode.free_blocks,
        load.blocks_pending,
        load.sequences,
        load.kv_tokens,
        cost.step_fixed_s,
        cost.step_per_request_s,
        cost.step_per_kv_token_s,
    )


def _place(instance: InstanceView) -> tuple[object, ...]:
    """What decides where an instance stands in the tables, and in which."""
    return (
        instance.instance,
        instance.model,
        instance.fingerprint,
        instance.roles,
        instance.block_tokens,
        instance.draining,
    )


def _fleets(
    serving: Sequence[InstanceView], row_of: Mapping[InstanceId, int]
) -> dict[tuple[str, str], Fleet]:
    members: dict[tuple[str, str], list[InstanceView]] = defaultdict(list)
    for instance in serving:
        members[instance.model, instance.fingerprint].append(instance)
    return {
        kind: Fleet(
            found[0].block_tokens,
            _table(PrefillColumns, found, Role.PREFILL, row_of),
            _table(DecodeColumns, found, Role.DECODE, row_of),
        )
        for kind, found in members.items()
    }


def _table(
    columns: type[RoleColumnsT],
    instances: Sequence[InstanceView],
    role: Role,
    row_of: Mapping[InstanceId, int],
) -> Table[RoleColumnsT]:
    names = [instance.instance for instance in instances if role in instance.roles]
    return empty(columns, names, [row_of[name] for name in names])


def _readable(serving: Sequence[InstanceView], row_of: Mapping[InstanceId, int]) -> dict[str, Bools]:
    found: dict[str, Bools] = {}
    for instance in serving:
        rows = found.setdefault(instance.fingerprint, np.zeros(len(row_of), np.bool_))
        rows[row_of[instance.instance]] = True
    return found


def _places(tables: Iterable[Table[RoleColumnsT]]) -> dict[InstanceId, tuple[Table[RoleColumnsT], int]]:
    return {name: (table, place) for table in tables for place, name in enumerate(table.names)}


def _uncount(counts: Counter[int], value: int) -> None:
    counts[value] -= 1
    if not counts[value]:
        del counts[value]
