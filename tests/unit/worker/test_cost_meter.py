"""What a worker's work takes, against what it announced before."""

from dataclasses import replace
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry
from tests.support.workers import PAIR, TOKENS, prompt, workers

from policy.core import CostCoefficients, Role
from policy.correct import GAIN, SAMPLES_MIN
from policy.cost import ASSUMED_COST, StepWork, work_s
from worker.app import WorkerApp
from worker.cost_meter import CostMeter, Predicted

pytestmark = pytest.mark.unit

DECODES = StepWork(decodes=4, kv_tokens=400)
CHUNK = StepWork(chunk_tokens=100, chunk_pairs=5000.0)


class Bench:
    def __init__(self, profile: CostCoefficients | None = ASSUMED_COST) -> None:
        self.now_s = 0.0
        self.profile = profile
        self.registry = CollectorRegistry()
        self.meter = CostMeter(lambda: self.profile, lambda: self.now_s, self.registry)

    def told(self, name: str, kind: Predicted) -> float:
        return self.registry.get_sample_value(f"moonpool_{name}", {"kind": kind}) or 0.0

    def announced(self) -> CostCoefficients:
        cost = self.meter.announce()
        assert cost is not None
        return cost

    def transfer(self, transfer_bytes: int, elapsed_s: float) -> None:
        with self.meter.transfer(transfer_bytes):
            self.now_s += elapsed_s


def test_before_the_profile_nothing_is_announced_nor_learnt() -> None:
    bench = Bench(None)
    bench.meter.step_done(DECODES, 1.0)
    bench.transfer(1000, 1.0)
    bench.meter.first_token(100, 0, 1.0)
    assert bench.meter.announce() is None
    bench.profile = ASSUMED_COST
    assert bench.announced() == ASSUMED_COST
    assert bench.told("prediction_error_ratio_count", Predicted.STEP) == 0


def test_a_step_is_compared_with_what_was_announced_before_it() -> None:
    bench = Bench()
    announced = bench.announced()
    for _ in range(50):
        bench.meter.step_done(DECODES, 2 * work_s(ASSUMED_COST, DECODES))
    assert bench.told("prediction_error_ratio_count", Predicted.STEP) == 50
    assert bench.meter.step_s_total == pytest.approx(100 * work_s(ASSUMED_COST, DECODES))
    assert bench.meter.step_predicted_s_total == pytest.approx(50 * work_s(announced, DECODES))
    assert bench.told("predicted_seconds_total", Predicted.STEP) == pytest.approx(
        50 * work_s(announced, DECODES)
    )
    assert bench.told("prediction_error_ratio_sum", Predicted.STEP) == pytest.approx(50 * 0.5)
    assert work_s(bench.announced(), DECODES) == pytest.approx(2 * work_s(ASSUMED_COST, DECODES), rel=0.02)
    bench.meter.step_done(DECODES, 2 * work_s(ASSUMED_COST, DECODES))
    assert bench.told("prediction_error_ratio_sum", Predicted.STEP) == pytest.approx(25, abs=0.02)


def test_a_step_is_prefill_where_nobody_decodes_in_it() -> None:
    bench = Bench()
    bench.announced()
    bench.meter.step_done(CHUNK, 0.1)
    bench.meter.step_done(StepWork(1, 50, 100, 5000.0), 0.1)
    counted = [bench.told("prediction_error_ratio_count", kind) for kind in Predicted]
    assert counted == [1, 1, 0]


def test_transfers_teach_one_at_a_time() -> None:
    bench = Bench()
    bench.announced()
    for _ in range(3 * SAMPLES_MIN):
        with bench.meter.transfer(1000):
            bench.transfer(1000, 1.0)
    assert bench.told("prediction_error_ratio_count", Predicted.TRANSFER) == 0
    with pytest.raises(ConnectionError), bench.meter.transfer(1000):
        raise ConnectionError
    assert bench.told("prediction_error_ratio_count", Predicted.TRANSFER) == 0
    for _ in range(50):
        bench.transfer(1_000_000, 4e-3)
    assert bench.told("prediction_error_ratio_count", Predicted.TRANSFER) == 50
    cost = bench.announced()
    assert cost.transfer_fixed_s + 1e6 / cost.transfer_bytes_per_s == pytest.approx(4e-3, rel=0.02)


def test_what_first_tokens_take_beside_computing_is_announced() -> None:
    bench = Bench()
    bench.announced()
    for _ in range(SAMPLES_MIN + int(3 / GAIN)):
        bench.meter.first_token(100, 32, 0.02 + work_s(ASSUMED_COST, StepWork(0, 0, 100, 100 * 82.0)))
    assert bench.announced().first_token_fixed_s == pytest.approx(0.02, rel=0.05)
    assert replace(bench.announced(), first_token_fixed_s=0.0) == ASSUMED_COST


def counted(app: WorkerApp, kind: Predicted) -> float:
    registry = app._context.metrics.registry
    return registry.get_sample_value("moonpool_prediction_error_ratio_count", {"kind": kind}) or 0.0


async def test_workers_measure_steps_prefills_transfers_and_first_tokens(tiny: Path) -> None:
    """And announce what they learnt."""
    async with workers(tiny, PAIR) as pair:
        prefill, decode = pair.apps["p"], pair.apps["d"]
        for app in (prefill, decode):
            assert app.load().cost == app._node.cost
        for number in range(SAMPLES_MIN + 1):
            await pair.submit(f"r{number}", prompt(40, seed=number), TOKENS)
            await pair.ear.wait_finish(f"r{number}")
        assert [counted(prefill, kind) for kind in Predicted] == [0, SAMPLES_MIN + 1, SAMPLES_MIN + 1]
        steps, prefills, transfers = [counted(decode, kind) for kind in Predicted]
        assert (prefills, transfers) == (0, 0)
        assert steps == (SAMPLES_MIN + 1) * (TOKENS - 1)
        before, now = prefill._node.cost, prefill.load().cost
        assert before is not None
        assert now is not None
        assert now.first_token_fixed_s > 0
        assert now.prefill_per_token_s == before.prefill_per_token_s == 0 or (
            now.prefill_per_token_s != before.prefill_per_token_s
        )
        assert now.transfer_fixed_s != before.transfer_fixed_s
        assert now.step_fixed_s == before.step_fixed_s


async def test_a_coupled_instance_measures_steps_that_do_both(tiny: Path) -> None:
    async with workers(tiny, {"w": (Role.PREFILL, Role.DECODE)}, step_tokens_max=32) as one:
        one.apps["w"].load()
        await one.submit("long", prompt(20), 600, at=("w", "w"))
        await one.ear.wait(lambda: len(one.ear.answer("long")) > 3)
        await one.submit("beside", prompt(90, seed=1), 2, at=("w", "w"))
        await one.ear.wait_finish("long")
        steps, prefills, transfers = [counted(one.apps["w"], kind) for kind in Predicted]
        # The second prompt is computed in steps that decode the first answer too.
        assert (steps, prefills, transfers) == (599, 1, 0)
