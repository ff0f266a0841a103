import pytest
from tests.support.views import COST

from policy.cost import step_s
from policy.details import told_s
from policy.load_sums import DecodeLoad
from policy.second_admission import joined_step_s, missed_step_target

pytestmark = pytest.mark.unit

PRESENT = DecodeLoad(sequences=3, kv_tokens=600)


def test_the_step_counts_what_is_there_and_each_sample_that_joins():
    assert joined_step_s(COST, PRESENT, 100) == step_s(COST, 4, 700)
    assert joined_step_s(COST, PRESENT, 100, samples=3) == step_s(COST, 6, 900)


def test_exactly_the_target_is_met():
    step = joined_step_s(COST, PRESENT, 100)
    assert missed_step_target(COST, PRESENT, 100, 1, step) is None
    assert missed_step_target(COST, PRESENT, 100, 2, step) == (
        f"{told_s(step_s(COST, 5, 800))} between tokens predicted, wanted within {told_s(step)}"
    )
