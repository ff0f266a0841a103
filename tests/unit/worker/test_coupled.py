"""One worker that prefills and decodes: the planner's promises hold in the steps that its engine gets."""

from dataclasses import dataclass, field
from pathlib import Path

import pytest
from tests.support.reference import Reference
from tests.support.workers import TOKENS, Workers, greedy, prompt, workers

from cluster.messages import Finish
from engine.step import SequenceStep
from policy.core import RequestId, Role, SamplingParams

pytestmark = pytest.mark.unit

COUPLED = {"w": (Role.PREFILL, Role.DECODE)}
STEP_TOKENS_MAX = 32


@dataclass
class Steps:
    """What the engine of a worker was asked to compute, step by step."""

    computed: list[list[SequenceStep]] = field(default_factory=list)
    decoding: list[int] = field(default_factory=list)
    """How many sequences were decoding when each step began."""

    @classmethod
    def of(cls, cluster: Workers) -> "Steps":
        steps, node = cls(), cluster.apps["w"]._node
        run = node.engine.run

        async def recorded(sequences, on_layer):
            steps.computed.append(list(sequences))
            steps.decoding.append(sum(sequence.decodes for sequence in node.steps._sequences))
            return await run(sequences, on_layer)

        node.engine.run = recorded
        return steps


def is_prefill(step: SequenceStep) -> bool:
    return step.output_tokens == 0


async def test_a_long_prompt_among_running_answers_pauses_none_of_them(
    tiny: Path, reference: Reference
) -> None:
    """Each step has every running answer in it, and at most the budget of tokens."""
    async with workers(tiny, COUPLED, step_tokens_max=STEP_TOKENS_MAX) as one:
        steps = Steps.of(one)
        short = {f"s{n}": prompt(20 + n, seed=n) for n in range(3)}
        for name, ids in short.items():
            await one.submit(name, ids, 200, at=("w", "w"))
        await one.ear.wait(lambda: all(one.ear.answer(name) for name in short))
        begun = len(steps.computed)
        await one.submit("long", prompt(1200, seed=9), TOKENS, at=("w", "w"))
        await one.ear.wait_finish("long")
        assert one.ear.answer("long") == greedy(reference, prompt(1200, seed=9))
        for name in short:
            await one.ear.wait_finish(name)

    mixed = [
        (step, decoding)
        for step, decoding in zip(steps.computed[begun:], steps.decoding[begun:], strict=True)
        if any(is_prefill(part) for part in step)
    ]
    assert sum(decoding for _, decoding in mixed) > 0, "nothing was mixed"
    for step, decoding in mixed:
        assert sum(not is_prefill(part) for part in step) == decoding
        assert sum(len(part.token_ids) for part in step) <= STEP_TOKENS_MAX
    chunks = [part for step, _ in mixed for part in step if is_prefill(part)]
    assert sum(len(part.token_ids) for part in chunks) == 1200
    assert [part.context_tokens for part in chunks] == sorted(part.context_tokens for part in chunks)


async def test_mixed_load_is_answered_as_each_would_be_alone(tiny: Path, reference: Reference) -> None:
    """Long and short prompts, warm and cold, more than a batch takes."""
    settings = {"step_tokens_max": STEP_TOKENS_MAX, "batch_requests_max": 4, "prefill_requests_max": 3}
    async with workers(tiny, COUPLED, **settings) as one:
        steps = Steps.of(one)
        prompts = {f"r{n}": prompt([5, 300, 40, 16][n % 4], seed=n % 3) for n in range(12)}
        for name, ids in prompts.items():
            await one.submit(name, ids, TOKENS, at=("w", "w"))
        for name, ids in prompts.items():
            await one.ear.wait_finish(name)
            assert one.ear.answer(name) == greedy(reference, ids)
            await one.ear.ask("w", Finish(RequestId(name), 0, TOKENS))
        await one.quiet()
    assert all(len(step) <= 4 for step in steps.computed)
    assert any(len({is_prefill(part) for part in step}) == 2 for step in steps.computed)


async def test_samples_beside_prompts_share_steps_and_blocks(tiny: Path, reference: Reference) -> None:
    async with workers(tiny, COUPLED, step_tokens_max=STEP_TOKENS_MAX) as one:
        sampling = SamplingParams(TOKENS, samples=3)
        await one.submit("many", prompt(40), TOKENS, at=("w", "w"), sampling=sampling)
        await one.submit("long", prompt(300, seed=1), TOKENS, at=("w", "w"))
        assert await one.ear.wait_answers("many", 3) == [greedy(reference, prompt(40))] * 3
        await one.ear.wait_finish("long")
        assert one.ear.answer("long") == greedy(reference, prompt(300, seed=1))
