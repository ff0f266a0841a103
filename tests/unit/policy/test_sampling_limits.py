"""Ranges of sampling parameters: each bound is in, what is beyond it is named with the limit."""

import math

import pytest

from policy.core import SamplingParams
from policy.sampling_limits import (
    LOGIT_BIAS_ENTRIES_MAX,
    LOGPROBS_MAX,
    SAMPLES_MAX,
    STOP_TOKEN_IDS_MAX,
    TOP_K_MAX,
    sampling_problem,
)

pytestmark = pytest.mark.unit

VOCAB_SIZE = 1000
MANY = tuple((token_id, 1.0) for token_id in range(LOGIT_BIAS_ENTRIES_MAX + 1))


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"temperature": 100.0, "top_p": 1.0, "top_k": TOP_K_MAX, "min_p": 1.0},
        {"top_p": 1e-9},
        {"presence_penalty": -2.0, "frequency_penalty": 2.0},
        {"repetition_penalty": 0.01},
        {"repetition_penalty": 100.0},
        {"logprobs": 0},
        {"logprobs": LOGPROBS_MAX},
        {"samples": SAMPLES_MAX},
        {"seed": -(2**63)},
        {"logit_bias": ((0, -100.0), (VOCAB_SIZE - 1, 100.0))},
        {"logit_bias": MANY[:-1]},
        {"stop_token_ids": tuple(range(STOP_TOKEN_IDS_MAX))},
    ],
)
def test_what_is_in_range_is_no_problem(changes: dict[str, object]) -> None:
    assert sampling_problem(SamplingParams(5, **changes), VOCAB_SIZE) is None


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"temperature": -0.1}, "temperature is -0.1, must be at least 0.0 and at most 100.0"),
        ({"temperature": math.nan}, "temperature is nan"),
        ({"temperature": math.inf}, "temperature is inf"),
        ({"top_p": 0.0}, "top_p is 0.0, must be above 0 and at most 1"),
        ({"top_p": 1.1}, "top_p is 1.1"),
        ({"top_p": math.nan}, "top_p is nan"),
        ({"top_k": -1}, "top_k is -1"),
        ({"top_k": TOP_K_MAX + 1}, f"top_k is {TOP_K_MAX + 1}"),
        ({"min_p": 1.5}, "min_p is 1.5"),
        ({"presence_penalty": 2.1}, "presence_penalty is 2.1, must be at least -2.0 and at most 2.0"),
        ({"frequency_penalty": -3.0}, "frequency_penalty is -3.0"),
        ({"repetition_penalty": 0.0}, "repetition_penalty is 0.0, must be at least 0.01"),
        ({"logprobs": -1}, "logprobs is -1"),
        ({"logprobs": LOGPROBS_MAX + 1}, f"logprobs is 21, must be at least 0 and at most {LOGPROBS_MAX}"),
        ({"samples": 0}, "samples is 0"),
        ({"output_tokens_min": -1}, "output_tokens_min is -1"),
        ({"stop_token_ids": tuple(range(STOP_TOKEN_IDS_MAX + 1))}, "stop_token_ids has 1025 entries"),
        ({"logit_bias": MANY}, "logit_bias has 301 entries, at most 300"),
        ({"logit_bias": ((VOCAB_SIZE, 1.0),)}, "logit_bias names token 1000, must be 0 to 999"),
        ({"logit_bias": ((-1, 1.0),)}, "logit_bias names token -1"),
        ({"logit_bias": ((5, 101.0),)}, "logit_bias of token 5 is 101.0, must be -100.0 to 100.0"),
        ({"logit_bias": ((5, math.nan),)}, "logit_bias of token 5 is nan"),
        ({"logit_bias": ((5, 1.0), (5, 1.0))}, "logit_bias names a token twice"),
    ],
)
def test_what_is_out_of_range_is_named(changes: dict[str, object], problem: str) -> None:
    found = sampling_problem(SamplingParams(5, **changes), VOCAB_SIZE)
    assert found is not None
    assert found.startswith(problem)


def test_history_is_needed_only_for_penalties() -> None:
    assert not SamplingParams(5, temperature=1.0, logit_bias=((1, 1.0),), min_p=0.1).needs_history
    for name in ("repetition_penalty", "presence_penalty", "frequency_penalty"):
        assert SamplingParams(5, **{name: 1.5}).needs_history
