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

from collections.abc import Callable, Mapping
from math import inf

import numpy as np

from policy.choice import Strategy
from policy.columns import Bools, Floats
from policy.nearest import first_by_name, in_turn, nearly_least
from policy.place_prefill import (
    PrefillCandidate,
    PrefillQuestion,
    Ways,
    way_at,
    ways_alone,
    ways_with,
)
from policy.value import valued

PrefillChoice = Callable[[PrefillQuestion], PrefillCandidate]


def random(question: PrefillQuestion) -> PrefillCandidate:
    ways = ways_alone(question)
    chosen = first_by_name(question.request.request_id, ways.names, np.arange(len(ways.names)))
    return way_at(question, ways, chosen)


def load_balance(question: PrefillQuestion) -> PrefillCandidate:
    """The shortest queue, in seconds of work."""
    return _least(question, ways_alone(question), lambda ways: ways.wait_s, inf)


def cache_aware(question: PrefillQuestion) -> PrefillCandidate:
    """The soonest first token where everybody uses only what it has cached itself (the paper's local
    cache-aware scheduling)."""
    return _least(question, ways_alone(question), _ttft_s, question.ttft_s_max)


def kvcache_centric(question: PrefillQuestion) -> PrefillCandidate:
    """The soonest first token where another's prefix may be brought in (the study note's algorithm).

    Doing without is always a candidate too; in the note's text it is missing where some other instance
    holds more, and the first way to be looked at would win over a better one.
    """
    return _least(question, ways_with(question, _looks_further(question)), _ttft_s, question.ttft_s_max)


def joint(question: PrefillQuestion) -> PrefillCandidate:
    """The soonest first token over all ways, and the least taken from others (`policy.value`); among equals
    the fewest requests, then the least to move."""

    def choose(ways: Ways) -> int:
        equals = nearly_least(ways.ttft_s, question.limits, question.ttft_s_max)
        requests = ways.requests[equals]
        equals = equals[requests == requests.min()]
        equals = equals[nearly_least(ways.fetch_s[equals], question.limits, inf)]
        return first_by_name(question.request.request_id, ways.names, equals)

    ways = valued(question, ways_with(question))
    return way_at(question, ways, in_turn(ways, question.turn, choose, _ttft_s, question.ttft_s_max))


STRATEGIES: Mapping[Strategy, PrefillChoice] = {
    Strategy.RANDOM: random,
    Strategy.LOAD_BALANCE: load_balance,
    Strategy.CACHE_AWARE: cache_aware,
    Strategy.KVCACHE_CENTRIC: kvcache_centric,
    Strategy.JOINT: joint,
}


def _ttft_s(ways: Ways) -> Floats:
    return ways.ttft_s


def _looks_further(question: PrefillQuestion) -> Bools:
    """The paper's test, best prefix against the own one, and the note's, own prefix against the prompt."""
    own_blocks = question.own.blocks
    best_blocks = question.sources[0].blocks if question.sources else 0
    looks_further: Bools = (
        (best_blocks > own_blocks)
        & (best_blocks >= question.limits.kvcache_balancing_threshold * own_blocks)
        & (
            own_blocks * question.block_tokens
            < question.limits.kvcache_local_share_min * question.request.prompt_tokens
        )
    )
    return looks_further


def _least(
    question: PrefillQuestion, ways: Ways, value_s: Callable[[Ways], Floats], target_s: float
) -> PrefillCandidate:
    def choose(ways: Ways) -> int:
        equals = nearly_least(value_s(ways), question.limits, target_s)
        equals = equals[nearly_least(ways.fetch_s[equals], question.limits, inf)]
        return first_by_name(question.request.request_id, ways.names, equals)

    return way_at(question, ways, in_turn(ways, question.turn, choose, value_s, target_s))
