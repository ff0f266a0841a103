"""The placement strategies by name: which prefill instance a request goes to, and with whose cached prefix.

Each answers the same PrefillQuestion. They differ in what they look at:

=================  =========================================================================
random             nothing: the request's name decides
load_balance       queues
cache_aware        queues and each instance's own cached prefix
kvcache_centric    these, and another's prefix where the own one is much shorter
joint              these, and every source and tier cut that pays (DESIGN §8)
=================  =========================================================================

All but `random` allow for what other conductors decide at the same moment (`policy.choice.turn_of`).
Whoever is chosen uses what it has cached itself: no engine computes what lies in its own memory. Equals
share the load, those first that have the least to move, by the request's name, the same in every conductor.
"""

from collections.abc import Callable, Mapping, Sequence
from math import inf

from policy.choice import Strategy, equals_bound_s, in_turn, nearly_least, spread
from policy.place_prefill import (
    NOTHING_CACHED,
    PrefillCandidate,
    PrefillQuestion,
    way_alone,
    way_with,
)
from policy.view import InstanceView

PrefillChoice = Callable[[PrefillQuestion], PrefillCandidate]


def random(question: PrefillQuestion) -> PrefillCandidate:
    chosen = min(
        question.prefills, key=lambda instance: spread(question.request.request_id, instance.instance)
    )
    return way_alone(question, chosen)


def load_balance(question: PrefillQuestion) -> PrefillCandidate:
    """The shortest queue, in seconds of work."""
    ways = [way_alone(question, instance) for instance in question.prefills]
    return _least(question, ways, lambda way: way.backlog.wait_s, inf)


def cache_aware(question: PrefillQuestion) -> PrefillCandidate:
    """The soonest first token where everybody uses only what it has cached itself (the paper's local
    cache-aware scheduling)."""
    ways = [way_alone(question, instance) for instance in question.prefills]
    return _least(question, ways, lambda way: way.ttft_s, question.ttft_s_max)


def kvcache_centric(question: PrefillQuestion) -> PrefillCandidate:
    """The soonest first token where another's prefix may be brought in (the study note's algorithm).

    Doing without is always a candidate too; in the note's text it is missing where some other instance
    holds more, and the first way to be looked at would win over a better one.
    """
    ways = [
        way_with(question, instance) if _looks_further(question, instance) else way_alone(question, instance)
        for instance in question.prefills
    ]
    return _least(question, ways, lambda way: way.ttft_s, question.ttft_s_max)


def joint(question: PrefillQuestion) -> PrefillCandidate:
    """The soonest first token over all ways; among equals the fewest requests, then the least to move."""

    def choose(ways: Sequence[PrefillCandidate]) -> PrefillCandidate:
        equals = nearly_least(ways, lambda way: way.ttft_s, question.limits, question.ttft_s_max)
        requests_min = min(way.backlog.requests for way in equals)
        equals = [way for way in equals if way.backlog.requests == requests_min]
        return _first(question, nearly_least(equals, lambda way: way.fetch_s, question.limits, inf))

    return in_turn(
        _soonest(question),
        question.turn,
        choose,
        PrefillCandidate.taken,
        lambda way: way.ttft_s,
        question.ttft_s_max,
    )


STRATEGIES: Mapping[Strategy, PrefillChoice] = {
    Strategy.RANDOM: random,
    Strategy.LOAD_BALANCE: load_balance,
    Strategy.CACHE_AWARE: cache_aware,
    Strategy.KVCACHE_CENTRIC: kvcache_centric,
    Strategy.JOINT: joint,
}


def _soonest(question: PrefillQuestion) -> list[PrefillCandidate]:
    """The cheapest ways of all instances that could be equals of the best: shortest queue first, until a
    queue alone takes longer. Where others have their turn before, all."""
    if question.turn:
        return [way_with(question, instance) for instance in question.prefills]
    backlogs = question.backlogs
    ways: list[PrefillCandidate] = []
    bound_s = inf
    for instance in sorted(question.prefills, key=lambda one: backlogs[one.instance].wait_s):
        if backlogs[instance.instance].wait_s > bound_s:
            break
        way = way_with(question, instance)
        bound_s = min(bound_s, equals_bound_s(way.ttft_s, question.limits))
        ways.append(way)
    return ways


def _looks_further(question: PrefillQuestion, instance: InstanceView) -> bool:
    """The paper's test, best prefix against the own one, and the note's, own prefix against the prompt."""
    own = question.extents.get(instance.instance, NOTHING_CACHED)
    best_blocks = max((source.extent.blocks for source in question.sources), default=0)
    own_tokens = own.blocks * instance.block_tokens
    return (
        best_blocks > own.blocks
        and best_blocks >= question.limits.kvcache_balancing_threshold * own.blocks
        and own_tokens < question.limits.kvcache_local_share_min * question.request.prompt_tokens
    )


def _least(
    question: PrefillQuestion,
    ways: list[PrefillCandidate],
    value_s: Callable[[PrefillCandidate], float],
    target_s: float,
) -> PrefillCandidate:
    def choose(ways: Sequence[PrefillCandidate]) -> PrefillCandidate:
        equals = nearly_least(ways, value_s, question.limits, target_s)
        return _first(question, nearly_least(equals, lambda way: way.fetch_s, question.limits, inf))

    return in_turn(ways, question.turn, choose, PrefillCandidate.taken, value_s, target_s)


def _first(question: PrefillQuestion, equals: Sequence[PrefillCandidate]) -> PrefillCandidate:
    return min(equals, key=lambda way: spread(question.request.request_id, way.instance.instance))
