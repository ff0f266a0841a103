"""The outlook put together anew from the whole view: see `plain_place`."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kvindex.core import InstanceId
from policy.board import Arriving
from policy.cost import prefill_s
from policy.load_sums import DecodeLoad, RequestKey
from policy.predict import Arrival, PrefillBacklog
from policy.view import ClusterView

NO_BACKLOG = PrefillBacklog()


@dataclass(frozen=True, slots=True)
class PlainOutlook:
    """The view as far as decisions read it, put together once a decision."""

    now_s: float
    backlogs: Mapping[InstanceId, PrefillBacklog]
    coming: Mapping[InstanceId, Sequence[Arriving]]
    """By decode. One that nothing comes to is left
    out."""
    loads: Mapping[InstanceId, DecodeLoad]
    priority_max: int
    """Of all requests that the cluster is busy with; at least 0, which is a request's that names none."""

    def arrivals(self, decode: InstanceId) -> list[Arrival]:
        return [
            Arrival(
                max(0.0, begins_s - self.now_s),
                max(0.0, done_s - self.now_s),
                request.kv_tokens,
                request.samples,
                request.output_tokens_expected,
                request.blocks,
            )
            for begins_s, done_s, request in self.coming.get(decode, ())
        ]


def plain_outlook(view: ClusterView, now_s: float) -> PlainOutlook:
    """Each prefill is a queue of its snapshot's work, then of what was booked, that drains meanwhile."""
    requests: dict[InstanceId, int] = {}
    free_at_s: dict[InstanceId, float] = {}
    coming: list[Arriving] = []
    loads: dict[InstanceId, DecodeLoad] = {}
    priorities = [0]
    for name, instance in view.instances.items():
        sums, heard_at_s = instance.sums, instance.heard_at_s
        loads[name] = sums.present
        priorities.append(sums.priority_max)
        if sums.coming:
            requests[name] = len(sums.coming)
            free_at_s[name] = heard_at_s + sums.queue_s
            coming += [
                (heard_at_s + request.begins_s, heard_at_s + request.done_s, request)
                for request in sums.coming
            ]
    for booking in sorted(view.bookings.values(), key=lambda booking: booking.booked_at_s):
        name, booked_at_s = booking.prefill, booking.booked_at_s
        prefill = view.instances.get(name)
        if prefill is not None:
            work_s = prefill_s(prefill.cost, booking.new_tokens, booking.prefix_tokens)
            requests[name] = requests.get(name, 0) + 1
            begins_s = max(free_at_s.get(name, prefill.heard_at_s), booked_at_s)
            free_at_s[name] = begins_s + work_s
            coming.append((begins_s, free_at_s[name], booking))
        priorities.append(booking.priority)
    by_decode = _by_decode(view, coming, loads)
    backlogs = dict.fromkeys(view.instances, NO_BACKLOG)
    for name, count in requests.items():
        backlogs[name] = PrefillBacklog(count, max(0.0, free_at_s[name] - now_s))
    return PlainOutlook(now_s, backlogs, by_decode, loads, max(priorities))


def _by_decode(
    view: ClusterView,
    coming: Sequence[Arriving],
    loads: dict[InstanceId, DecodeLoad],
) -> dict[InstanceId, list[Arriving]]:
    """Without what decode has reserved for already, and each request once. Adds it all to `loads`."""
    found: dict[InstanceId, list[Arriving]] = {}
    added: dict[InstanceId, list[int]] = {}
    counted: set[RequestKey] = set()
    for arriving in coming:
        request = arriving[2]
        name, key = request.decode, request.key
        decode = view.instances.get(name)
        if decode is None or key in counted or key in decode.sums.running_keys:
            continue
        counted.add(key)
        if name not in found:
            found[name], added[name] = [], [0, 0, 0]
        found[name].append(arriving)
        sums = added[name]
        sums[0] += request.samples
        sums[1] += request.samples * request.kv_tokens
        sums[2] += request.blocks
    for name, (sequences, kv_tokens, blocks) in added.items():
        present = loads[name]
        loads[name] = DecodeLoad(present.sequences + sequences, present.kv_tokens + kv_tokens, blocks)
    return found
