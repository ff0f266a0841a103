"""The sampler: pure, seeded, and distributed as the parameters say."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.errors import SamplingError
from engine.sampler import sample, uniform
from policy.core import SamplingParams

pytestmark = pytest.mark.unit


def params(**changes: object) -> SamplingParams:
    return SamplingParams(output_tokens_max=100, **changes)


def kept_tokens(logits: np.ndarray, sampling: SamplingParams) -> set[int]:
    """The tokens that may be drawn, worked out the slow way."""
    scaled = logits.astype(np.float64) / sampling.temperature
    weights = np.exp(scaled - scaled.max())
    if sampling.top_k:
        threshold = np.sort(weights)[::-1][min(sampling.top_k, len(weights)) - 1]
        weights = np.where(weights >= threshold, weights, 0.0)
    order = np.argsort(-weights, kind="stable")
    mass = 0.0
    smallest = weights[order[0]]
    for token in order:
        smallest = weights[token]
        mass += weights[token]
        if mass >= sampling.top_p * weights.sum() * (1 - 1e-12):
            break
    return {int(token) for token in np.flatnonzero((weights >= smallest) & (weights > 0))}


@given(
    logits=st.lists(st.floats(-20, 20, width=32), min_size=1, max_size=40, unique=True),
    temperature=st.floats(0.05, 5.0),
    top_p=st.floats(0.05, 1.0),
    top_k=st.integers(0, 45),
    seed=st.integers(-(2**63), 2**63 - 1),
    position=st.integers(0, 10_000),
)
def test_only_kept_tokens_are_drawn_and_logits_stay(
    logits: list[float], temperature: float, top_p: float, top_k: int, seed: int, position: int
) -> None:
    sampling = params(temperature=temperature, top_p=top_p, top_k=top_k, seed=seed)
    given_logits = torch.tensor(logits)
    before = given_logits.clone()
    token = sample(given_logits, sampling, position)
    assert token in kept_tokens(np.array(logits, dtype=np.float32), sampling)
    assert torch.equal(given_logits, before)
    assert sample(given_logits, sampling, position) == token


@pytest.mark.parametrize(
    ("sampling", "allowed"),
    [
        (params(temperature=1.0), (0, 1, 2, 3, 4)),
        (params(temperature=0.5), (0, 1, 2, 3, 4)),
        (params(temperature=2.0, top_k=3), (1, 3, 4)),
        (params(temperature=1.0, top_p=0.8), (1, 3, 4)),
        (params(temperature=1.0, top_p=0.8, top_k=2), (1, 4)),
    ],
)
def test_frequencies_are_the_probabilities(sampling: SamplingParams, allowed: tuple[int, ...]) -> None:
    logits = torch.tensor([0.0, 1.5, -1.0, 1.0, 2.0])
    draws = 4000
    counts = np.bincount([sample(logits, sampling, position) for position in range(draws)], minlength=5)
    weights = np.zeros(5)
    weights[list(allowed)] = np.exp(logits.numpy()[list(allowed)] / sampling.temperature)
    for count, probability in zip(counts, weights / weights.sum(), strict=True):
        deviation = math.sqrt(draws * probability * (1 - probability))
        assert abs(count - draws * probability) <= 4 * deviation


def test_seeds_draw_different_sequences() -> None:
    logits = torch.zeros(1000)
    drawn = [[sample(logits, params(temperature=1.0, seed=seed), p) for p in range(50)] for seed in (1, 2)]
    assert sum(a == b for a, b in zip(*drawn, strict=True)) < 5
    assert len(set(drawn[0])) > 40


def test_uniform_numbers_are_the_same_everywhere() -> None:
    """Golden values: another process, or another version, must draw the same."""
    assert uniform(0, 0) == 0.8150393007738989
    assert uniform(7, 3) == 0.47027646012584634
    assert uniform(2**40 + 1, 999) == 0.06972773159088763
    assert uniform(-1, 0) == uniform(2**64 - 1, 0)
    numbers = np.array([uniform(seed, position) for seed in range(50) for position in range(40)])
    assert numbers.min() >= 0
    assert numbers.max() < 1
    assert abs(numbers.mean() - 0.5) < 4 * math.sqrt(1 / 12 / len(numbers))


def test_greedy_ignores_the_seed_and_the_limits() -> None:
    logits = torch.tensor([0.5, 3.0, 2.9])
    assert {sample(logits, params(seed=seed, top_p=0.5), 4) for seed in range(20)} == {1}
    assert {sample(logits, params(seed=seed, temperature=9.0, top_k=1), 4) for seed in range(20)} == {1}


def test_the_coldest_temperature_is_greedy_and_overflows_nothing() -> None:
    logits = torch.tensor([100.0, 101.0, -1e30])
    assert {sample(logits, params(temperature=1e-30, seed=seed), 0) for seed in range(20)} == {1}


def test_stop_tokens_wait_until_enough_came() -> None:
    logits = torch.tensor([1.0, 5.0, 4.0])
    sampling = params(stop_token_ids=(1, 99), output_tokens_min=3)
    assert [sample(logits, sampling, position) for position in range(5)] == [2, 2, 2, 1, 1]
    drawn = params(stop_token_ids=(1,), output_tokens_min=3, temperature=1.0)
    assert 1 not in {sample(logits, drawn, position % 3) for position in range(50)}


def test_all_tokens_stopping_leaves_them_all() -> None:
    assert sample(torch.tensor([1.0, 5.0]), params(stop_token_ids=(0, 1), output_tokens_min=3), 0) == 1


def test_a_flat_nucleus_is_wider_than_the_first_look() -> None:
    """90 % of 5,000 nearly equal tokens are far more than the best 1,024."""
    logits = torch.linspace(0.01, 0.0, 5000)
    drawn = [sample(logits, params(temperature=1.0, top_p=0.9), position) for position in range(800)]
    assert max(drawn) < 4520
    assert max(drawn) > 4300


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"temperature": float("inf")}, "temperature"),
        ({"top_p": 0.0}, "top_p"),
        ({"top_p": 1.1}, "top_p"),
        ({"top_k": -1}, "top_k"),
    ],
)
def test_a_parameter_out_of_range_is_named(changes: dict[str, float], field: str) -> None:
    with pytest.raises(SamplingError, match=field):
        sample(torch.zeros(3), params(**changes), 0)
