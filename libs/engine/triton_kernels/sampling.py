"""The sampler's last stage: one token a row, by temperature, top-k, top-p, min-p and the inverse CDF.

One program a row, no sort: a threshold on the logits is found by bisection over their bit patterns, which
order like the numbers. So it is exact, and tokens that tie with the last kept one are kept, as in the
torch twin (`engine.draw`). Each probe reads the row once; a row of 128k logits stays in the L2 cache.

Weights are float32 and their sums float64 (the twin is float64 throughout): the two may choose
neighbouring tokens where the drawn number falls within about 1e-6 of their border.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.draw import DrawParameters
from engine.triton_kernels.common import FUSE_MULTIPLY_ADD, require_contiguous_rows

ELEMENTS_AT_ONCE = 8192
"""32 KiB on their way to one program: less would wait for the L2 cache most of the time, more would spill."""
WARPS = 32


def draw(logits: Tensor, parameters: DrawParameters) -> Tensor:
    """[S, vocabulary] float32 → [S] int64, the token of each row; see `engine.draw.draw`."""
    require_contiguous_rows(logits=logits)
    rows, vocabulary = logits.shape
    token_ids = torch.empty(rows, dtype=torch.int64, device=logits.device)
    if rows:
        _draw_row[(rows,)](
            logits,
            parameters.temperature,
            parameters.top_k,
            parameters.top_p,
            parameters.min_p,
            parameters.uniform,
            token_ids,
            vocabulary,
            logits.stride(0),
            ELEMENTS=min(ELEMENTS_AT_ONCE, max(16, triton.next_power_of_2(vocabulary))),
            num_warps=WARPS,
            enable_fp_fusion=FUSE_MULTIPLY_ADD,
        )
    return token_ids


@triton.jit
def _ordered(number):
    """A float32's bit pattern as an integer that orders like the number; its own inverse on patterns."""
    pattern = number.to(tl.int32, bitcast=True)
    return tl.where(pattern < 0, pattern ^ 0x7FFFFFFF, pattern).to(tl.int64)


@triton.jit
def _number(ordered):
    pattern = ordered.to(tl.int32)
    return tl.where(pattern < 0, pattern ^ 0x7FFFFFFF, pattern).to(tl.float32, bitcast=True)


@triton.jit
def _tile(row, start, vocabulary, ELEMENTS: tl.constexpr):
    """The next logits as rows of four, which one thread adds up alone, and their places in the vocabulary."""
    at = start + tl.arange(0, ELEMENTS // 4)[:, None] * 4 + tl.arange(0, 4)[None, :]
    return tl.load(row + at, mask=at < vocabulary, other=float("-inf")), at


@triton.jit
def _weights(logits, threshold, largest, temperature):
    """Proportional to the probabilities, the largest being 1; 0 below the threshold."""
    return tl.where(logits >= threshold, tl.exp((logits - largest) / temperature), 0.0)


@triton.jit
def _mass(row, vocabulary, threshold, weight_min, largest, temperature, ELEMENTS: tl.constexpr):
    """The weight of all tokens that are kept."""
    total = tl.zeros([ELEMENTS // 4], tl.float32)
    for start in tl.range(0, vocabulary, ELEMENTS):
        logits, _ = _tile(row, start, vocabulary, ELEMENTS)
        weights = _weights(logits, threshold, largest, temperature)
        total += tl.sum(tl.where(weights >= weight_min, weights, 0.0), 1)
    return tl.sum(total.to(tl.float64), 0)


@triton.jit
def _threshold(
    row, vocabulary, lowest, largest, temperature, wanted, WEIGHTED: tl.constexpr, ELEMENTS: tl.constexpr
):
    """The largest number such that the tokens at or above it weigh (or number) at least `wanted`.

    `lowest` is known to reach it. Three probes a pass: two bits of the number each.
    """
    reached = _ordered(lowest)
    missed = _ordered(largest) + 1
    while missed - reached > 1:
        step = (missed - reached + 3) // 4
        first = _number(tl.minimum(reached + step, missed - 1))
        second = _number(tl.minimum(reached + 2 * step, missed - 1))
        third = _number(tl.minimum(reached + 3 * step, missed - 1))
        above_first = tl.zeros([ELEMENTS // 4], tl.float32)
        above_second = tl.zeros([ELEMENTS // 4], tl.float32)
        above_third = tl.zeros([ELEMENTS // 4], tl.float32)
        for start in tl.range(0, vocabulary, ELEMENTS):
            logits, _ = _tile(row, start, vocabulary, ELEMENTS)
            if WEIGHTED:
                worth = tl.exp((logits - largest) / temperature)
            else:
                worth = tl.full([ELEMENTS // 4, 4], 1.0, tl.float32)
            above_first += tl.sum(tl.where(logits >= first, worth, 0.0), 1)
            above_second += tl.sum(tl.where(logits >= second, worth, 0.0), 1)
            above_third += tl.sum(tl.where(logits >= third, worth, 0.0), 1)
        reach_first = tl.sum(above_first.to(tl.float64), 0) >= wanted
        reach_second = tl.sum(above_second.to(tl.float64), 0) >= wanted
        reach_third = tl.sum(above_third.to(tl.float64), 0) >= wanted
        if reach_third:
            reached = _ordered(third)
        elif reach_second:
            reached = _ordered(second)
            missed = _ordered(third)
        elif reach_first:
            reached = _ordered(first)
            missed = _ordered(second)
        else:
            missed = _ordered(first)
    return _number(reached)


@triton.jit
def _greedy(row, vocabulary, ELEMENTS: tl.constexpr):
    """The largest logit and its place, of equals the first.

    NaN counts as infinite: a row that is not finite gives a place that shows it.
    """
    largest = tl.full([], float("-inf"), tl.float32)
    place = vocabulary * 0
    for start in tl.range(0, vocabulary, ELEMENTS):
        logits, at = _tile(row, start, vocabulary, ELEMENTS)
        logits = tl.where(logits == logits, logits, float("inf"))
        here = tl.max(tl.max(logits, 1), 0)
        if here > largest:
            largest = here
            place = tl.min(tl.min(tl.where(logits == here, at, vocabulary), 1), 0)
    return largest, place


@triton.jit
def _draw_row(
    logits,
    temperatures,
    top_ks,
    top_ps,
    min_ps,
    uniforms,
    token_ids,
    vocabulary,
    logits_stride,
    ELEMENTS: tl.constexpr,
):
    index = tl.program_id(0)
    row = logits + index.to(tl.int64) * logits_stride
    temperature = tl.load(temperatures + index)
    top_k = tl.load(top_ks + index)
    top_p = tl.load(top_ps + index)
    weight_min = tl.maximum(tl.load(min_ps + index), 0.0)

    largest, greedy = _greedy(row, vocabulary, ELEMENTS)
    if (temperature <= 0.0) | (top_k == 1) | (tl.abs(largest) == float("inf")):
        tl.store(token_ids + index, greedy.to(tl.int64))
        return

    threshold = tl.full([], float("-inf"), tl.float32)
    if (top_k > 0) & (top_k < vocabulary):
        wanted = top_k.to(tl.float64)
        threshold = _threshold(row, vocabulary, threshold, largest, temperature, wanted, False, ELEMENTS)
    if top_p < 1.0:
        mass = _mass(row, vocabulary, threshold, 0.0, largest, temperature, ELEMENTS)
        wanted = mass * top_p.to(tl.float64)
        threshold = _threshold(row, vocabulary, threshold, largest, temperature, wanted, True, ELEMENTS)

    target = _mass(row, vocabulary, threshold, weight_min, largest, temperature, ELEMENTS)
    target = target * tl.load(uniforms + index).to(tl.float64)
    lanes = tl.arange(0, ELEMENTS)
    passed = tl.zeros([], tl.float64)
    chosen = vocabulary
    # Where rounding puts the draw at the very end: the last token that counts.
    last = greedy
    start = vocabulary * 0
    while (start < vocabulary) & (chosen == vocabulary):
        held, at = _tile(row, start, vocabulary, ELEMENTS)
        weights = _weights(held, threshold, largest, temperature)
        weights = tl.where(weights >= weight_min, weights, 0.0)
        tile_mass = tl.sum(tl.sum(weights, 1), 0).to(tl.float64)
        last = tl.maximum(last, tl.max(tl.max(tl.where(weights > 0.0, at, -1), 1), 0))
        if passed + tile_mass > target:
            # It is in this tile: once more, in the order of the vocabulary.
            in_order = tl.load(row + start + lanes, mask=start + lanes < vocabulary, other=float("-inf"))
            ordered_weights = _weights(in_order, threshold, largest, temperature)
            ordered_weights = tl.where(ordered_weights >= weight_min, ordered_weights, 0.0)
            running = passed + tl.cumsum(ordered_weights, 0).to(tl.float64)
            beyond = (ordered_weights > 0.0) & (running > target)
            chosen = tl.min(tl.where(beyond, start + lanes, vocabulary), 0)
        passed += tile_mass
        start += ELEMENTS
    token_id = tl.where(chosen < vocabulary, chosen, last)
    tl.store(token_ids + index, token_id.to(tl.int64))
