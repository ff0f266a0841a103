"""The strategies' choice among ways that stand in a list: see `plain_place`."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from math import inf

from tests.support.plain_ways import (
    NOTHING_CACHED,
    PrefillQuestion,
    in_turn,
    nearly_least,
    way_alone,
    way_with,
)

from policy.choice import Strategy, equals_bound_s, spread
from policy.core import Role
from policy.cost import step_s, transfer_s
from policy.place_prefill import PrefillCandidate
from policy.predict import PrefillBacklog
from policy.view import InstanceView


def taken(way: PrefillCandidate) -> PrefillCandidate:
    """With one more request like this before it."""
    wait_s = way.backlog.wait_s + way.compute_s
    return replace(way, backlog=PrefillBacklog(way.backlog.requests + 1, wait_s))


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


Valued = tuple[PrefillCandidate, float]
"""A way, and what else it costs, in seconds: see `policy.value`."""


def joint(question: PrefillQuestion) -> PrefillCandidate:
    """The soonest first token over all ways; among equals the fewest requests, then the least to move."""

    def value_s(valued: Valued) -> float:
        way, added_s = valued
        fixed_s = way.instance.cost.first_token_fixed_s
        return way.backlog.wait_s + way.fetch_s + way.compute_s + (fixed_s + added_s)

    def choose(ways: Sequence[Valued]) -> Valued:
        equals = nearly_least(ways, value_s, question.limits, question.ttft_s_max)
        requests_min = min(way.backlog.requests for way, _ in equals)
        equals = [valued for valued in equals if valued[0].backlog.requests == requests_min]
        equals = nearly_least(equals, lambda valued: valued[0].fetch_s, question.limits, inf)
        first = _first(question, [way for way, _ in equals])
        return next(valued for valued in equals if valued[0] is first)

    ways = [way_with(question, instance) for instance in question.prefills]
    some_only_prefill = len({Role.DECODE in way.instance.roles for way in ways}) == 2
    added_s = [
        (question.limits.compute_weight - 1.0) * way.compute_s
        + (_after_s(question, way) if some_only_prefill else 0.0)
        for way in ways
    ]
    in_time = [way.ttft_s <= question.ttft_s_max for way in ways]
    if any(added_s) and any(in_time):
        added_s = [added if timely else inf for added, timely in zip(added_s, in_time, strict=True)]
    way, _ = in_turn(
        list(zip(ways, added_s, strict=True)),
        question.turn,
        choose,
        lambda valued: (taken(valued[0]), valued[1]),
        value_s,
        question.ttft_s_max,
    )
    return way


def _after_s(question: PrefillQuestion, way: PrefillCandidate) -> float:
    """What comes after the first token, or takes from what runs."""
    instance, request = way.instance, question.request
    blocks = -(-request.prompt_tokens // instance.block_tokens)
    send_s = max(0.0, transfer_s(instance.cost, blocks * instance.block_bytes) - way.compute_s)
    if Role.DECODE not in instance.roles:
        return send_s
    after_s = 0.0
    shortest_s = min(_joined_s(question, decode) for decode in question.decodes)
    if _joined_s(question, instance) > equals_bound_s(shortest_s, question.limits):
        after_s = send_s
    load = question.loads[instance.instance]
    if not load.sequences:
        return after_s
    running_s = step_s(instance.cost, load.sequences, load.kv_tokens)
    slack_s = running_s if question.tbt_s_max == inf else max(0.0, question.tbt_s_max - running_s)
    return after_s + max(0.0, way.compute_s - slack_s)


def _joined_s(question: PrefillQuestion, decode: InstanceView) -> float:
    """A step there with the request."""
    load, request = question.loads[decode.instance], question.request
    sequences = load.sequences + request.samples
    return step_s(decode.cost, sequences, load.kv_tokens + request.samples * request.prompt_tokens)


PLAIN_STRATEGIES = {
    Strategy.RANDOM: random,
    Strategy.LOAD_BALANCE: load_balance,
    Strategy.CACHE_AWARE: cache_aware,
    Strategy.KVCACHE_CENTRIC: kvcache_centric,
    Strategy.JOINT: joint,
}


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

    return in_turn(ways, question.turn, choose, taken, value_s, target_s)


def _first(question: PrefillQuestion, equals: Sequence[PrefillCandidate]) -> PrefillCandidate:
    return min(equals, key=lambda way: spread(question.request.request_id, way.instance.instance))
