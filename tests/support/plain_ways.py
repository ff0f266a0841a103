"""The ways to a first token, one instance after the other: see `plain_place`."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from heapq import nsmallest
from typing import TypeVar

from tests.support.plain_outlook import PlainOutlook

from kvindex.core import InstanceId, InstanceMatch, Tier
from policy.admit import Targets
from policy.choice import UNHEARD_MAX, PlacementLimits, equals_bound_s, spread, turn_of
from policy.core import CostCoefficients, Role, ScheduleRequest
from policy.cost import prefill_s, ssd_read_s, transfer_s
from policy.load_sums import DecodeLoad
from policy.place_prefill import PrefillCandidate
from policy.predict import PrefillBacklog
from policy.view import ClusterView, InstanceView

SOURCES_MAX = 4
CandidateT = TypeVar("CandidateT")


@dataclass(frozen=True, slots=True)
class Extent:
    """A cached prefix by what it takes to use it: `memory_blocks` lie in memory (device or DRAM), what
    comes after them, up to `blocks`, has to be read from SSD."""

    memory_blocks: int = 0
    blocks: int = 0

    def upto(self, blocks: int) -> "Extent":
        return self if self.blocks <= blocks else Extent(min(self.memory_blocks, blocks), blocks)

    def ends(self) -> tuple[int, ...]:
        """Where a tier ends, in blocks."""
        if self.memory_blocks in (0, self.blocks):
            return (self.blocks,) if self.blocks else ()
        return (self.memory_blocks, self.blocks)

    def ssd_blocks(self, first: int, end: int) -> int:
        """How many of the blocks from `first` up to `end` lie on SSD."""
        return max(0, end - max(first, self.memory_blocks))


NOTHING_CACHED = Extent()


def nearly_least(
    candidates: Sequence[CandidateT],
    value_s: Callable[[CandidateT], float],
    limits: PlacementLimits,
    target_s: float,
) -> list[CandidateT]:
    """The equals of the best. One that misses the target is no equal of one that meets it."""
    values_s = [value_s(candidate) for candidate in candidates]
    least_s = min(values_s)
    bound_s = equals_bound_s(least_s, limits)
    if least_s <= target_s:
        bound_s = min(bound_s, target_s)
    return [candidate for candidate, one_s in zip(candidates, values_s, strict=True) if one_s <= bound_s]


def in_turn(
    candidates: Sequence[CandidateT],
    turn: int,
    choose: Callable[[Sequence[CandidateT]], CandidateT],
    taken: Callable[[CandidateT], CandidateT],
    value_s: Callable[[CandidateT], float],
    target_s: float,
) -> CandidateT:
    """What `choose` chooses once `turn` others have each chosen; `taken(candidate)` is it with one more
    request. Others are only taken to be there: nobody is sent where the target is missed for them."""
    if not turn:
        return choose(candidates)
    # No more than these can be the best of anybody.
    near = nsmallest(UNHEARD_MAX + 1, enumerate(candidates), key=lambda numbered: value_s(numbered[1]))
    numbers = [number for number, _ in sorted(near)]
    left = [candidates[number] for number in numbers]
    for _ in range(turn):
        won = choose(left)
        left = [taken(candidate) if candidate is won else candidate for candidate in left]
    won = choose(left)
    found = candidates[numbers[next(number for number, other in enumerate(left) if other is won)]]
    return found if value_s(found) <= target_s else choose(candidates)


@dataclass(frozen=True, slots=True)
class Source:
    """An instance whose cached prefix others may read."""

    name: InstanceId
    extent: Extent
    ends: tuple[int, ...]
    cost: CostCoefficients


@dataclass(frozen=True, slots=True)
class PrefillQuestion:
    """Where should `request` be prefilled? What a strategy answers with one PrefillCandidate."""

    request: ScheduleRequest
    prefills: Sequence[InstanceView]
    """At least one, in the order of their names."""
    backlogs: Mapping[InstanceId, PrefillBacklog]
    extents: Mapping[InstanceId, Extent]
    """Without the block of the prompt's last token: that one is always computed."""
    sources: Sequence[Source]
    """Longest prefix first, one more than SOURCES_MAX: nobody reads from itself."""
    limits: PlacementLimits
    loads: Mapping[InstanceId, DecodeLoad]
    decodes: Sequence[InstanceView]
    """Of the request's model, that take requests."""
    ttft_s_max: float
    tbt_s_max: float
    turn: int = 0
    """See `policy.choice.turn_of`."""


def prefill_question(
    prefills: Sequence[InstanceView],
    view: ClusterView,
    request: ScheduleRequest,
    extents: Mapping[InstanceId, Extent],
    ahead: PlainOutlook,
    limits: PlacementLimits,
    targets: Targets,
) -> PrefillQuestion:
    # Instances of one fingerprint have blocks of one size.
    usable_blocks = (request.prompt_tokens - 1) // prefills[0].block_tokens
    usable = {name: extent.upto(usable_blocks) for name, extent in extents.items()}
    return PrefillQuestion(
        request,
        prefills,
        ahead.backlogs,
        usable,
        _sources(view, request, usable, limits, ahead.now_s),
        limits,
        ahead.loads,
        [
            instance
            for instance in view.instances.values()
            if Role.DECODE in instance.roles
            and (instance.model, instance.fingerprint) == (request.model, request.fingerprint)
            and not instance.draining
        ],
        targets.ttft_s_max,
        targets.tbt_s_max,
        turn_of(request.request_id, view, ahead.now_s),
    )


def extents_of(matches: Sequence[InstanceMatch]) -> Mapping[InstanceId, Extent]:
    """Where runs are not told, all is taken to lie in memory."""
    return {match.instance: _extent(match) for match in matches}


def way_alone(question: PrefillQuestion, instance: InstanceView) -> PrefillCandidate:
    """The cheapest with nobody's help: compute everything, or start from its own prefix."""
    return _cheapest(question, instance, _own_prefixes(question, instance))


def way_with(question: PrefillQuestion, instance: InstanceView) -> PrefillCandidate:
    """The cheapest of all: alone, or with blocks of one other instance."""
    return _cheapest(question, instance, _all_prefixes(question, instance))


def _cheapest(
    question: PrefillQuestion, instance: InstanceView, prefixes: Iterable[tuple[InstanceId, int, float]]
) -> PrefillCandidate:
    """Of equally fast ways the one that moves less."""
    prompt_tokens, cost = question.request.prompt_tokens, instance.cost
    source, prefix_blocks, fetch_s = None, 0, 0.0
    compute_s = prefill_s(cost, prompt_tokens, 0)
    for way_source, way_blocks, way_fetch_s in prefixes:
        prefix_tokens = way_blocks * instance.block_tokens
        way_compute_s = prefill_s(cost, prompt_tokens - prefix_tokens, prefix_tokens)
        if way_fetch_s + way_compute_s < fetch_s + compute_s:
            source, prefix_blocks = way_source, way_blocks
            fetch_s, compute_s = way_fetch_s, way_compute_s
    backlog = question.backlogs[instance.instance]
    return PrefillCandidate(instance, backlog, source, prefix_blocks, fetch_s, compute_s)


def _own_prefixes(
    question: PrefillQuestion, instance: InstanceView
) -> Iterator[tuple[InstanceId, int, float]]:
    """(source, blocks in all, time to bring them where they are computed on)."""
    own = question.extents.get(instance.instance, NOTHING_CACHED)
    cost, block_bytes = instance.cost, instance.block_bytes
    for blocks in own.ends():
        yield instance.instance, blocks, ssd_read_s(cost, own.ssd_blocks(0, blocks) * block_bytes)


def _all_prefixes(
    question: PrefillQuestion, instance: InstanceView
) -> Iterator[tuple[InstanceId, int, float]]:
    yield from _own_prefixes(question, instance)
    own = question.extents.get(instance.instance, NOTHING_CACHED)
    cost, block_bytes = instance.cost, instance.block_bytes
    rise_s = ssd_read_s(cost, own.ssd_blocks(0, own.blocks) * block_bytes)
    others = [source for source in question.sources if source.name != instance.instance]
    for source in others[:SOURCES_MAX]:
        for blocks in source.ends:
            if blocks > own.blocks:
                read_s = ssd_read_s(source.cost, source.extent.ssd_blocks(own.blocks, blocks) * block_bytes)
                moved_s = transfer_s(source.cost, (blocks - own.blocks) * block_bytes)
                yield source.name, blocks, rise_s + read_s + moved_s


def _sources(
    view: ClusterView,
    request: ScheduleRequest,
    extents: Mapping[InstanceId, Extent],
    limits: PlacementLimits,
    now_s: float,
) -> list[Source]:
    """Whose blocks may be read, longest prefix first; one more than are considered, since nobody reads
    from itself. Requests take equals in different orders, so that none serves all."""
    usable = [
        (extent, instance)
        for name, extent in extents.items()
        if extent.blocks > 0
        and (instance := view.instances.get(name)) is not None
        and instance.fingerprint == request.fingerprint
        and name not in request.excluded
        and not instance.draining
        and not silent(instance, limits, now_s)
    ]
    return nsmallest(
        SOURCES_MAX + 1,
        _undominated(usable),
        key=lambda source: (
            -source.extent.blocks,
            -source.extent.memory_blocks,
            spread(request.request_id, source.name),
        ),
    )


def _undominated(usable: Sequence[tuple[Extent, InstanceView]]) -> list[Source]:
    """Without those that have less, and are not quicker, than the one with most in memory.

    Reading from that one or from nobody is never slower: between its end and an own prefix's the time is
    least at one of the two. And that one itself has no use for those that have less.
    """
    if not usable:
        return []
    most, most_instance = max(usable, key=lambda one: one[0].memory_blocks)
    blocks, best = most.memory_blocks, most_instance.cost
    sources = []
    for extent, instance in usable:
        cost = instance.cost
        if (
            extent.blocks >= blocks
            or cost.transfer_fixed_s < best.transfer_fixed_s
            or cost.transfer_bytes_per_s > best.transfer_bytes_per_s
        ):
            sources.append(Source(instance.instance, extent, extent.ends(), cost))
    return sources


def _extent(match: InstanceMatch) -> Extent:
    """Along a prefix tiers only get slower; should they not, what comes after the first SSD is SSD."""
    memory_blocks = 0 if match.runs else match.prefix_blocks
    for run in match.runs:
        if run.tier is Tier.SSD:
            break
        memory_blocks += run.blocks
    return Extent(min(memory_blocks, match.prefix_blocks), match.prefix_blocks)


def silent(instance: InstanceView, limits: PlacementLimits, now_s: float) -> bool:
    return now_s - instance.heard_at_s > limits.silence_s_max
