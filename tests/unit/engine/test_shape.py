"""Shaping: bias, penalties and masks against transformers and plain formulas; other rows stay as they are."""

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import RepetitionPenaltyLogitsProcessor

from engine.shape import shape_
from engine.step import SequenceStep
from policy.core import SamplingParams
from structures.masks import mask_words

pytestmark = pytest.mark.unit

VOCAB_SIZE = 70
TOKENS = st.lists(st.integers(0, VOCAB_SIZE - 1), max_size=40)


def row(
    prompt: list[int] = (),
    output: list[int] = (),
    allowed: list[int] | None = None,
    output_tokens: int | None = None,
    **sampling: object,
) -> SequenceStep:
    return SequenceStep(
        (1,),
        0,
        (0,),
        SamplingParams(100, **sampling),
        len(output) if output_tokens is None else output_tokens,
        prompt_token_ids=np.array(prompt, np.int32),
        output_token_ids=tuple(output),
        allowed=None if allowed is None else lambda: packed(allowed),
    )


def packed(token_ids: list[int]) -> np.ndarray:
    bits = np.zeros(mask_words(VOCAB_SIZE) * 32, np.uint8)
    bits[token_ids] = 1
    return np.packbits(bits, bitorder="little").view(np.int32)


def logits_of(seed: int) -> torch.Tensor:
    return torch.randn(VOCAB_SIZE, generator=torch.Generator().manual_seed(seed)) * 3


def shaped(sequence: SequenceStep, seed: int = 0) -> torch.Tensor:
    logits = logits_of(seed)[None]
    shape_(logits, [sequence])
    return logits[0]


@given(prompt=TOKENS, output=TOKENS, penalty=st.sampled_from([0.5, 1.1, 2.0]))
@settings(deadline=None)
def test_repetition_is_punished_as_in_transformers(
    prompt: list[int], output: list[int], penalty: float
) -> None:
    found = shaped(row(prompt, output, repetition_penalty=penalty))
    expected = logits_of(0)[None]
    if prompt or output:
        expected = RepetitionPenaltyLogitsProcessor(penalty)(torch.tensor([prompt + output]), expected)
    torch.testing.assert_close(found, expected[0])


@given(
    prompt=TOKENS,
    output=TOKENS,
    presence=st.floats(-2, 2, width=32),
    frequency=st.floats(-2, 2, width=32),
)
@settings(deadline=None)
def test_presence_and_frequency_count_the_output_alone(
    prompt: list[int], output: list[int], presence: float, frequency: float
) -> None:
    found = shaped(row(prompt, output, presence_penalty=presence, frequency_penalty=frequency))
    expected = logits_of(0)
    for token_id, count in Counter(output).items():
        expected[token_id] -= frequency * count + presence
    torch.testing.assert_close(found, expected)


def test_bias_comes_before_the_penalties() -> None:
    bias = ((5, 50.0), (6, -100.0))
    sequence = row([], [5, 5], logit_bias=bias, repetition_penalty=2.0, presence_penalty=1.0)
    found, raw = shaped(sequence), logits_of(0)
    assert found[5] == pytest.approx((raw[5] + 50) / 2 - 1)
    assert found[6] == pytest.approx(raw[6] - 100)
    assert found[7] == raw[7]


def test_stop_tokens_wait_until_enough_came() -> None:
    for output_tokens, waits in ((0, True), (2, True), (3, False)):
        sequence = row(stop_token_ids=(7, 1, 999, -1, 7), output_tokens_min=3, output_tokens=output_tokens)
        expected = logits_of(0)
        if waits:
            expected[[1, 7]] = float("-inf")
        assert torch.equal(shaped(sequence), expected)


def test_where_all_tokens_stop_none_has_to_wait() -> None:
    sequence = row(stop_token_ids=tuple(range(VOCAB_SIZE)), output_tokens_min=3)
    assert torch.equal(shaped(sequence), logits_of(0))


@given(allowed=st.lists(st.integers(0, VOCAB_SIZE - 1), unique=True))
@settings(deadline=None)
def test_a_mask_leaves_what_it_allows(allowed: list[int]) -> None:
    found, raw = shaped(row(allowed=allowed)), logits_of(0)
    assert np.flatnonzero(found.isfinite()).tolist() == sorted(allowed)
    assert torch.equal(found[allowed], raw[allowed])


@pytest.mark.parametrize(("allowed", "left"), [([31, 32, 63, 5], [5, 32]), ([31, 63], [31, 63])])
def test_a_mask_that_allows_only_stop_tokens_goes_before_the_length(
    allowed: list[int], left: list[int]
) -> None:
    mask = packed(allowed)
    sequence = replace(row(stop_token_ids=(31, 63, 64, 500, -1), output_tokens_min=3), allowed=lambda: mask)
    assert np.flatnonzero(shaped(sequence).isfinite()).tolist() == left
    assert np.array_equal(mask, packed(allowed)), "the mask belongs to the caller"


def test_rows_that_ask_for_nothing_are_not_touched_and_others_do_not_matter() -> None:
    sequences = [
        row([1, 2], [3], repetition_penalty=1.5),
        row(),
        row(allowed=[4, 9]),
        row([1, 2], [3, 3], frequency_penalty=1.0, logit_bias=((3, 1.0),)),
        row(allowed=[69], stop_token_ids=(69,), output_tokens_min=2),
        row([5], [6]),
    ]
    logits = torch.stack([logits_of(seed) for seed in range(len(sequences))])
    shape_(logits, sequences)
    for seed, (found, sequence) in enumerate(zip(logits, sequences, strict=True)):
        assert torch.equal(found, shaped(sequence, seed))
    for untouched in (1, 5):
        assert torch.equal(logits[untouched], logits_of(untouched))
