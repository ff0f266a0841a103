"""The sampler's last stage: one token a row from shaped logits and one uniform number a row.

Temperature, top-k, top-p, min-p, then the inverse CDF in vocabulary order, which rounding differences
between batches cannot reorder. A row's token depends on nothing but the row: each is worked out by
itself, in float64. What is here runs on the host, in numpy, whose single pass over a row beats a
parallel torch; it is the twin of kernels with the same signature.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

BOUND_BLOCK_TOKENS = 64
"""The best k tokens are looked for among those that are no worse than k blocks' maxima."""
NUCLEUS_RUNG = 1 / 16
"""Top-p looks at the tokens within this factor of the best, then within its square, and so on."""

Float32Array = npt.NDArray[np.float32]
Float64Array = npt.NDArray[np.float64]
Int64Array = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Draw:
    """How one row is drawn; temperature 0 is greedy and needs none of the others."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    uniform: float = 0.0


@dataclass(frozen=True, slots=True)
class DrawParameters:
    """`Draw` of S rows as tensors on the backend's device, each [S]."""

    temperature: Tensor
    """float32; 0: the largest logit, of equals the first."""
    top_k: Tensor
    """int32; 0: no limit."""
    top_p: Tensor
    """float32, above 0; 1: no limit."""
    min_p: Tensor
    """float32; 0: no limit."""
    uniform: Tensor
    """float64 in [0, 1); in float32 it may round to 1."""

    @classmethod
    def of(cls, rows: Sequence[Draw], device: torch.device) -> "DrawParameters":
        return cls(
            torch.tensor([row.temperature for row in rows], dtype=torch.float32, device=device),
            torch.tensor([row.top_k for row in rows], dtype=torch.int32, device=device),
            torch.tensor([row.top_p for row in rows], dtype=torch.float32, device=device),
            torch.tensor([row.min_p for row in rows], dtype=torch.float32, device=device),
            torch.tensor([row.uniform for row in rows], dtype=torch.float64, device=device),
        )


def draw(logits: Tensor, parameters: DrawParameters) -> Tensor:
    """[S, vocabulary] float32 → [S] int64, the token of each row. `logits` is not changed.

    A row whose largest logit is not finite gives the place of that one: its logit shows the failure.
    """
    rows = logits.cpu().numpy()
    token_ids = rows.argmax(axis=-1)
    settings = zip(
        parameters.temperature.tolist(),
        parameters.top_k.tolist(),
        parameters.top_p.tolist(),
        parameters.min_p.tolist(),
        parameters.uniform.tolist(),
        strict=True,
    )
    for index, setting in enumerate(settings):
        one = Draw(*setting)
        if one.temperature > 0.0 and one.top_k != 1 and np.isfinite(rows[index, token_ids[index]]):
            token_ids[index] = _draw_one(rows[index], one, float(rows[index, token_ids[index]]))
    return torch.from_numpy(token_ids).to(logits.device)


def _draw_one(row: Float32Array, one: Draw, largest: float) -> int:
    token_ids: Int64Array | None = None
    kept = row
    if 0 < one.top_k < row.size:
        token_ids = best_places(row, one.top_k)
        kept = row[token_ids]
    weights = kept.astype(np.float64)  # proportional to the probabilities, the largest being 1
    weights -= largest
    weights /= one.temperature
    np.exp(weights, out=weights)
    threshold = one.min_p
    if one.top_p < 1.0:
        threshold = max(threshold, _nucleus_threshold(weights, one.top_p))
    if threshold > 0.0:
        heavy = np.flatnonzero(weights >= threshold)
        weights = weights[heavy]
        token_ids = heavy if token_ids is None else token_ids[heavy]
    place = _inverse_cdf(weights, one.uniform)
    return place if token_ids is None else int(token_ids[place])


def best_places(row: Float32Array, count: int) -> Int64Array:
    """Places of the `count` largest, in order of place; those that tie with the last are kept too."""
    blocks = row.size // BOUND_BLOCK_TOKENS
    if count > blocks:
        return np.flatnonzero(row >= np.partition(row, -count)[-count])
    maxima = row[: blocks * BOUND_BLOCK_TOKENS].reshape(blocks, BOUND_BLOCK_TOKENS).max(axis=1)
    bound = np.partition(maxima, -count)[-count]  # `count` elements at least are no smaller
    places: Int64Array = np.flatnonzero(row >= bound)
    chosen = row[places]
    best: Int64Array = places[chosen >= np.partition(chosen, -count)[-count]]
    return best


def _nucleus_threshold(weights: Float64Array, top_p: float) -> float:
    """The smallest of the fewest largest weights that have `top_p` of the mass; the largest weight is 1.

    Only the heaviest are sorted, as many rungs of a ladder as it takes. Below (1 - top_p) of the mean
    weight nothing counts: all that is lighter has less than 1 - top_p of the mass.
    """
    mass = float(weights.sum())
    lightest = (1.0 - top_p) * mass / weights.size
    rung = NUCLEUS_RUNG
    heavy = weights[weights >= rung]
    while rung > lightest and float(heavy.sum()) < top_p * mass:
        rung *= NUCLEUS_RUNG
        heavy = weights[weights >= rung]
    descending = np.sort(heavy)[::-1]
    reached = int(np.searchsorted(descending.cumsum(), top_p * mass))
    return float(descending[min(reached, descending.size - 1)])


def _inverse_cdf(weights: Float64Array, uniform: float) -> int:
    cumulative = torch.from_numpy(weights).cumsum(0).numpy()  # as exact as numpy's, three times as fast
    place = int(np.searchsorted(cumulative, uniform * cumulative[-1], side="right"))
    if place < weights.size:
        return place
    return int(np.flatnonzero(weights)[-1])  # rounding put the draw at the very end: the last that counts
