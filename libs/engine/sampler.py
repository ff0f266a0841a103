"""The next tokens of a step: a pure function of (logits, request state, seed, position), row by row.

Randomness is counter-based: one uniform number from a hash of (seed, sample, position), no generator
state. So a replayed, moved or preempted request draws the same numbers wherever and with whomever it
runs. Shaping is `engine.shape`'s, drawing `engine.draw`'s or a kernel's.
"""

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf, isfinite

import numpy as np
import xxhash
from torch import Tensor

from engine.draw import Draw, DrawParameters, Float32Array
from engine.errors import SamplingError
from engine.logprobs import token_logprobs
from engine.shape import shape_
from engine.step import SequenceStep
from policy.core import SamplingParams, TokenLogprobs
from policy.sampling_limits import sampling_problem

NOT_FINITE = "its logits are not finite: wrong weights or stale KV"
NOTHING_ALLOWED = "no token is allowed"


@dataclass(frozen=True, slots=True)
class Sampled:
    """What came of a sequence: a token, or why there is none; neither where none was wanted."""

    token_id: int | None = None
    logprobs: TokenLogprobs | None = None
    failure: str | None = None


NOTHING_SAMPLED = Sampled()


def sample(
    logits: Tensor, sequences: Sequence[SequenceStep], draw: Callable[[Tensor, DrawParameters], Tensor]
) -> tuple[Sampled, ...]:
    """The tokens of `sequences`, which all sample, from their float32 logits [S, vocabulary].

    `logits` are overwritten. A row fails alone where its logits are not finite or allow no token.
    """
    samplings = [_sampling(sequence) for sequence in sequences]
    raw = {
        row: np.copy(logits[row].cpu().numpy())
        for row, one in enumerate(samplings)
        if one.logprobs is not None
    }
    shape_(logits, sequences)
    rows = [_draw_of(one, sequence) for one, sequence in zip(samplings, sequences, strict=True)]
    drawn = draw(logits, DrawParameters.of(rows, logits.device))
    chosen = logits.gather(1, drawn.unsqueeze(1)).squeeze(1)  # shows NaN and infinity without a pass more
    return tuple(
        _sampled(token_id, logit, sampling, raw.get(row))
        for row, (token_id, logit, sampling) in enumerate(
            zip(drawn.tolist(), chosen.tolist(), samplings, strict=True)
        )
    )


def check(sampling: SamplingParams, vocab_size: int) -> None:
    """Raises SamplingError naming the first parameter that is out of range, and the limit."""
    problem = sampling_problem(sampling, vocab_size)
    if problem is not None:
        raise SamplingError(problem)


def uniform(seed: int, sample: int, position: int) -> float:
    """The one random number in [0, 1) of (seed, sample, position), the same in every process.

    Sample and position share a word of the hashed text. The hash's own seed would not do: it is combined
    with the text bit by bit, and so one request's samples would be those of the next seed.
    """
    packed = struct.pack("<QII", seed & 0xFFFF_FFFF_FFFF_FFFF, position, sample)
    return (xxhash.xxh3_64_intdigest(packed) >> 11) * 2.0**-53


def _sampling(sequence: SequenceStep) -> SamplingParams:
    assert sequence.sampling is not None, "a sequence without a row"
    return sequence.sampling


def _draw_of(sampling: SamplingParams, sequence: SequenceStep) -> Draw:
    if sampling.temperature == 0.0:
        return Draw()
    number = uniform(sampling.seed, sequence.sample, sequence.output_tokens)
    return Draw(sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p, number)


def _sampled(token_id: int, logit: float, sampling: SamplingParams, raw: Float32Array | None) -> Sampled:
    if not isfinite(logit):
        return Sampled(failure=NOTHING_ALLOWED if logit == -inf else NOT_FINITE)
    if raw is None or sampling.logprobs is None:
        return Sampled(token_id)
    if not isfinite(raw.max()):  # what a mask hides
        return Sampled(failure=NOT_FINITE)
    return Sampled(token_id, token_logprobs(raw, token_id, sampling.logprobs))
