"""The next token from logits: a pure function of (logits, sampling parameters, position).

Randomness is counter-based: one uniform number from a hash of (seed, position), no generator state.
So a replayed, moved or preempted request draws the same numbers wherever and with whomever it runs.
The inverse CDF runs in vocabulary order, which rounding differences between batches cannot reorder.
"""

import struct

import torch
import xxhash
from torch import Tensor

from engine.errors import SamplingError
from policy.core import SamplingParams

NUCLEUS_TOKENS_FIRST = 1024
"""Top-p looks at this many best tokens before it sorts the whole vocabulary."""


def uniform(seed: int, position: int) -> float:
    """The one random number in [0, 1) that belongs to (seed, position), the same in every process."""
    packed = struct.pack("<QQ", seed & 0xFFFF_FFFF_FFFF_FFFF, position)
    return (xxhash.xxh3_64_intdigest(packed) >> 11) * 2.0**-53


def sample(logits: Tensor, sampling: SamplingParams, position: int) -> int:
    """The token at output `position` (0 is the first of the answer), from float32 logits [vocabulary].

    `logits` is not changed. Order: stop tokens masked while fewer than `output_tokens_min` came,
    temperature, top-k, top-p. Raises SamplingError for a parameter out of range.
    """
    check(sampling)
    if position < sampling.output_tokens_min and sampling.stop_token_ids:
        logits = _without(logits, sampling.stop_token_ids)
    if sampling.temperature == 0.0 or sampling.top_k == 1:
        return int(logits.argmax())
    weights = _unnormalised(logits, sampling.temperature)
    if 0 < sampling.top_k < weights.numel():
        weights = _top_k(weights, sampling.top_k)
    if sampling.top_p < 1.0:
        weights = _top_p(weights, sampling.top_p)
    return _inverse_cdf(weights, uniform(sampling.seed, position))


def check(sampling: SamplingParams) -> None:
    """Raises SamplingError naming the first parameter that is out of range."""
    if not 0.0 <= sampling.temperature < float("inf"):
        raise SamplingError(f"temperature must be 0 or more, not {sampling.temperature}")
    if not 0.0 < sampling.top_p <= 1.0:
        raise SamplingError(f"top_p must be above 0 and at most 1, not {sampling.top_p}")
    if sampling.top_k < 0:
        raise SamplingError(f"top_k must be 0 (no limit) or more, not {sampling.top_k}")


def _without(logits: Tensor, token_ids: tuple[int, ...]) -> Tensor:
    banned = [token_id for token_id in token_ids if 0 <= token_id < logits.numel()]
    if len(set(banned)) == logits.numel():
        return logits
    masked = logits.clone()
    masked[banned] = float("-inf")
    return masked


def _unnormalised(logits: Tensor, temperature: float) -> Tensor:
    """float64 weights proportional to the probabilities, the largest being 1: no temperature overflows."""
    return ((logits.double() - logits.max().double()) / temperature).exp_()


def _top_k(weights: Tensor, top_k: int) -> Tensor:
    """Keeps the `top_k` largest weights; those that tie with the last are kept too."""
    threshold = weights.topk(top_k).values[-1]
    return torch.where(weights >= threshold, weights, 0.0)


def _top_p(weights: Tensor, top_p: float) -> Tensor:
    """Keeps the fewest largest weights that have `top_p` of the mass; ties with the last are kept too."""
    mass = float(weights.sum()) * top_p
    largest = weights.topk(min(NUCLEUS_TOKENS_FIRST, weights.numel())).values
    if float(largest.sum()) < mass:
        largest = weights.sort(descending=True).values
    reached = int(torch.searchsorted(largest.cumsum(0), mass))
    threshold = largest[min(reached, largest.numel() - 1)]
    return torch.where(weights >= threshold, weights, 0.0)


def _inverse_cdf(weights: Tensor, drawn: float) -> int:
    cumulative = weights.cumsum(0)
    index = int(torch.searchsorted(cumulative, drawn * float(cumulative[-1]), right=True))
    if index < weights.numel():
        return index
    return int(weights.nonzero()[-1])  # rounding put the draw at the very end: the last token that counts
