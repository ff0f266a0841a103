"""What a profile measures, and how measured seconds become the cost model's coefficients (DESIGN §8).

Pure: the engine runs the steps, this module says which and fits the result.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from engine.errors import EngineError
from engine.step import SequenceStep
from policy.core import CostCoefficients, SamplingParams

PROFILE_BLOCKS_MIN = 16
"""Scratch blocks that a profile needs at least; with more, contexts are longer and the fit is better."""
PROFILE_FURTHER_ROUND_S_MAX = 0.7
"""No further round begins after this long; the first is always completed."""
PROFILE_ROUNDS_MAX = 5
CONTEXT_TOKENS_MAX = 1024
"""Longest context that is measured."""
PREFILL_TOKENS = (16, 96, 48)
"""New tokens of the three prefill points; the last comes on a context."""
BATCH = 8
"""Sequences in the larger decode batches."""
DECODE_REPEATS = 2
"""Runs of a decode point in each round, the fastest counting: a short step is easily disturbed."""

GREEDY = SamplingParams(output_tokens_max=1)


@dataclass(frozen=True, slots=True)
class ProfilePoint:
    """One shape of step: `sequences` that each compute `new_tokens` on `context_tokens`."""

    sequences: int
    new_tokens: int
    context_tokens: int

    @property
    def repeats(self) -> int:
        return DECODE_REPEATS if self.new_tokens == 1 else 1


@dataclass(frozen=True, slots=True)
class ProfilePlan:
    prefill: tuple[ProfilePoint, ...]
    decode: tuple[ProfilePoint, ...]


def plan_profile(blocks: int, block_tokens: int, context_tokens_max: int) -> ProfilePlan:
    """The steps worth measuring with that many scratch blocks."""
    if blocks < PROFILE_BLOCKS_MIN:
        raise EngineError(f"a profile needs at least {PROFILE_BLOCKS_MIN} blocks, not {blocks}")
    longest = min(CONTEXT_TOKENS_MAX, blocks * block_tokens, context_tokens_max)
    short, long, on_context = (min(tokens, longest // 2) for tokens in PREFILL_TOKENS)
    context = min(longest, (blocks // BATCH) * block_tokens) - 1
    return ProfilePlan(
        prefill=(
            ProfilePoint(1, short, 0),
            ProfilePoint(1, long, 0),
            ProfilePoint(1, on_context, longest - on_context),
        ),
        decode=(ProfilePoint(1, 1, 1), ProfilePoint(BATCH, 1, 1), ProfilePoint(BATCH, 1, context)),
    )


def profile_step(
    point: ProfilePoint, block_ids: Sequence[int], block_tokens: int, vocab_size: int
) -> list[SequenceStep]:
    """The step of a point; each sequence has blocks of its own, as in real work."""
    tokens = point.context_tokens + point.new_tokens
    blocks_each = -(-tokens // block_tokens)
    token_ids = tuple(index % vocab_size for index in range(point.new_tokens))
    return [
        SequenceStep(
            token_ids=token_ids,
            context_tokens=point.context_tokens,
            block_ids=tuple(block_ids[index * blocks_each : (index + 1) * blocks_each]),
            sampling=GREEDY,
            output_tokens=0,
        )
        for index in range(point.sequences)
    ]


def fit(
    plan: ProfilePlan,
    prefill_s: Sequence[float],
    decode_s: Sequence[float],
    *,
    transfer_fixed_s: float,
    transfer_bytes_per_s: float,
) -> CostCoefficients:
    """The coefficients that explain the measured seconds best, none of them negative."""
    prefill_shapes = [
        (1.0, point.new_tokens, point.new_tokens * (point.context_tokens + point.new_tokens / 2))
        for point in plan.prefill
    ]
    step_shapes = [
        (1.0, point.sequences, point.sequences * (point.context_tokens + point.new_tokens))
        for point in plan.decode
    ]
    prefill = _nonnegative_least_squares(prefill_shapes, prefill_s)
    step = _nonnegative_least_squares(step_shapes, decode_s)
    return CostCoefficients(
        prefill_fixed_s=prefill[0],
        prefill_per_token_s=prefill[1],
        prefill_per_token_pair_s=prefill[2],
        step_fixed_s=step[0],
        step_per_request_s=step[1],
        step_per_kv_token_s=step[2],
        transfer_fixed_s=transfer_fixed_s,
        transfer_bytes_per_s=transfer_bytes_per_s,
    )


def _nonnegative_least_squares(shapes: Sequence[Sequence[float]], seconds: Sequence[float]) -> list[float]:
    """Minimises relative errors; a term that would come out negative is left out, the rest fitted again."""
    measured = np.asarray(seconds, dtype=np.float64)
    matrix: npt.NDArray[np.float64] = np.asarray(shapes, dtype=np.float64) / measured[:, None]
    kept = list(range(matrix.shape[1]))
    coefficients = np.zeros(matrix.shape[1])
    while kept:
        solution = np.linalg.lstsq(matrix[:, kept], np.ones(len(measured)), rcond=None)[0]
        if solution.min() >= 0:
            coefficients[kept] = solution
            break
        kept.pop(int(solution.argmin()))
    return [float(value) for value in coefficients]
