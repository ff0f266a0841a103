"""The whole engine on the GPU: chunks, recorded decode steps, and the arena as others see it."""

import pytest
import torch
from tests.support.tiny_oracles import Oracle

from engine.engine import Engine, SequenceStep
from engine.layout import KVLayout
from engine.loader import load_model
from policy.core import SamplingParams

pytestmark = pytest.mark.gpu

BLOCKS = 16
GREEDY = SamplingParams(output_tokens_max=1000)


def test_greedy_tokens_and_the_arena(oracle: Oracle) -> None:
    from engine.triton_ops import TritonOps

    model = load_model(oracle.folder, TritonOps())
    layout = KVLayout.of(model.config)
    arena = torch.full((BLOCKS * layout.block_bytes // 4,), float("nan"))
    engine = Engine(model, layout, memoryview(arena.numpy()).cast("B"), BLOCKS)
    prompt, block_ids = tuple(oracle.prompt), tuple(range(3, 3 + 8))
    layers: list[int] = []
    first = engine.run([SequenceStep(prompt[:20], 0, block_ids, None, 0, clear_block_ids=block_ids)])
    assert first.token_ids == (None,)
    step = SequenceStep(prompt[20:], 20, block_ids, GREEDY, 0)
    tokens = [engine.run([step], layers.append).token_ids[0]]
    assert layers == list(range(model.config.layers))
    while len(tokens) < len(oracle.answer):
        context = len(prompt) + len(tokens) - 1
        result = engine.run([SequenceStep((tokens[-1],), context, block_ids, GREEDY, len(tokens))])
        tokens.append(result.token_ids[0])
    assert tokens == list(oracle.answer)
    full = (len(prompt) + len(tokens) - 1) // layout.block_tokens
    written = arena.view(BLOCKS, -1)[list(block_ids[:full])]
    assert bool(written.isfinite().all())

    other = Engine(model, layout, memoryview(arena.numpy()).cast("B"), BLOCKS)
    other.load_blocks(block_ids[:3])
    again = SequenceStep(prompt[-1:], len(prompt) - 1, block_ids, GREEDY, 0)
    assert other.run([again]).token_ids[0] == tokens[0]
