import pytest
from hypothesis import given
from hypothesis import strategies as st

from policy.core import CostCoefficients
from policy.cost import prefill_s
from policy.preempt import HostCopyCost, Preemption, choose_preemption, swap_s

pytestmark = pytest.mark.unit

TOKEN_BYTES = 327_680
"""LLaMA2-70B with GQA."""
PREFILL_2K = CostCoefficients(0.0, 5e-4, 0.0, 0.0, 0.0, 0.0, 0.0, 1e9)
"""2,000 tokens a second."""


def test_on_the_reference_hardware_a_copy_beats_computing_again() -> None:
    """320 kB a token at 128 GB/s, twice, against 500 µs: 100 times cheaper."""
    copy = HostCopyCost(1e-4, 128e9)
    assert swap_s(copy, 1000 * TOKEN_BYTES) == pytest.approx(2 * (1e-4 + 1000 * TOKEN_BYTES / 128e9))
    assert choose_preemption(PREFILL_2K, copy, 1000, 0, 1000 * TOKEN_BYTES) is Preemption.SWAP


def test_a_slow_link_or_few_lost_tokens_are_computed_again() -> None:
    slow = HostCopyCost(1e-4, 1e9)
    assert choose_preemption(PREFILL_2K, slow, 1000, 0, 1000 * TOKEN_BYTES) is Preemption.RECOMPUTE
    far = HostCopyCost(0.1, 128e9)
    assert choose_preemption(PREFILL_2K, far, 10, 0, 10 * TOKEN_BYTES) is Preemption.RECOMPUTE
    assert choose_preemption(PREFILL_2K, far, 10_000, 0, 10_000 * TOKEN_BYTES) is Preemption.SWAP


def test_a_long_context_makes_computing_again_dearer() -> None:
    quadratic = CostCoefficients(0.0, 5e-4, 1e-7, 0.0, 0.0, 0.0, 0.0, 1e9)
    copy = HostCopyCost(0.0, 1e9)
    assert choose_preemption(quadratic, copy, 100, 0, 100 * TOKEN_BYTES) is Preemption.RECOMPUTE
    assert choose_preemption(quadratic, copy, 100, 5000, 100 * TOKEN_BYTES) is Preemption.SWAP


def test_of_equals_it_is_recompute() -> None:
    assert prefill_s(PREFILL_2K, 2, 0) == swap_s(HostCopyCost(5e-4, 1e9), 0) == 1e-3
    assert choose_preemption(PREFILL_2K, HostCopyCost(5e-4, 1e9), 2, 0, 0) is Preemption.RECOMPUTE


@given(
    tokens=st.integers(1, 100_000),
    more=st.integers(1, 100_000),
    fixed_s=st.floats(0, 1),
    bytes_per_s=st.floats(1e6, 1e12),
)
def test_where_a_copy_pays_it_pays_for_more_of_the_same(tokens, more, fixed_s, bytes_per_s) -> None:
    copy = HostCopyCost(fixed_s, bytes_per_s)
    few = choose_preemption(PREFILL_2K, copy, tokens, 0, tokens * TOKEN_BYTES)
    many = choose_preemption(PREFILL_2K, copy, tokens + more, 0, (tokens + more) * TOKEN_BYTES)
    assert few is Preemption.RECOMPUTE or many is Preemption.SWAP


@pytest.mark.parametrize(
    ("fixed_s", "bytes_per_s", "named"), [(-1.0, 1.0, "fixed_s"), (0.0, 0.0, "bytes_per_s")]
)
def test_impossible_costs_name_the_field(fixed_s: float, bytes_per_s: float, named: str) -> None:
    with pytest.raises(ValueError, match=named):
        HostCopyCost(fixed_s, bytes_per_s)
