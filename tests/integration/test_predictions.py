"""Predicted times against what came, on a stack whose engines take the time that their profile says.

What is left to be off is the cluster's: queues, messages, steps that requests share, bookings.
"""

import asyncio
from pathlib import Path

import pytest
from tests.support.loose_stack import LooseStack
from tests.support.timed_engine import FIRST_TOKEN_ID, LAST_TOKEN_ID
from tests.support.timed_stack import timed_stack

from moonpool.api import Api
from moonpool.benchmarks.predict import SCALE, mixed_load
from moonpool.benchmarks.prediction_metrics import PredictionTotals, totals
from moonpool.replay.prompts import TokenRange
from moonpool.replay.records import Outcome, Results
from moonpool.replay.sender import SenderConfig, send_all
from moonpool.replay.target import find_target

pytestmark = [pytest.mark.integration, pytest.mark.timeout(180)]

NAMES = ("kvmeta-0", "conductor-0", "prefill-0", "decode-0", "gateway-0")
RATE = 4.0
"""Half of what the prefill instance could do: there are queues, and they end."""
LEARNS_S, LASTS_S = 6.0, 18.0
ERROR_MAX = 0.2
"""Of the median."""


async def under_load(stack: LooseStack) -> tuple[PredictionTotals, Results]:
    target = await asyncio.to_thread(find_target, Api(f"{stack.url('gateway-0')}/v1"), None, None)
    tokens = TokenRange(FIRST_TOKEN_ID, LAST_TOKEN_ID)
    config = SenderConfig(target, SCALE, 1, tokens, in_flight_max=500, silence_s_max=60.0)
    urls, results = [stack.url(name) for name in NAMES], Results()
    sending = asyncio.create_task(send_all(mixed_load(RATE, LASTS_S, seed=3), config, results))
    await asyncio.sleep(LEARNS_S)
    before = await totals(urls, timeout_s=10.0)
    await sending
    return (await totals(urls, timeout_s=10.0)).since(before), results


def test_half_of_all_predictions_are_off_by_less_than_a_fifth(tmp_path: Path) -> None:
    with timed_stack(tmp_path) as stack:
        stack.start(*NAMES)
        found, results = asyncio.run(under_load(stack))
        served = sum(record.outcome is Outcome.SERVED for record in results.records)
        assert served == len(results.records) > 30, results.examples
        for kind in ("ttft", "step", "prefill"):
            error, ratio = found.error(kind, 0.5), found.predicted_s[kind] / found.actual_s[kind]
            print(f"{kind}: {found.count(kind)}, median {error:.1%} off, {ratio:.2f} of all time")
            assert found.count(kind) > 20
        assert found.error("ttft", 0.5) < ERROR_MAX
        assert found.error("step", 0.5) < ERROR_MAX
