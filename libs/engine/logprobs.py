"""Log probabilities of a token and of the most probable ones, from the logits as the model gave them."""

import numpy as np

from engine.draw import Float32Array, best_places
from policy.core import TokenLogprobs

LOGPROB_MIN = -9999.0
"""Stands for impossible, as in OpenAI's API: infinity has no JSON."""
LOGPROB_DECIMALS = 6
"""What float32 logits can tell apart, and short on the wire."""


def token_logprobs(row: Float32Array, token_id: int, top: int) -> TokenLogprobs:
    """From logits [vocabulary] without NaN; the `top` best are told, all where there are fewer."""
    largest = row.max()
    logarithms = row.astype(np.float64) - largest
    logarithms -= np.log(np.exp(logarithms).sum())

    def told(place: int) -> float:
        return round(max(float(logarithms[place]), LOGPROB_MIN), LOGPROB_DECIMALS)

    best: list[int] = []
    if top > 0:
        places = best_places(row, min(top, row.size))
        order = np.argsort(-row[places], kind="stable")  # of equals the lower id first
        best = places[order[:top]].tolist()
    return TokenLogprobs(told(token_id), tuple((place, told(place)) for place in best))
