"""A timed stack of known capacity under any share of it: what it serves within targets."""

import asyncio
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from tests.support.loose_stack import LooseStack
from tests.support.timed_stack import poisson, send

from moonpool.benchmarks.transfer_plan import percentile
from moonpool.replay.records import Outcome, Record

PROMPT_TOKENS, OUTPUT_TOKENS = 256, 24
PREFILL_FIXED_S, PREFILL_TOKEN_S = 0.005, 0.0006
PREFILLS, DECODES = 2, 2
CAPACITY_PER_S = PREFILLS / (PREFILL_FIXED_S + PROMPT_TOKENS * PREFILL_TOKEN_S)
"""Of the prefills; the decodes could take about twice as much within their target."""
TTFT_S, TBT_S = 3.0, 0.2
PREFILL_FLAGS = (
    *("--prefill-fixed-s", str(PREFILL_FIXED_S), "--prefill-token-s", str(PREFILL_TOKEN_S)),
    *("--step-tokens-max", str(PROMPT_TOKENS)),
)
DECODE_FLAGS = ("--step-fixed-s", "0.03", "--step-request-s", "0.002")
CONDUCTOR_FLAGS = (
    *("--ttft-ms-default", str(TTFT_S * 1e3), "--tbt-ms-default", str(TBT_S * 1e3)),
    "--adaptive",
)
NAMES = (
    *("gateway-0", "conductor-0", "kvmeta-0"),
    *(f"prefill-{number}" for number in range(PREFILLS)),
    *(f"decode-{number}" for number in range(DECODES)),
)
SETTLE_SHARE = 0.2
"""Of a phase: until its load has taken effect nothing is counted."""


@dataclass(frozen=True, slots=True)
class Phase:
    """Load for a while, as a share of the capacity."""

    load: float
    lasts_s: float


@dataclass(frozen=True, slots=True)
class Outcomes:
    """What ended while a phase was in force; rates are per second."""

    load: float
    goodput_per_s: float
    served_per_s: float
    in_targets: float
    """Share of the served."""
    rejected: float
    """Share of all."""
    ttft_p50_s: float
    ttft_p95_s: float
    tbt_p95_s: float
    failures: Counter[str]
    """By what was said; no rejections."""
    rejections: Counter[str]

    def __str__(self) -> str:
        return (
            f"load {self.load:4.2f}: goodput {self.goodput_per_s:5.2f}/s, "
            f"served {self.served_per_s:5.2f}/s of which {self.in_targets:6.1%} in targets, "
            f"TTFT p50 {self.ttft_p50_s:.3f} s p95 {self.ttft_p95_s:.3f} s, TBT p95 {self.tbt_p95_s:.3f} s, "
            f"rejected {self.rejected:5.1%} {dict(self.rejections)}, failures {dict(self.failures)}"
        )


def start(stack: LooseStack) -> None:
    for name in NAMES:
        stack.launch(name, *_flags(name))
    for name in NAMES:
        stack.wait_ready(name)


def drive(stack: LooseStack, phases: Sequence[Phase], seed: int) -> list[Outcomes]:
    """All phases, one after the other; each begins when all of the one before has ended. Prints each."""
    rng = random.Random(seed)
    outcomes = []
    for phase in phases:
        outcomes.append(_outcomes(phase, _records(stack, phase, rng)))
        print(outcomes[-1], flush=True)
    return outcomes


def _records(stack: LooseStack, phase: Phase, rng: random.Random) -> list[Record]:
    rate_per_s = phase.load * CAPACITY_PER_S
    requests = poisson(rate_per_s, phase.lasts_s, rng, PROMPT_TOKENS, OUTPUT_TOKENS)
    return asyncio.run(send(stack.url("gateway-0"), requests))


def _outcomes(phase: Phase, records: Sequence[Record]) -> Outcomes:
    """Of what ended after the beginning of the phase and before no more came."""
    from_s = SETTLE_SHARE * phase.lasts_s
    ended = [record for record in records if from_s <= record.ended_s < phase.lasts_s]
    span_s = phase.lasts_s - from_s
    served = [record for record in ended if record.outcome is Outcome.SERVED]
    good = [record for record in served if _in_targets(record)]
    rejected = [record for record in ended if record.outcome is Outcome.REJECTED]
    failed = [record for record in ended if record.outcome is Outcome.FAILED]
    assert served, f"nothing was served: {_reasons(rejected)}, {_reasons(failed)}"
    ttfts_s = sorted(record.ttft_s for record in served if record.ttft_s is not None)
    tbts_s = sorted(record.tbt_s for record in served if record.tbt_s is not None)
    return Outcomes(
        load=phase.load,
        goodput_per_s=len(good) / span_s,
        served_per_s=len(served) / span_s,
        in_targets=len(good) / max(1, len(served)),
        rejected=len(rejected) / max(1, len(ended)),
        ttft_p50_s=percentile(ttfts_s, 0.5),
        ttft_p95_s=percentile(ttfts_s, 0.95),
        tbt_p95_s=percentile(tbts_s, 0.95),
        failures=_reasons(failed),
        rejections=_reasons(rejected),
    )


def _in_targets(record: Record) -> bool:
    return (record.ttft_s or 0.0) <= TTFT_S and (record.tbt_s or 0.0) <= TBT_S


def _reasons(records: Sequence[Record]) -> Counter[str]:
    return Counter(record.failure.reason for record in records if record.failure is not None)


def _flags(name: str) -> tuple[str, ...]:
    role = name.rpartition("-")[0]
    return {"prefill": PREFILL_FLAGS, "decode": DECODE_FLAGS, "conductor": CONDUCTOR_FLAGS}.get(role, ())
