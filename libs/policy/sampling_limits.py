"""What sampling parameters may be: every range in one place, for the gateway, the bus and the engine.

A pure check. Knows neither OpenAI's names, which are the gateway's, nor what the parameters do.
"""

import math

from policy.core import SamplingParams

TEMPERATURE_MAX = 100.0
TOP_K_MAX = 2**31 - 1
PENALTY_MIN, PENALTY_MAX = -2.0, 2.0
"""Of the presence and the frequency penalty."""
REPETITION_PENALTY_MIN, REPETITION_PENALTY_MAX = 0.01, 100.0
"""1 changes nothing; nothing in between takes a logit out of float32."""
LOGIT_BIAS_MIN, LOGIT_BIAS_MAX = -100.0, 100.0
LOGIT_BIAS_ENTRIES_MAX = 300
LOGPROBS_MAX = 20
STOP_TOKEN_IDS_MAX = 1024
SAMPLES_MAX = 128


def sampling_problem(sampling: SamplingParams, vocab_size: int) -> str | None:
    """The first field that is out of range and its limit; None where all are well. NaN is in no range."""
    for name, value, low, high in (
        ("temperature", sampling.temperature, 0.0, TEMPERATURE_MAX),
        ("top_k", sampling.top_k, 0, TOP_K_MAX),
        ("min_p", sampling.min_p, 0.0, 1.0),
        ("presence_penalty", sampling.presence_penalty, PENALTY_MIN, PENALTY_MAX),
        ("frequency_penalty", sampling.frequency_penalty, PENALTY_MIN, PENALTY_MAX),
        ("repetition_penalty", sampling.repetition_penalty, REPETITION_PENALTY_MIN, REPETITION_PENALTY_MAX),
        ("logprobs", 0 if sampling.logprobs is None else sampling.logprobs, 0, LOGPROBS_MAX),
        ("samples", sampling.samples, 1, SAMPLES_MAX),
        ("output_tokens_min", sampling.output_tokens_min, 0, math.inf),
    ):
        if not low <= value <= high:
            return f"{name} is {value}, must be at least {low} and at most {high}"
    if not 0.0 < sampling.top_p <= 1.0:
        return f"top_p is {sampling.top_p}, must be above 0 and at most 1"
    if len(sampling.stop_token_ids) > STOP_TOKEN_IDS_MAX:
        return f"stop_token_ids has {len(sampling.stop_token_ids)} entries, at most {STOP_TOKEN_IDS_MAX}"
    return _bias_problem(sampling.logit_bias, vocab_size)


def _bias_problem(logit_bias: tuple[tuple[int, float], ...], vocab_size: int) -> str | None:
    if len(logit_bias) > LOGIT_BIAS_ENTRIES_MAX:
        return f"logit_bias has {len(logit_bias)} entries, at most {LOGIT_BIAS_ENTRIES_MAX}"
    if len({token_id for token_id, _ in logit_bias}) < len(logit_bias):
        return "logit_bias names a token twice, must name each once"
    for token_id, bias in logit_bias:
        if not 0 <= token_id < vocab_size:
            return f"logit_bias names token {token_id}, must be 0 to {vocab_size - 1}"
        if not LOGIT_BIAS_MIN <= bias <= LOGIT_BIAS_MAX:
            return f"logit_bias of token {token_id} is {bias}, must be {LOGIT_BIAS_MIN} to {LOGIT_BIAS_MAX}"
    return None
