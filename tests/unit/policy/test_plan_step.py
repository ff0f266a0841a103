"""One plan at a time, and plans in a row over sequences that grow and end."""

from dataclasses import dataclass
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policy.core import RequestId
from policy.plan_step import (
    PREFILL_WAIT_STEPS_MAX,
    DecodeWork,
    PrefillWork,
    StepLimits,
    StepPart,
    StepPlan,
    plan_step,
)

pytestmark = pytest.mark.unit


def prefill(name: str, new_tokens: int, waited_steps: int = 0) -> PrefillWork:
    return PrefillWork(RequestId(name), new_tokens, waited_steps)


def decode(name: str, blocks_needed: int = 0, new_tokens: int = 1, turn: int = 0) -> DecodeWork:
    return DecodeWork(RequestId(name), blocks_needed, new_tokens, turn)


def names(parts: tuple[StepPart, ...]) -> list[str]:
    return [part.request_id for part in parts]


def test_decodes_first_then_prefill_fills_the_rest_in_order():
    plan = plan_step(
        [prefill("p", 5), prefill("q", 100), prefill("r", 7)],
        [decode("a"), decode("b")],
        10,
        StepLimits(20, 8),
    )
    assert plan.decodes == (StepPart("a", 1), StepPart("b", 1))
    assert plan.prefills == (StepPart("p", 5), StepPart("q", 13))
    assert plan.preempted == ()


def test_requests_max_counts_both_kinds():
    plan = plan_step([prefill("p", 1), prefill("q", 1)], [decode("a")], 0, StepLimits(100, 2))
    assert (names(plan.decodes), names(plan.prefills)) == (["a"], ["p"])


def test_out_of_blocks_the_latest_arrivals_make_room():
    running = [decode("a", 1), decode("b", 1), decode("c"), decode("d")]
    plan = plan_step([], running, 0, StepLimits(100, 100))
    assert names(plan.decodes) == ["a", "b"]
    assert plan.preempted == ("d", "c")


def test_a_preempted_one_may_itself_be_the_need():
    plan = plan_step([], [decode("a", 1), decode("b", 3)], 1, StepLimits(100, 100))
    assert (names(plan.decodes), plan.preempted) == (["a"], ("b",))


def test_forced_tokens_come_after_every_decodes_own_and_before_prefill():
    running = [decode("a", new_tokens=4), decode("b", new_tokens=9), decode("c")]
    plan = plan_step([prefill("p", 5)], running, 0, StepLimits(8, 8))
    assert plan.decodes == (StepPart("a", 4), StepPart("b", 3), StepPart("c", 1))
    assert plan.prefills == ()
    assert plan_step([prefill("p", 5)], running, 0, StepLimits(20, 8)).prefills == (StepPart("p", 5),)


def test_more_decodes_than_places_take_turns() -> None:
    running = [decode("a", turn=7), decode("b", turn=5), decode("c", turn=6), decode("d", turn=8)]
    assert names(plan_step([], running, 0, StepLimits(100, 2)).decodes) == ["b", "c"]
    assert names(plan_step([], running, 0, StepLimits(3, 100)).decodes) == ["b", "c", "a"]


@pytest.mark.parametrize("limits", [StepLimits(100, 2), StepLimits(2, 100), StepLimits(1, 1)])
def test_a_prefill_that_waited_long_takes_one_place(limits: StepLimits) -> None:
    running = [decode("a"), decode("b", new_tokens=7)]
    places = min(limits.tokens_max, limits.requests_max)
    kept_waiting = plan_step([prefill("p", 50, PREFILL_WAIT_STEPS_MAX - 1)], running, 0, limits)
    assert (len(kept_waiting.decodes), kept_waiting.prefills) == (places, ())
    taken = plan_step([prefill("p", 50, PREFILL_WAIT_STEPS_MAX)], running, 0, limits)
    assert (len(taken.decodes), names(taken.prefills)) == (places - 1, ["p"])


def test_limits_name_what_is_wrong():
    with pytest.raises(ValueError, match="tokens_max"):
        StepLimits(0, 1)


@given(
    waiting=st.lists(st.tuples(st.integers(1, 300), st.integers(0, 20)), max_size=8),
    running=st.lists(st.tuples(st.integers(0, 3), st.integers(1, 5), st.integers(0, 3)), max_size=12),
    free_blocks=st.integers(0, 12),
    tokens_max=st.integers(1, 256),
    requests_max=st.integers(1, 16),
)
def test_every_plan_keeps_the_limits(waiting, running, free_blocks, tokens_max, requests_max):
    prefills = [prefill(f"p{i}", *work) for i, work in enumerate(waiting)]
    decodes = [decode(f"d{i}", *work) for i, work in enumerate(running)]
    plan = plan_step(prefills, decodes, free_blocks, StepLimits(tokens_max, requests_max))

    parts = plan.decodes + plan.prefills
    assert sum(part.tokens for part in parts) <= tokens_max
    assert len(parts) <= requests_max
    kept = decodes[: len(decodes) - len(plan.preempted)]
    assert list(plan.preempted) == [work.request_id for work in reversed(decodes[len(kept) :])]
    work_of = {work.request_id: work for work in (*decodes, *prefills)}
    assert all(1 <= part.tokens <= work_of[part.request_id].new_tokens for part in parts)

    given_back = sum(work_of[name].blocks_needed == 0 for name in plan.preempted)
    assert sum(work.blocks_needed for work in kept) <= free_blocks + given_back
    assert not plan.preempted or sum(work.blocks_needed for work in decodes) > free_blocks

    places = min(tokens_max, requests_max)
    starving = bool(prefills) and prefills[0].waited_steps >= PREFILL_WAIT_STEPS_MAX
    assert len(plan.decodes) == min(len(kept), places - starving)
    assert names(plan.prefills) == [f"p{i}" for i in range(len(plan.prefills))]
    assert all(part.tokens == waiting[i][0] for i, part in enumerate(plan.prefills[:-1]))
    if prefills and not plan.prefills:
        assert not starving
        assert sum(part.tokens for part in parts) == tokens_max or len(parts) == requests_max


@dataclass
class Life:
    """A sequence of a simulated engine; `steps`: the steps that it was in."""

    name: str
    arrives_at: int
    prompt_tokens: int
    output_tokens: int
    last_step: int = 0
    turn: int = 0
    first_token_at: int | None = None
    ended_at: int | None = None

    @property
    def works(self) -> bool:
        return self.ended_at is None


def simulate(lives: list[Life], limits: StepLimits, steps_max: int) -> list[StepPlan]:
    """Plans until all have ended; blocks are plenty."""
    plans: list[StepPlan] = []
    turns = 0
    while any(life.works for life in lives):
        now = len(plans)
        assert now < steps_max, "somebody starves"
        here = [life for life in lives if life.works and life.arrives_at <= now]
        for life in here:
            life.last_step = max(life.last_step, life.arrives_at)
        waiting = [prefill(s.name, s.prompt_tokens, now - s.last_step) for s in here if s.prompt_tokens]
        running = [decode(s.name, turn=s.turn) for s in here if not s.prompt_tokens]
        plan = plan_step(waiting, running, 100, limits)
        life_of = {life.name: life for life in here}
        for part in plan.decodes + plan.prefills:
            life = life_of[part.request_id]
            turns += 1
            life.turn, life.last_step = turns, now + 1
            life.prompt_tokens = max(0, life.prompt_tokens - part.tokens)
            if not life.prompt_tokens:
                life.first_token_at = now if life.first_token_at is None else life.first_token_at
                life.output_tokens -= 1
                life.ended_at = None if life.output_tokens else now
        plans.append(plan)
    return plans


lives = st.lists(
    st.tuples(st.integers(0, 30), st.integers(1, 80), st.integers(1, 40)), min_size=1, max_size=12
)


@settings(max_examples=80, deadline=None)
@given(lives=lives, tokens_max=st.integers(1, 40), requests_max=st.integers(1, 10))
def test_everybody_ends_and_prompts_are_served_in_order_of_arrival(lives, tokens_max, requests_max):
    order = sorted(lives)
    here = [Life(f"r{i}", *life) for i, life in enumerate(order)]
    # In each run of this many steps the oldest prompt advances by a token, or every decode by one.
    slowest = PREFILL_WAIT_STEPS_MAX + 1 + len(here)
    steps_max = 30 + sum(prompt + output for _, prompt, output in order) * slowest
    simulate(here, StepLimits(tokens_max, requests_max), steps_max)
    begun = [life.first_token_at for life in here]
    assert begun == sorted(begun)


@settings(max_examples=80, deadline=None)
@given(
    outputs=st.lists(st.integers(1, 300), min_size=1, max_size=20),
    arrives_at=st.integers(0, 50),
    tokens_max=st.integers(512, 8192),
)
def test_a_prompt_of_100k_tokens_pauses_nobody_for_more_than_a_step(outputs, arrives_at, tokens_max):
    """Who decodes is in every step, and no step computes more than the budget."""
    decoding = [Life(f"d{i}", 0, 1, tokens) for i, tokens in enumerate(outputs)]
    arrival = Life("long", arrives_at, 100_000, 5)
    plans = simulate([*decoding, arrival], StepLimits(tokens_max, 64), 100_000)
    for life in decoding:
        expected = range(life.first_token_at + 1, life.ended_at + 1)
        assert [n for n, plan in enumerate(plans) if life.name in names(plan.decodes)] == list(expected)
    with_it = [plan for plan in plans if "long" in names(plan.prefills)]
    full = [sum(part.tokens for part in plan.decodes + plan.prefills) == tokens_max for plan in with_it]
    assert all(full[:-1])


@settings(max_examples=80, deadline=None)
@given(sequences=st.integers(1, 40), places=st.integers(1, 8))
def test_decodes_beyond_the_limit_all_have_their_turn(sequences, places):
    """More sequences than a batch takes: each is in one of any ceil(r / l) steps."""
    lives = [Life(f"d{i}", 0, 1, 30) for i in range(sequences)]
    plans = simulate(lives, StepLimits(64, places), 100_000)
    last_begun = max(life.first_token_at for life in lives)
    turns = -(-sequences // places)
    for life in lives:
        if life.ended_at <= last_begun:
            continue
        served = [n for n, plan in enumerate(plans) if n > last_begun and life.name in names(plan.decodes)]
        assert all(after - before <= turns for before, after in pairwise(served))
    both = [life for life in lives if life.ended_at > last_begun]
    first_end = min((life.ended_at for life in both), default=0)
    shares = [
        sum(life.name in names(plan.decodes) for plan in plans[last_begun + 1 : first_end]) for life in both
    ]
    assert not shares or max(shares) - min(shares) <= 1
