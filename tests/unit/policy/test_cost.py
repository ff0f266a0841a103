import re
from dataclasses import fields, replace
from math import inf, nan

import pytest

from policy.core import CostCoefficients
from policy.cost import prefill_s, step_s, transfer_s

pytestmark = pytest.mark.unit

COST = CostCoefficients(1.0, 0.1, 0.01, 2.0, 0.2, 0.002, 3.0, 100.0)


def test_prefill_counts_pairs_with_prefix_and_with_itself():
    assert prefill_s(COST, 10, 0) == pytest.approx(1 + 1 + 0.01 * 50)
    assert prefill_s(COST, 10, 20) == pytest.approx(1 + 1 + 0.01 * (200 + 50))


def test_two_chunks_cost_what_one_does_but_for_the_fixed_part():
    whole = prefill_s(COST, 30, 5)
    assert prefill_s(COST, 10, 5) + prefill_s(COST, 20, 15) == pytest.approx(whole + COST.prefill_fixed_s)


def test_step():
    assert step_s(COST, 3, 500) == pytest.approx(2 + 0.6 + 1.0)


def test_transfer():
    assert transfer_s(COST, 250) == pytest.approx(3 + 2.5)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *((coefficient.name, -1e-9) for coefficient in fields(CostCoefficients)),
        ("transfer_bytes_per_s", 0.0),
        ("ssd_bytes_per_s", 0.0),
        *((coefficient.name, inf) for coefficient in fields(CostCoefficients)),
        *((coefficient.name, nan) for coefficient in fields(CostCoefficients)),
        # Sums with them would be infinite or no number, and no decision could be made or told.
        ("prefill_per_token_pair_s", 1e30),
        ("step_fixed_s", 1e308),
        ("transfer_bytes_per_s", 1e-300),
    ],
)
def test_coefficients_that_make_no_sense_are_refused(field: str, value: float) -> None:
    with pytest.raises(ValueError, match=re.escape(f"{field}: {value}, must be ")):
        replace(COST, **{field: value})


def test_break_even_of_the_study_note():
    """Moving a token's 320 kB at 100 GB/s takes 3.2 µs, computing it at 2,000 token/s 500 µs: 156 times."""
    reference = CostCoefficients(0.0, 1 / 2000, 0.0, 0.0, 0.0, 0.0, 0.0, 100e9)
    moved_s, computed_s = transfer_s(reference, 320_000), prefill_s(reference, 1, 0)
    assert moved_s == pytest.approx(3.2e-6)
    assert computed_s == pytest.approx(500e-6)
    assert computed_s / moved_s == pytest.approx(156.25)
