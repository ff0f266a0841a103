"""What this instance's work takes, against what it announced: measures, corrects, tells how far it was off.

Owns the corrections of `policy.correct` and their metrics. Does not know where a time comes from: whoever
does the work reports it, once a step, a transfer or a first token.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import StrEnum

from prometheus_client import CollectorRegistry

from cluster.prediction_errors import PredictionErrors
from policy.core import CostCoefficients
from policy.correct import (
    Corrections,
    corrected,
    first_token_observed,
    step_observed,
    transfer_observed,
)
from policy.cost import StepWork, prefill_s, transfer_s, work_s


class Predicted(StrEnum):
    """Kinds of predictions that an instance checks; the gateway checks those of first tokens."""

    STEP = "step"
    """Steps that decode, whatever else they do."""
    PREFILL = "prefill"
    """Steps that only compute chunks of prompts."""
    TRANSFER = "transfer"


class CostMeter:
    """`profile()` is the cost as measured at the start, None before that: then nothing is learnt."""

    def __init__(
        self,
        profile: Callable[[], CostCoefficients | None],
        now_s: Callable[[], float],
        registry: CollectorRegistry,
    ) -> None:
        self._profile = profile
        self._now_s = now_s
        self._errors = PredictionErrors(registry, list(Predicted))
        self._corrections = Corrections()
        self._announced: CostCoefficients | None = None
        self.step_s_total = 0.0
        """Of steps that something was announced of."""
        self.step_predicted_s_total = 0.0
        self._transfers = 0
        self._transfers_begun = 0

    @property
    def announced(self) -> CostCoefficients | None:
        """As announced last: what others decide by."""
        return self._announced

    def announce(self) -> CostCoefficients | None:
        """The corrected cost. What comes next is compared with it."""
        profile = self._profile()
        if profile is not None:
            self._announced = corrected(profile, self._corrections, self._now_s())
        return self._announced

    def work_s(self, work: StepWork) -> float:
        """What a step of that work is announced to take; 0 where nothing is."""
        return 0.0 if self._announced is None else work_s(self._announced, work)

    def step_done(self, work: StepWork, elapsed_s: float) -> None:
        profile, announced = self._profile(), self._announced
        if profile is None or announced is None:
            return
        kind = Predicted.STEP if work.decodes else Predicted.PREFILL
        predicted_s = work_s(announced, work)
        self.step_s_total += elapsed_s
        self.step_predicted_s_total += predicted_s
        self._errors.observe(kind, predicted_s, elapsed_s)
        self._corrections = step_observed(self._corrections, profile, work, elapsed_s, self._now_s())

    @contextmanager
    def transfer(self, transfer_bytes: int) -> Iterator[None]:
        """Measures one write to, or one read from, another instance. One that fails, or that others went on
        beside, says nothing of what a transfer takes."""
        started_s, alone = self._now_s(), not self._transfers
        self._transfers += 1
        self._transfers_begun += 1
        begun = self._transfers_begun
        try:
            yield
        finally:
            self._transfers -= 1
        if alone and begun == self._transfers_begun:
            self._transferred(transfer_bytes, self._now_s() - started_s)

    def first_token(self, new_tokens: int, prefix_tokens: int, elapsed_s: float) -> None:
        """Of a request that waited for no other and fetched nothing: `elapsed_s` since its placement was
        asked for."""
        announced = self._announced
        if announced is not None:
            beside_s = elapsed_s - prefill_s(announced, new_tokens, prefix_tokens)
            self._corrections = first_token_observed(self._corrections, beside_s, self._now_s())

    def _transferred(self, transfer_bytes: int, elapsed_s: float) -> None:
        profile, announced = self._profile(), self._announced
        if profile is None or announced is None:
            return
        self._errors.observe(Predicted.TRANSFER, transfer_s(announced, transfer_bytes), elapsed_s)
        self._corrections = transfer_observed(
            self._corrections, profile, transfer_bytes, elapsed_s, self._now_s()
        )
