"""A prefix is brought in as far as that saves time, and only as long as it is worth it."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvhash import BLOCK_TOKENS
from policy.cost import ASSUMED_COST, prefill_s, ssd_read_s, transfer_s
from worker.fetch_plan import FETCH_S_MAX, FETCH_S_MIN, FetchPlan, patience_s, worthwhile

pytestmark = pytest.mark.unit

COST = replace(
    ASSUMED_COST,
    prefill_per_token_s=1e-3,
    prefill_per_token_pair_s=0.0,
    transfer_fixed_s=0.001,
    transfer_bytes_per_s=1e6,
    ssd_fixed_s=0.001,
    ssd_bytes_per_s=1e6,
)
"""16 ms to compute a block, and 1 ms to move it, if it has 1000 bytes."""


@pytest.mark.parametrize(
    ("plan", "ssd_blocks", "block_bytes", "worth"),
    [
        (FetchPlan(2, 2, 10), 0, 1000, FetchPlan(2, 2, 10)),
        (FetchPlan(2, 6, 10), 4, 1000, FetchPlan(2, 6, 10)),
        (FetchPlan(2, 6, 0), 4, 1000, FetchPlan(2, 6, 0)),
        (FetchPlan(2, 2, 10), 0, 20_000, FetchPlan(2, 0, 0)),
        (FetchPlan(2, 6, 0), 4, 20_000, FetchPlan(2, 0, 0)),
        # What lies in memory here rises though the rest does not pay; what lies on SSD would not pay either.
        (FetchPlan(2, 6, 10), 0, 20_000, FetchPlan(2, 6, 0)),
        (FetchPlan(2, 6, 10), 4, 20_000, FetchPlan(2, 0, 0)),
        # 2 blocks on SSD cost 41 ms and save 32; with 8 more from memory here and 2 from the source it pays.
        (FetchPlan(0, 2, 0), 2, 20_000, FetchPlan(0, 0, 0)),
        (FetchPlan(0, 10, 12), 2, 20_000, FetchPlan(0, 10, 0)),
    ],
)
def test_as_much_is_brought_as_saves_time(
    plan: FetchPlan, ssd_blocks: int, block_bytes: int, worth: FetchPlan
) -> None:
    assert worthwhile(plan, ssd_blocks, COST, block_bytes) == worth
    assert worth.brings == (worth.target_blocks > 2 or (plan.held_blocks == 0 and worth.target_blocks > 0))


@given(
    st.integers(0, 50),
    st.integers(0, 50),
    st.integers(0, 50),
    st.floats(0.0, 1.0),
    st.floats(0.0, 1e-4),
    st.integers(1, 100_000),
)
def test_no_other_part_of_the_plan_saves_more(
    held: int, rising: int, reading: int, ssd_share: float, pair_s: float, block_bytes: int
) -> None:
    cost = replace(COST, prefill_per_token_pair_s=pair_s)
    rise = held + rising
    plan = FetchPlan(held, rise, rise + reading if reading else 0)
    ssd_blocks = int(ssd_share * rising)

    def first_token_s(part: FetchPlan) -> float:
        end = max(part.held_blocks, part.target_blocks)
        rise_s = ssd_read_s(cost, ssd_blocks * block_bytes) if part.rise_blocks > held else 0.0
        read = max(0, part.read_blocks - part.rise_blocks)
        read_s = transfer_s(cost, read * block_bytes) if read else 0.0
        prompt_tokens = 2000
        return rise_s + read_s + prefill_s(cost, prompt_tokens - end * BLOCK_TOKENS, end * BLOCK_TOKENS)

    best = worthwhile(plan, ssd_blocks, cost, block_bytes)
    parts = [plan, FetchPlan(held, rise, 0), FetchPlan(held, 0, 0)]
    assert best in parts
    assert first_token_s(best) <= min(first_token_s(part) for part in parts) + 1e-9


def test_a_fetch_gets_as_long_as_it_is_worth_within_bounds() -> None:
    assert patience_s(FetchPlan(0, 0, 1), COST) == FETCH_S_MIN
    assert patience_s(FetchPlan(0, 0, 400), COST) == pytest.approx(2 * 6.4)
    assert patience_s(FetchPlan(0, 0, 10_000), COST) == FETCH_S_MAX
