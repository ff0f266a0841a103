"""Profiling: the fit finds the coefficients that made the times, and the engine's own are sane."""

import math
from dataclasses import astuple

import numpy as np
import pytest
from tests.support.models import tiny_folder

from engine.cost_profile import PROFILE_BLOCKS_MIN, fit, plan_profile, profile_step
from engine.engine import Engine, KVLayout
from engine.errors import EngineError
from engine.loader import load_model
from policy.core import CostCoefficients

pytestmark = pytest.mark.unit


@pytest.mark.parametrize("blocks", [PROFILE_BLOCKS_MIN, 64, 5000])
def test_the_fit_inverts_the_cost_model(blocks: int) -> None:
    plan = plan_profile(blocks, 16, 8192)
    a, b, c, d, e, f = 0.02, 3e-3, 1e-6, 0.05, 6e-3, 9e-6
    prefill_s = [
        a + b * p.new_tokens + c * p.new_tokens * (p.context_tokens + p.new_tokens / 2) for p in plan.prefill
    ]
    decode_s = [d + e * p.sequences + f * p.sequences * (p.context_tokens + 1) for p in plan.decode]
    found = fit(plan, prefill_s, decode_s, transfer_fixed_s=1e-3, transfer_bytes_per_s=1e9)
    coefficients = CostCoefficients(a, b, c, d, e, f, transfer_fixed_s=1e-3, transfer_bytes_per_s=1e9)
    assert astuple(found) == pytest.approx(astuple(coefficients), rel=1e-6)


def test_noise_never_makes_a_coefficient_negative() -> None:
    plan = plan_profile(64, 16, 8192)
    generator = np.random.default_rng(0)
    for _ in range(200):
        measured = generator.uniform(0.01, 1.0, 6)
        found = astuple(fit(plan, measured[:3], measured[3:], transfer_fixed_s=0.0, transfer_bytes_per_s=1.0))
        assert min(found) >= 0
        assert all(map(math.isfinite, found))
        assert max(found[:3]) > 0
        assert max(found[3:6]) > 0


@pytest.mark.parametrize("blocks", [PROFILE_BLOCKS_MIN, 17, 64, 200])
@pytest.mark.parametrize("context_tokens_max", [128, 512, 8192])
def test_steps_fit_the_blocks_and_share_none(blocks: int, context_tokens_max: int) -> None:
    plan = plan_profile(blocks, 16, context_tokens_max)
    for point in plan.prefill + plan.decode:
        steps = profile_step(point, range(100, 100 + blocks), 16, 512)
        assert len(steps) == point.sequences
        used = [block for step in steps for block in step.block_ids]
        assert len(used) == len(set(used)) <= blocks
        for step in steps:
            end = step.context_tokens + len(step.token_ids)
            assert end <= min(16 * len(step.block_ids), context_tokens_max)


def test_too_few_blocks_are_refused() -> None:
    with pytest.raises(EngineError, match="at least 16 blocks, not 15"):
        plan_profile(15, 16, 2048)


def test_an_engine_profiles_itself_on_scratch_blocks_only() -> None:
    model = load_model(tiny_folder())
    layout = KVLayout.of(model.config)
    arena = np.full((40, layout.block_bytes // 4), np.nan, dtype=np.float32)
    engine = Engine(model, layout, memoryview(arena).cast("B"), 40)
    found = engine.profile(range(4, 36), transfer_fixed_s=2e-3, transfer_bytes_per_s=5e8)
    assert (found.transfer_fixed_s, found.transfer_bytes_per_s) == (2e-3, 5e8)
    assert found.prefill_fixed_s + found.prefill_per_token_s > 0
    assert found.step_fixed_s + found.step_per_request_s > 0
    assert np.isnan(arena[:4]).all()
    assert np.isnan(arena[36:]).all()
    assert np.isfinite(arena[4:36]).all()
