"""Online correction of the cost model: what an instance sees of its own steps, transfers and first tokens
moves the coefficients that it announces (DESIGN §8).

A predicted time is a sum of terms (`cost.step_terms`; fixed part and bytes of a transfer), and each term
has a factor. An observation that is off by some ratio moves the terms by their shares in the prediction, so
that what is seen alone is corrected alone: short steps teach the fixed part, long prompts the part per token.
Of a step that decodes and prefills, prefill's and decode's factors each take their share. One factor for each
of the three formulas would not do: what a live instance adds to its profile (waking the engine's thread, a
busy event loop) is fixed, and would be taken for slow tokens.

Everything is in logarithms, where twice as long and half as long are equally far off. One observation counts
as at most RATIO_MAX off, so that a stall of seconds moves no more than any other late step. What is no longer
observed is forgotten by and by: an instance that was slow and is therefore avoided gets its chance again.

Pure. The instance's announced cost is `corrected`; nobody else knows of factors.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import exp, log

from policy.core import CostCoefficients
from policy.cost import StepWork, in_one_step, step_terms

GAIN = 0.1
"""How much of what one observation is off is learnt, once there were 1 / GAIN of them; before, the mean."""
RATIO_MAX = 1.5
"""One observation counts as at most so many times too long or too short."""
FACTOR_MAX = 16.0
"""A profile is at most so many times too low or too high. Steps of a small model take under a millisecond in
the profile, and live, on a busy machine, ten times as long."""
SAMPLES_MIN = 8
"""With fewer observations the profile is announced as it is."""
REMEMBERED_S = 20.0
HALF_LIFE_S = 10.0
"""With nothing observed for REMEMBERED_S, half of what was learnt is forgotten in each further HALF_LIFE_S.
An instance that seems too slow for every request is given none, and so observes nothing: what it learnt of a
burst must not keep a whole idle cluster refusing."""
FIRST_TOKEN_FIXED_S_MAX = 1.0
FIRST_TOKEN_OFF_S_MIN = 0.01
"""One first token counts as at most as late as they are anyway, and as this at least."""

_LOG_RATIO_MAX = log(RATIO_MAX)
_LOG_FACTOR_MAX = log(FACTOR_MAX)


@dataclass(frozen=True, slots=True)
class TermFactors:
    """Logarithms of the factors of one formula's terms, in their order."""

    logs: tuple[float, ...]
    samples: int = 0
    observed_at_s: float = 0.0

    def at(self, now_s: float) -> "TermFactors":
        """With what was forgotten since the last observation."""
        kept = _kept(self.observed_at_s, now_s)
        return TermFactors(tuple(one * kept for one in self.logs), self.samples, now_s)

    def factors(self, now_s: float) -> tuple[float, ...]:
        """What to multiply the terms by; 1 while too little is known."""
        if self.samples < SAMPLES_MIN:
            return (1.0,) * len(self.logs)
        return tuple(map(exp, self.at(now_s).logs))


@dataclass(frozen=True, slots=True)
class Corrections:
    """What was learnt since the profile. Times are of one clock that only rises."""

    prefill: TermFactors = TermFactors((0.0,) * 3)
    step: TermFactors = TermFactors((0.0,) * 3)
    transfer: TermFactors = TermFactors((0.0,) * 2)
    first_token_fixed_s: float = 0.0
    first_tokens: int = 0
    first_token_at_s: float = 0.0


def corrected(cost: CostCoefficients, corrections: Corrections, now_s: float) -> CostCoefficients:
    """The profile `cost` with what was learnt since: what an instance announces."""
    prefill = corrections.prefill.factors(now_s)
    step = corrections.step.factors(now_s)
    transfer = corrections.transfer.factors(now_s)
    knows_first_tokens = corrections.first_tokens >= SAMPLES_MIN
    fixed_s = corrections.first_token_fixed_s * _kept(corrections.first_token_at_s, now_s)
    return replace(
        cost,
        prefill_fixed_s=cost.prefill_fixed_s * prefill[0],
        prefill_per_token_s=cost.prefill_per_token_s * prefill[1],
        prefill_per_token_pair_s=cost.prefill_per_token_pair_s * prefill[2],
        step_fixed_s=cost.step_fixed_s * step[0],
        step_per_request_s=cost.step_per_request_s * step[1],
        step_per_kv_token_s=cost.step_per_kv_token_s * step[2],
        transfer_fixed_s=cost.transfer_fixed_s * transfer[0],
        transfer_bytes_per_s=cost.transfer_bytes_per_s / transfer[1],
        first_token_fixed_s=fixed_s if knows_first_tokens else cost.first_token_fixed_s,
    )


def step_observed(
    corrections: Corrections, cost: CostCoefficients, work: StepWork, elapsed_s: float, now_s: float
) -> Corrections:
    """A step of `work` took `elapsed_s`; `cost` is the profile."""
    prefill, step = corrections.prefill.at(now_s), corrections.step.at(now_s)
    a, b, c, d, e, f = _scaled(step_terms(cost, work), prefill.logs + step.logs)
    moves = _moves(in_one_step((a, b, c, d, e, f)), elapsed_s)
    if moves is None:
        return corrections
    return replace(
        corrections,
        prefill=_moved(prefill, moves[:3]) if work.chunk_tokens else corrections.prefill,
        step=_moved(step, moves[3:]) if work.decodes else corrections.step,
    )


def transfer_observed(
    corrections: Corrections, cost: CostCoefficients, transfer_bytes: int, elapsed_s: float, now_s: float
) -> Corrections:
    """`transfer_bytes` were moved in `elapsed_s`; `cost` is the profile."""
    terms_s = (cost.transfer_fixed_s, transfer_bytes / cost.transfer_bytes_per_s)
    transfer = corrections.transfer.at(now_s)
    moves = _moves(_scaled(terms_s, transfer.logs), elapsed_s)
    if moves is None:
        return corrections
    return replace(corrections, transfer=_moved(transfer, moves))


def first_token_observed(corrections: Corrections, beside_s: float, now_s: float) -> Corrections:
    """A first token took `beside_s` beside queue, fetch and computing."""
    known_s = corrections.first_token_fixed_s * _kept(corrections.first_token_at_s, now_s)
    samples = corrections.first_tokens + 1
    off_s_max = max(known_s, FIRST_TOKEN_OFF_S_MIN)
    off_s = min(max(beside_s - known_s, -off_s_max), off_s_max)
    fixed_s = known_s + _gain(samples) * off_s
    return replace(
        corrections,
        first_token_fixed_s=min(max(fixed_s, 0.0), FIRST_TOKEN_FIXED_S_MAX),
        first_tokens=samples,
        first_token_at_s=now_s,
    )


def _scaled(terms_s: Sequence[float], logs: Sequence[float]) -> list[float]:
    return [term_s * exp(one) for term_s, one in zip(terms_s, logs, strict=True)]


def _moves(terms_s: Sequence[float], elapsed_s: float) -> list[float] | None:
    """By how much each term's logarithm has to change so that together they are right, the larger terms more;
    None where there is nothing to learn from."""
    predicted_s = sum(terms_s)
    if predicted_s <= 0 or elapsed_s <= 0:
        return None
    off = min(max(log(elapsed_s / predicted_s), -_LOG_RATIO_MAX), _LOG_RATIO_MAX)
    squares = sum(term_s * term_s for term_s in terms_s)
    return [off * term_s * predicted_s / squares for term_s in terms_s]


def _moved(factors: TermFactors, moves: Sequence[float]) -> TermFactors:
    samples = factors.samples + 1
    gain = _gain(samples)
    logs = tuple(
        min(max(one + gain * move, -_LOG_FACTOR_MAX), _LOG_FACTOR_MAX)
        for one, move in zip(factors.logs, moves, strict=True)
    )
    return TermFactors(logs, samples, factors.observed_at_s)


def _gain(samples: int) -> float:
    return max(GAIN, 1 / samples)


def _kept(observed_at_s: float, now_s: float) -> float:
    kept: float = 0.5 ** (max(0.0, now_s - observed_at_s - REMEMBERED_S) / HALF_LIFE_S)
    return kept
