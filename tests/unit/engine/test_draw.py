"""The draw: exactly the distribution that transformers' warpers make, and every row by itself."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from engine.draw import Draw, DrawParameters, best_places, draw

pytestmark = pytest.mark.unit

CPU = torch.device("cpu")
SETTINGS = st.builds(
    Draw,
    temperature=st.sampled_from([0.0, 0.25, 1.0, 3.0]),
    top_k=st.sampled_from([0, 1, 2, 7, 100, 10_000]),
    top_p=st.sampled_from([1.0, 0.95, 0.5, 0.01]),
    min_p=st.sampled_from([0.0, 0.01, 0.3, 1.0]),
    uniform=st.floats(0, 1, exclude_max=True),
)


def drawn(logits: torch.Tensor, *rows: Draw) -> list[int]:
    """One draw from the same logits for each of `rows`."""
    return draw(logits.expand(len(rows), -1), DrawParameters.of(rows, CPU)).tolist()


def warped(logits: torch.Tensor, setting: Draw) -> np.ndarray:
    """The probabilities as transformers makes them."""
    warpers = LogitsProcessorList([TemperatureLogitsWarper(setting.temperature)])
    if setting.top_k:
        warpers.append(TopKLogitsWarper(setting.top_k))
    if setting.top_p < 1:
        warpers.append(TopPLogitsWarper(setting.top_p))
    if setting.min_p:
        warpers.append(MinPLogitsWarper(setting.min_p))
    return warpers(torch.zeros(1, 1, dtype=torch.long), logits.double()[None])[0].softmax(-1).numpy()


@pytest.mark.parametrize("vocab_size", [3, 64, 200, 5000])
@pytest.mark.parametrize(
    "setting",
    [
        Draw(1.0),
        Draw(0.5),
        Draw(2.0, top_k=3),
        Draw(1.0, top_k=60),
        Draw(1.0, top_p=0.8),
        Draw(0.7, top_p=0.95),
        Draw(3.0, top_p=0.999),
        Draw(1.0, min_p=0.05),
        Draw(1.5, top_k=50, top_p=0.9, min_p=0.02),
    ],
)
@pytest.mark.parametrize("spread", [0.05, 3.0])
def test_each_token_owns_its_probability_as_in_transformers(
    vocab_size: int, setting: Draw, spread: float
) -> None:
    generator = torch.Generator().manual_seed(vocab_size)
    logits = torch.randn(vocab_size, generator=generator) * spread
    probabilities = warped(logits, setting)
    ends = probabilities.cumsum()
    wide = np.flatnonzero(probabilities > 1e-9)
    wide = wide[:: max(1, len(wide) // 500)]
    uniforms = [(ends[token] - probabilities[token] / 2) / ends[-1] for token in wide]
    assert drawn(logits, *(replace(setting, uniform=u) for u in uniforms)) == wide.tolist()


def test_frequencies_follow_the_distribution() -> None:
    """Chi-square over a small vocabulary, with numbers of a fixed seed: 5 degrees of freedom."""
    logits = torch.tensor([0.0, 1.5, -1.0, 1.0, 2.0, -2.0])
    draws = 20_000
    numbers = np.random.default_rng(5).random(draws)
    counts = np.bincount(drawn(logits, *(Draw(1.3, uniform=u) for u in numbers)), minlength=6)
    expected = (logits.double() / 1.3).softmax(-1).numpy() * draws
    assert ((counts - expected) ** 2 / expected).sum() < 20.5  # exceeded by one in a thousand


@given(
    rows=st.lists(st.tuples(st.integers(0, 5), SETTINGS), min_size=2, max_size=32),
    vocab_size=st.sampled_from([2, 63, 640, 4099]),
    data=st.data(),
)
@settings(deadline=None, max_examples=60)
def test_a_row_draws_the_same_alone_and_anywhere_in_a_batch(
    rows: list[tuple[int, Draw]], vocab_size: int, data: st.DataObject
) -> None:
    kinds = torch.randn(6, vocab_size, generator=torch.Generator().manual_seed(1)) * 2
    kinds[5] = 0.0  # all the same
    logits = kinds[[kind for kind, _ in rows]]
    before = logits.clone()
    parameters = [setting for _, setting in rows]
    together = draw(logits, DrawParameters.of(parameters, CPU)).tolist()
    assert torch.equal(logits, before)
    assert together == [
        draw(logits[i : i + 1].clone(), DrawParameters.of(parameters[i : i + 1], CPU)).item()
        for i in range(len(rows))
    ]
    order = data.draw(st.permutations(range(len(rows))))
    shuffled = draw(logits[list(order)], DrawParameters.of([parameters[i] for i in order], CPU)).tolist()
    assert shuffled == [together[i] for i in order]


@given(
    logits=st.lists(st.sampled_from([-3.0, 0.0, 0.5, 2.0, float("-inf")]), min_size=1, max_size=300),
    setting=SETTINGS,
)
@settings(deadline=None)
def test_a_draw_is_never_an_impossible_token(logits: list[float], setting: Draw) -> None:
    row = torch.tensor([*logits, 1.0])
    token_id = drawn(row, setting)[0]
    assert row[token_id] > float("-inf")
    if setting.top_k == 1 or setting.temperature == 0:
        assert token_id == int(np.argmax(row.numpy()))


@given(values=st.lists(st.integers(-4, 4), min_size=1, max_size=700), count=st.integers(1, 80))
def test_the_best_places_are_those_that_a_sort_finds(values: list[int], count: int) -> None:
    row = np.array(values, np.float32)
    count = min(count, row.size)
    last = np.sort(row)[::-1][count - 1]
    assert best_places(row, count).tolist() == np.flatnonzero(row >= last).tolist()


def test_greedy_ignores_everything_else_and_takes_the_first_of_equals() -> None:
    logits = torch.tensor([0.5, 3.0, 2.9, 3.0])
    assert drawn(logits, *(Draw(0.0, 3, 0.5, 0.1, u / 7) for u in range(7))) == [1] * 7
    assert drawn(logits[:3], *(Draw(9.0, top_k=1, uniform=u / 7) for u in range(7))) == [1] * 7


def test_the_coldest_and_the_warmest_temperature_overflow_nothing() -> None:
    logits = torch.tensor([100.0, 101.0, -1e30, 3e38, float("-inf")])
    assert drawn(logits, *(Draw(1e-30, uniform=u / 9) for u in range(9))) == [3] * 9
    assert drawn(logits[:3], *(Draw(100.0, uniform=u) for u in (0.0, 0.4, 0.999999))) == [0, 0, 1]


def test_equals_share_a_nucleus_and_a_top_k() -> None:
    """Where the last place is tied, all that tie are in: no order among them depends on a sort."""
    flat = torch.zeros(4)
    numbers = [0.1, 0.3, 0.6, 0.9]
    assert drawn(flat, *(Draw(1.0, top_p=0.25, uniform=u) for u in numbers)) == [0, 1, 2, 3]
    assert drawn(flat, *(Draw(1.0, top_k=2, uniform=u) for u in numbers)) == [0, 1, 2, 3]


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("setting", [Draw(), Draw(1.0, uniform=0.5), Draw(1.0, 3, 0.9, 0.1, 0.5)])
def test_a_row_that_is_not_finite_points_at_what_is_not(bad: float, setting: Draw) -> None:
    logits = torch.tensor([1.0, bad, 2.0])
    assert drawn(logits, setting) == [1]
    hopeless = torch.full((3,), float("-inf"))
    assert drawn(hopeless, setting)[0] in range(3)
