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

from engine.triton_kernels.common import require_contiguous_rows

ELEMENTS_AT_ONCE = 4096


def draw(
    logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, uniform: Tensor
) -> Tensor:
    """logits [S, V] float32, the parameters [S] as in `engine.draw.DrawParameters` → token ids [S] int64."""
    require_contiguous_rows(logits=logits)
    rows, vocabulary = logits.shape
    token_ids = torch.empty(rows, dtype=torch.int64, device=logits.device)
    if rows:
        _draw_row[(rows,)](
            logits,
            temperature,
            top_k,
            top_p,
            min_p,
            uniform,
            token_ids,
            vocabulary,
            logits.stride(0),
            ELEMENTS=min(ELEMENTS_AT_ONCE, max(16, triton.next_power_of_2(vocabulary))),
            num_warps=16,
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
def _worth(logits, live, largest, temperature, WEIGHTED: tl.constexpr):
    """What a token adds to the measure: its weight, or 1."""
    if WEIGHTED:
        return tl.where(live, tl.exp((logits - largest) / temperature), 0.0)
    return live.to(tl.float32)


@triton.jit
def _measure(
    row, vocabulary, threshold, largest, temperature, WEIGHTED: tl.constexpr, ELEMENTS: tl.constexpr
):
    """The worth of all tokens whose logit is at least `threshold`."""
    lanes = tl.arange(0, ELEMENTS)
    total = tl.zeros([ELEMENTS], tl.float32)
    for start in tl.range(0, vocabulary, ELEMENTS):
        live = start + lanes < vocabulary
        logits = tl.load(row + start + lanes, mask=live, other=float("-inf"))
        total += _worth(logits, live & (logits >= threshold), largest, temperature, WEIGHTED)
    return tl.sum(total.to(tl.float64), 0)


@triton.jit
def _threshold(
    row, vocabulary, lowest, largest, temperature, wanted, WEIGHTED: tl.constexpr, ELEMENTS: tl.constexpr
):
    """The largest number such that the tokens at or above it are worth at least `wanted`.

    `lowest` is known to reach it. Three probes a pass: two bits of the number each.
    """
    lanes = tl.arange(0, ELEMENTS)
    reached = _ordered(lowest)
    missed = _ordered(largest) + 1
    while missed - reached > 1:
        step = (missed - reached + 3) // 4
        first = _number(tl.minimum(reached + step, missed - 1))
        second = _number(tl.minimum(reached + 2 * step, missed - 1))
        third = _number(tl.minimum(reached + 3 * step, missed - 1))
        above_first = tl.zeros([ELEMENTS], tl.float32)
        above_second = tl.zeros([ELEMENTS], tl.float32)
        above_third = tl.zeros([ELEMENTS], tl.float32)
        for start in tl.range(0, vocabulary, ELEMENTS):
            live = start + lanes < vocabulary
            logits = tl.load(row + start + lanes, mask=live, other=float("-inf"))
            worth = _worth(logits, live, largest, temperature, WEIGHTED)
            above_first += tl.where(logits >= first, worth, 0.0)
            above_second += tl.where(logits >= second, worth, 0.0)
            above_third += tl.where(logits >= third, worth, 0.0)
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
    lanes = tl.arange(0, ELEMENTS)
    temperature = tl.load(temperatures + index)
    top_k = tl.load(top_ks + index)
    top_p = tl.load(top_ps + index)
    min_p = tl.load(min_ps + index)

    best = tl.full([ELEMENTS], float("-inf"), tl.float32)
    best_at = tl.zeros([ELEMENTS], tl.int32)
    for start in tl.range(0, vocabulary, ELEMENTS):
        live = start + lanes < vocabulary
        held = tl.load(row + start + lanes, mask=live, other=float("-inf"))
        better = held > best
        best_at = tl.where(better, start + lanes, best_at)
        best = tl.where(better, held, best)
    largest = tl.max(best, 0)
    # Of equals the first.
    greedy = tl.min(tl.where(best == largest, best_at, vocabulary), 0)
    if (temperature <= 0.0) | (top_k == 1):
        tl.store(token_ids + index, greedy.to(tl.int64))
        return

    threshold = tl.full([], float("-inf"), tl.float32)
    if (top_k > 0) & (top_k < vocabulary):
        threshold = _threshold(
            row, vocabulary, threshold, largest, temperature, top_k.to(tl.float64), False, ELEMENTS
        )
    if top_p < 1.0:
        mass = _measure(row, vocabulary, threshold, largest, temperature, True, ELEMENTS)
        wanted = mass * top_p.to(tl.float64)
        threshold = _threshold(row, vocabulary, threshold, largest, temperature, wanted, True, ELEMENTS)
    weight_min = tl.maximum(min_p, 0.0)

    total = tl.zeros([], tl.float64)
    for start in tl.range(0, vocabulary, ELEMENTS):
        live = start + lanes < vocabulary
        held = tl.load(row + start + lanes, mask=live, other=float("-inf"))
        weights = _worth(held, live & (held >= threshold), largest, temperature, True)
        weights = tl.where(weights >= weight_min, weights, 0.0)
        total += tl.sum(weights, 0).to(tl.float64)

    target = tl.load(uniforms + index).to(tl.float64) * total
    passed = tl.zeros([], tl.float64)
    chosen = vocabulary
    # Where rounding puts the draw at the very end: the last token that counts.
    last = greedy
    start = vocabulary * 0
    while (start < vocabulary) & (chosen == vocabulary):
        live = start + lanes < vocabulary
        held = tl.load(row + start + lanes, mask=live, other=float("-inf"))
        weights = _worth(held, live & (held >= threshold), largest, temperature, True)
        weights = tl.where(weights >= weight_min, weights, 0.0)
        counted = weights > 0.0
        tile_total = tl.sum(weights, 0).to(tl.float64)
        if passed + tile_total > target:
            running = passed + tl.cumsum(weights, 0).to(tl.float64)
            chosen = tl.min(tl.where(counted & (running > target), start + lanes, vocabulary), 0)
        last = tl.maximum(last, tl.max(tl.where(counted, start + lanes, -1), 0))
        passed += tile_total
        start += ELEMENTS
    token_id = tl.where(chosen < vocabulary, chosen, last)
    tl.store(token_ids + index, token_id.to(tl.int64))
