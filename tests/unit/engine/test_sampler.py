"""The sampler as a whole: random numbers that follow the request, logprobs, and rows that fail alone."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.draw import draw
from engine.errors import SamplingError
from engine.logprobs import LOGPROB_MIN, token_logprobs
from engine.sampler import NOT_FINITE, NOTHING_ALLOWED, check, sample, uniform
from engine.step import SequenceStep
from policy.core import SamplingParams
from structures.masks import mask_words

pytestmark = pytest.mark.unit

VOCAB_SIZE = 300
SAMPLINGS = [
    SamplingParams(99),
    SamplingParams(99, temperature=1.0, seed=1),
    SamplingParams(99, temperature=0.8, top_p=0.9, top_k=40, seed=2**63 - 1),
    SamplingParams(99, temperature=1.2, min_p=0.05, repetition_penalty=1.3, seed=-5),
    SamplingParams(99, temperature=1.0, presence_penalty=1.0, frequency_penalty=0.5, seed=3, logprobs=3),
    SamplingParams(99, logit_bias=((7, 4.0),), stop_token_ids=(2,), output_tokens_min=50, logprobs=0),
]


def language(token_ids: list[int]) -> torch.Tensor:
    """A model as far as a sampler can tell: logits from the last token."""
    return torch.randn(VOCAB_SIZE, generator=torch.Generator().manual_seed(token_ids[-1])) * 2


def next_step(prompt: list[int], output: list[int], sampling: SamplingParams, of: int = 0) -> SequenceStep:
    return SequenceStep(
        (1,),
        0,
        (0,),
        sampling,
        len(output),
        sample=of,
        prompt_token_ids=np.array(prompt, np.int32),
        output_token_ids=np.array(output, np.int32),
    )


def generate(
    samplings: list[SamplingParams], tokens: int, outputs: list[list[int]] | None = None
) -> list[list[int]]:
    """Batched generation of `tokens` tokens after `outputs`, each request from a prompt of its own."""
    prompts = [[index + 1, index + 2] for index in range(len(samplings))]
    grown = [list(output) for output in outputs or [[] for _ in samplings]]
    for _ in range(tokens):
        steps = [next_step(p, o, s) for p, o, s in zip(prompts, grown, samplings, strict=True)]
        logits = torch.stack([language(p + o) for p, o in zip(prompts, grown, strict=True)])
        for output, sampled in zip(grown, sample(logits, steps, draw), strict=True):
            assert sampled.failure is None
            assert sampled.token_id is not None
            output.append(sampled.token_id)
    return grown


def test_a_replay_from_any_point_and_in_another_batch_gives_the_same_tokens() -> None:
    """As after a move, a loss or a preemption: state is prompt, output so far and the parameters."""
    whole = generate(SAMPLINGS, 24)
    assert len({tuple(output) for output in whole}) == len(SAMPLINGS)
    for cut in (1, 11, 23):
        assert generate(SAMPLINGS, 24 - cut, [output[:cut] for output in whole]) == whole
    for index, sampling in enumerate(SAMPLINGS):
        others = [SAMPLINGS[0]] * index
        assert generate([*others, sampling], 24)[-1] == whole[index]


def test_uniform_numbers_are_the_same_everywhere() -> None:
    """Golden values: another process, or another version, must draw the same."""
    assert uniform(0, 0, 0) == 0.8150393007738989
    assert uniform(7, 0, 3) == 0.47027646012584634
    assert uniform(2**40 + 1, 0, 999) == 0.06972773159088763
    assert uniform(7, 1, 3) == 0.7752953290560047
    assert uniform(-1, 0, 0) == uniform(2**64 - 1, 0, 0)


def test_uniform_numbers_are_uniform_and_none_follows_from_another() -> None:
    numbers = np.array([[[uniform(s, n, p) for p in range(20)] for n in range(5)] for s in range(20)])
    assert numbers.min() >= 0
    assert numbers.max() < 1
    counts, _ = np.histogram(numbers, bins=10, range=(0, 1))
    expected = numbers.size / 10
    assert ((counts - expected) ** 2 / expected).sum() < 27.9  # 9 degrees of freedom, one in a thousand
    for other in (numbers[1:].ravel(), numbers[:, 1:].ravel(), numbers[:, :, 1:].ravel()):
        same_length = numbers.ravel()[: other.size]
        assert abs(np.corrcoef(same_length, other)[0, 1]) < 4 / math.sqrt(other.size)
    assert len(np.unique(numbers)) == numbers.size


def test_seeds_and_samples_draw_different_tokens() -> None:
    flat = torch.zeros(1, 1000)
    base = SamplingParams(99, temperature=1.0, seed=1)
    answers = [
        [sample(flat.clone(), [next_step([1], [0] * p, one, of)], draw)[0].token_id for p in range(50)]
        for one, of in ((base, 0), (base, 1), (replace(base, seed=2), 0))
    ]
    for a in range(3):
        assert len(set(answers[a])) > 40
        assert sum(x == y for x, y in zip(answers[a], answers[a - 1], strict=True)) < 5


@given(
    logits=st.lists(st.integers(-8, 8), min_size=2, max_size=200),
    top=st.integers(0, 20),
    data=st.data(),
)
@settings(deadline=None)
def test_logprobs_are_the_models_own(logits: list[int], top: int, data: st.DataObject) -> None:
    token_id = data.draw(st.integers(0, len(logits) - 1))
    found = token_logprobs(np.array(logits, np.float32), token_id, top)
    expected = torch.tensor(logits, dtype=torch.float64).log_softmax(-1)
    assert found.token_logprob == pytest.approx(float(expected[token_id]), abs=1e-6)
    best = sorted(range(len(logits)), key=lambda place: (-logits[place], place))[:top]
    assert [place for place, _ in found.top] == best
    for place, logprob in found.top:
        assert logprob == pytest.approx(float(expected[place]), abs=1e-6)


def test_an_impossible_token_has_a_finite_logprob() -> None:
    found = token_logprobs(np.array([0.0, -np.inf], np.float32), 1, 2)
    assert found.token_logprob == LOGPROB_MIN
    assert found.top == ((0, 0.0), (1, LOGPROB_MIN))


def test_logprobs_are_told_before_bias_penalty_mask_and_temperature() -> None:
    logits = torch.tensor([[1.0, 2.0, 3.0, 0.5]])
    allowed = np.array([0b0011], np.int32)
    sampling = SamplingParams(
        9, temperature=0.01, logit_bias=((0, 50.0),), presence_penalty=1.0, logprobs=2, seed=4
    )
    step = replace(next_step([1], [0], sampling), allowed=lambda: allowed)
    told = sample(logits.clone(), [step], draw)[0]
    expected = logits[0].double().log_softmax(-1)
    assert told.token_id == 0
    assert told.logprobs is not None
    assert told.logprobs.token_logprob == pytest.approx(float(expected[0]), abs=1e-6)
    assert [place for place, _ in told.logprobs.top] == [2, 1]


def test_logprobs_come_only_where_they_are_wanted() -> None:
    logits = torch.zeros(2, 4)
    steps = [next_step([1], [], SamplingParams(9)), next_step([1], [], SamplingParams(9, logprobs=0))]
    first, second = sample(logits, steps, draw)
    assert first.logprobs is None
    assert second.logprobs is not None
    assert second.logprobs.top == ()


@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_row_that_is_not_finite_fails_alone(sampling: SamplingParams, bad: float) -> None:
    logits = torch.stack([language([token]) for token in range(3)])
    well = [sample(logits[[row]], [next_step([1], [2], sampling)], draw)[0] for row in (0, 2)]
    logits = torch.stack([language([token]) for token in range(3)])
    logits[1] = bad
    steps = [next_step([1], [2], sampling)] * 3
    first, failed, last = sample(logits, steps, draw)
    assert (failed.token_id, failed.failure) == (None, NOT_FINITE)
    assert [first, last] == well


def test_a_mask_that_allows_nothing_fails_its_row_by_name() -> None:
    step = replace(
        next_step([1], [2], SamplingParams(9, temperature=1.0)),
        allowed=lambda: np.zeros(mask_words(VOCAB_SIZE), np.int32),
    )
    assert sample(language([1])[None], [step], draw)[0].failure == NOTHING_ALLOWED


def test_a_mask_does_not_hide_that_logits_with_logprobs_are_not_finite() -> None:
    logits = torch.tensor([[1.0, float("nan")]])
    sampling = SamplingParams(9, logprobs=1)
    step = replace(next_step([1], [], sampling), allowed=lambda: np.array([1], np.int32))
    assert sample(logits, [step], draw)[0].failure == NOT_FINITE


def test_a_parameter_out_of_range_is_named() -> None:
    check(SamplingParams(9), VOCAB_SIZE)
    with pytest.raises(SamplingError, match="top_p is 0"):
        check(SamplingParams(9, top_p=0.0), VOCAB_SIZE)
