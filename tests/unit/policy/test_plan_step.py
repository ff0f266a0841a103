import pytest
from hypothesis import given
from hypothesis import strategies as st

from policy.core import RequestId
from policy.plan_step import DecodeWork, PrefillChunk, PrefillWork, StepLimits, plan_step

pytestmark = pytest.mark.unit


def prefill(name: str, new_tokens: int) -> PrefillWork:
    return PrefillWork(RequestId(name), new_tokens)


def decode(name: str, needs_block: bool = False) -> DecodeWork:
    return DecodeWork(RequestId(name), needs_block)


def test_decodes_first_then_prefill_fills_the_rest_in_order():
    plan = plan_step(
        [prefill("p", 5), prefill("q", 100), prefill("r", 7)],
        [decode("a"), decode("b")],
        10,
        StepLimits(20, 8),
    )
    assert plan.decodes == ("a", "b")
    assert plan.prefills == (PrefillChunk("p", 5), PrefillChunk("q", 13))
    assert plan.preempted == ()


def test_requests_max_counts_both_kinds():
    plan = plan_step([prefill("p", 1), prefill("q", 1)], [decode("a")], 0, StepLimits(100, 2))
    assert (plan.decodes, [chunk.request_id for chunk in plan.prefills]) == (("a",), ["p"])


def test_out_of_blocks_the_latest_arrivals_make_room():
    running = [decode("a", True), decode("b", True), decode("c"), decode("d")]
    plan = plan_step([], running, 0, StepLimits(100, 100))
    assert plan.decodes == ("a", "b")
    assert plan.preempted == ("d", "c")


def test_a_preempted_one_may_itself_be_the_need():
    plan = plan_step([], [decode("a", True), decode("b", True)], 1, StepLimits(100, 100))
    assert (plan.decodes, plan.preempted) == (("a",), ("b",))


def test_limits_name_what_is_wrong():
    with pytest.raises(ValueError, match="tokens_max"):
        StepLimits(0, 1)


@given(
    waiting=st.lists(st.integers(1, 300), max_size=8),
    running=st.lists(st.booleans(), max_size=12),
    free_blocks=st.integers(0, 12),
    tokens_max=st.integers(1, 256),
    requests_max=st.integers(1, 16),
)
def test_every_plan_keeps_the_limits(waiting, running, free_blocks, tokens_max, requests_max):
    prefills = [prefill(f"p{i}", tokens) for i, tokens in enumerate(waiting)]
    decodes = [decode(f"d{i}", needs) for i, needs in enumerate(running)]
    plan = plan_step(prefills, decodes, free_blocks, StepLimits(tokens_max, requests_max))

    assert len(plan.decodes) + sum(chunk.tokens for chunk in plan.prefills) <= tokens_max
    assert len(plan.decodes) + len(plan.prefills) <= requests_max
    kept = len(decodes) - len(plan.preempted)
    names = [work.request_id for work in decodes]
    assert list(plan.decodes) == names[: min(kept, tokens_max, requests_max)]
    assert list(plan.preempted) == names[kept:][::-1]
    needs = dict(zip(names, running, strict=True))
    given_back = sum(not needs[name] for name in plan.preempted)
    assert sum(needs[name] for name in plan.decodes) <= free_blocks + given_back
    assert not plan.preempted or sum(running) > free_blocks
    room = min(tokens_max - len(plan.decodes), requests_max - len(plan.decodes))
    assert bool(plan.prefills) == (room > 0 and bool(waiting))
    assert [chunk.request_id for chunk in plan.prefills] == [f"p{i}" for i in range(len(plan.prefills))]
    assert all(chunk.tokens == waiting[i] for i, chunk in enumerate(plan.prefills[:-1]))
