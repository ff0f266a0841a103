"""What a replay sends of a trace, when, and of which tokens."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvhash import BLOCK_TOKENS
from moonpool.replay.prompts import TokenRange, prompt_token_ids
from moonpool.replay.schedule import SCALE_MAX, ScheduledRequest, block_ends, reusable_tokens, schedule
from simulator.trace import TracedRequest

pytestmark = pytest.mark.unit


def traced(arrived_ms: int, input_tokens: int, output_tokens: int = 64, ids: tuple[int, ...] = ()):
    return TracedRequest(
        arrived_ms, input_tokens, output_tokens, ids or tuple(range(-(-input_tokens // 512)))
    )


def test_times_are_divided_by_the_speedup_and_count_from_the_first_that_is_sent() -> None:
    trace = [traced(9_000, 512), traced(5_000, 100_000), traced(6_000, 512), traced(7_500, 512)]
    plan = schedule(trace, speedup=2.0, scale=1.0, context_tokens_max=1_000)
    assert [(request.number, request.due_s) for request in plan.requests] == [(3, 0.0), (4, 0.75), (1, 1.5)]
    assert [request.number for request in plan.too_long] == [2]
    assert plan.window_s == 1.5


def test_lengths_are_scaled_and_never_nothing() -> None:
    trace = [traced(0, 1_000, 70), traced(0, 31, 0)]
    plan = schedule(trace, speedup=1.0, scale=32.0, context_tokens_max=1_000)
    assert [(request.prompt_tokens, request.output_tokens) for request in plan.requests] == [(31, 2), (1, 1)]


def test_what_does_not_fit_with_its_answer_is_left_out_whole() -> None:
    trace = [traced(0, 60, 40), traced(0, 60, 41)]
    plan = schedule(trace, speedup=1.0, scale=1.0, context_tokens_max=100)
    assert [request.number for request in plan.requests] == [1]
    assert [request.number for request in plan.too_long] == [2]
    nothing = schedule(trace, speedup=1.0, scale=1.0, context_tokens_max=50)
    assert (nothing.requests, nothing.window_s, len(nothing.too_long)) == ((), 0.0, 2)


def prompt(request: ScheduledRequest, scale: float, seed: int = 7) -> list[int]:
    ends = block_ends(request, scale)
    return prompt_token_ids(request.block_ids, ends, seed, TokenRange(10, 300)).tolist()


@given(
    scale=st.one_of(st.floats(0.5, SCALE_MAX), st.sampled_from([1.0, 3.0, 32.0, 100.0, SCALE_MAX])),
    shared=st.integers(0, 4),
    tails=st.tuples(st.integers(1, 1500), st.integers(1, 1500)),
)
def test_prompts_are_equal_as_far_as_their_blocks_are(scale, shared, tails) -> None:
    trace = [
        traced(
            0,
            shared * 512 + tail,
            ids=(*range(shared), *(base + number for number in range(-(-tail // 512)))),
        )
        for base, tail in ((1_000, tails[0]), (2_000, tails[1]))
    ]
    first, second = schedule(trace, speedup=1.0, scale=scale, context_tokens_max=10**9).requests
    prompts = [prompt(first, scale), prompt(second, scale)]
    assert [len(tokens) for tokens in prompts] == [first.prompt_tokens, second.prompt_tokens]
    common = int(shared * 512 / scale)
    assert prompts[0][:common] == prompts[1][:common]
    assert common <= min(map(len, prompts))


def test_another_block_or_seed_is_other_tokens_and_all_are_in_the_range() -> None:
    request = schedule([traced(0, 4096)], speedup=1.0, scale=1.0, context_tokens_max=10_000).requests[0]
    tokens = prompt(request, 1.0)
    assert tokens == prompt(request, 1.0)
    assert tokens != prompt(request, 1.0, seed=8)
    assert set(tokens) == set(range(10, 301))
    blocks = {tuple(tokens[start : start + 16]) for start in range(0, 4096, 16)}
    assert len(blocks) == 256


def test_part_of_a_block_begins_like_the_whole_of_it() -> None:
    whole = prompt_token_ids((5, 6), (512, 1024), 1, TokenRange())
    part = prompt_token_ids((5, 6), (512, 600), 1, TokenRange())
    assert np.array_equal(whole[:600], part)


def test_ids_of_any_size_make_tokens() -> None:
    ids = (-1, 2**70, 2**70 + 1)
    tokens = prompt_token_ids(ids, (16, 32, 48), 2**63 - 1, TokenRange()).tolist()
    assert len({tuple(tokens[start : start + 16]) for start in (0, 16, 32)}) == 3


def test_reuse_is_counted_in_whole_blocks_and_without_the_last_token() -> None:
    trace = [
        traced(0, 1024, ids=(0, 1)),
        traced(1, 1024, ids=(0, 1)),  # all but its last token, which is the end of a block
        traced(2, 1000, ids=(0, 2)),  # the first block
        traced(3, 1024, ids=(0, 2)),  # 1000 tokens of it
        traced(4, 512, ids=(9,)),
    ]
    requests = schedule(trace, speedup=1.0, scale=1.0, context_tokens_max=10_000).requests
    assert reusable_tokens(requests[:1], 1.0) == 0
    assert reusable_tokens(requests[:2], 1.0) == 1024 - BLOCK_TOKENS
    assert reusable_tokens(requests[:3], 1.0) == 1024 - BLOCK_TOKENS + 512
    assert reusable_tokens(requests, 1.0) == 1024 - BLOCK_TOKENS + 512 + 992


@given(
    scale=st.sampled_from([1.0, 7.3, 32.0, 64.0, 300.0]),
    lengths=st.lists(st.tuples(st.integers(1, 3_000), st.integers(0, 2)), min_size=1, max_size=8),
)
def test_what_is_said_to_be_reusable_is_what_the_tokens_share(scale, lengths) -> None:
    trace = []
    for length, family in lengths:
        ids = tuple(family * 100 + number for number in range(-(-length // 512)))
        trace.append(traced(len(trace), length, ids=ids))
    requests = schedule(trace, speedup=1.0, scale=scale, context_tokens_max=10**9).requests
    cached: set[tuple[int, ...]] = set()
    found = 0
    for request in requests:
        tokens = prompt(request, scale)
        ends = range(BLOCK_TOKENS, len(tokens) + 1, BLOCK_TOKENS)
        usable = [end for end in ends if end < len(tokens)]
        found += max((end for end in usable if tuple(tokens[:end]) in cached), default=0)
        cached |= {tuple(tokens[:end]) for end in ends}
    # The same family with another length is the same tokens; chance makes no two blocks of 16 equal.
    expected = reusable_tokens(requests, scale)
    assert expected == found
