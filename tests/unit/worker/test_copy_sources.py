"""A block that a step copies from stays what it is until the step has copied it."""

import numpy as np
import pytest
from tests.support.step_bench import running

pytestmark = pytest.mark.unit


@pytest.mark.parametrize("prompt_tokens", [16, 20, 32])
async def test_who_takes_every_free_block_during_a_step_spoils_no_answer(prompt_tokens: int) -> None:
    """As a reservation does, whose blocks are written to from outside while the step is under way. The first
    sample ends with its first token: nobody but the copy still needs the last block of the prompt."""
    async with running(blocks=16) as bench:
        run = bench.engine.run

        async def spoil_then_run(sequences, on_layer):
            taken = bench.pool.allocate(bench.pool.available())
            bench.engine._blocks[np.asarray(taken, int)] = 999
            bench.pool.release(taken)
            return await run(sequences, on_layer)

        bench.engine.run = spoil_then_run
        first = bench.add("r", list(range(prompt_tokens)), 1, samples=2)
        await first.expect_answer()
