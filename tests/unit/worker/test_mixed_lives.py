"""Many requests at once on few blocks, cancelled, given up and placed again at any moment."""

import asyncio
import random
from pathlib import Path

import pytest
from tests.support.workers import Workers, workers

from cluster.messages import Cancel, Finish, Refused
from engine.layout import KVLayout
from engine.model_folder import ModelConfig
from engine.tiny import make_tiny_model
from policy.core import FinishReason, RequestId, Role, SamplingParams, StructureKind, StructureSpec

pytestmark = pytest.mark.unit

ROLES = {"p": (Role.PREFILL,), "d": (Role.DECODE,), "w": (Role.PREFILL, Role.DECODE)}
PLACEMENTS = [("p", "d"), ("w", "w"), ("p", "w"), ("w", "d")]
REQUESTS = 40
ATTEMPTS = 4
BLOCKS = 20
STRUCTURES = [
    StructureSpec(StructureKind.CHOICE, '["yes", "no", "it depends on so much that nobody can say"]'),
    StructureSpec(StructureKind.JSON_SCHEMA, '{"type": "array", "items": {"enum": ["alpha", "beta", 3]}}'),
    StructureSpec(StructureKind.REGEX, "([a-f]{12}-[0-9]{4} ){1,3}"),
]


async def live(cluster: Workers, number: int, rng: random.Random) -> None:
    """One request: each attempt is placed anywhere; it ends, fails, is cancelled or simply given up."""
    request_id = RequestId(f"r{number}")
    prompt = [(7 * i + i * i + number % 3) % 500 + 5 for i in range(rng.randint(1, 100))]
    tokens = rng.randint(1, 60)
    samples = rng.choice([1, 1, 1, 3])
    sampling = SamplingParams(
        tokens,
        samples=samples,
        temperature=rng.choice([0.0, 1.0]),
        seed=number,
        structure=rng.choice([None, None, *STRUCTURES]),
    )
    for attempt in range(ATTEMPTS):
        prefill, decode = rng.choice(PLACEMENTS)
        answer = await cluster.submit(
            request_id, prompt, tokens, at=(prefill, decode), attempt=attempt, sampling=sampling
        )
        if isinstance(answer, Refused):
            continue
        keys = [(request_id, attempt, sample) for sample in range(samples)]
        if rng.random() < 0.5:
            await asyncio.sleep(rng.random() * 0.1)
            if rng.random() < 0.5:
                for instance in {prefill, decode}:
                    await cluster.ear.ask(instance, Cancel(request_id, attempt))
            continue
        await cluster.ear.wait(
            lambda keys=keys: (
                all(key in cluster.ear.finished for key in keys)
                or any((entry.request_id, entry.attempt) == keys[0][:2] for entry in cluster.ear.failed)
            )
        )
        if all(key in cluster.ear.finished for key in keys):
            for key in keys:
                assert cluster.ear.finished[key].output_tokens == len(cluster.ear.answer(*key))
                if sampling.structure is not None:
                    matcher = (
                        cluster.apps[decode]._node.structures.compile(sampling.structure).result().matcher()
                    )
                    matcher.replay(cluster.ear.answer(*key))
                    assert matcher.ended == (cluster.ear.finished[key].reason is FinishReason.STOP)
            await cluster.ear.ask(decode, Finish(request_id, attempt, tokens))
            return


@pytest.mark.parametrize(("seed", "swap_blocks"), [(1, 0), (2, 8), (3, 40)])
async def test_whatever_happens_nothing_hangs_and_nothing_is_held_at_the_end(
    tmp_path: Path, seed: int, swap_blocks: int
) -> None:
    folder = tmp_path / "tiny"
    make_tiny_model(folder, seed=3)
    block_bytes = KVLayout.of(ModelConfig.load(folder)).block_bytes
    settings = {"pool_bytes": BLOCKS * block_bytes, "swap_bytes": swap_blocks * block_bytes}
    async with workers(folder, ROLES, step_tokens_max=32, **settings) as cluster:
        rng = random.Random(seed)
        await asyncio.gather(*(live(cluster, n, random.Random(rng.random())) for n in range(REQUESTS)))
        for n in range(REQUESTS):
            for instance in ROLES:
                await cluster.ear.ask(instance, Cancel(RequestId(f"r{n}"), ATTEMPTS))
        await cluster.quiet()
        for app in cluster.apps.values():
            assert not app._context.failure.done()
            assert len(app._node.endpoint._grants) == 0
            assert not app._node.steps.preempted
