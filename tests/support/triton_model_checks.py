"""Whole models on the Triton kernels against what transformers answers; on the interpreter or on a GPU."""

from pathlib import Path
from typing import Any

import torch
from tests.support.bare_model import BLOCK_TOKENS, BareModel, chunk
from tests.support.repeating_recorder import RepeatingRecorder
from torch import Tensor

from engine.step import StepLimits, flatten

TABLE_A = (11, 3, 17, 0, 8)
TABLE_B = (2, 9, 5)
BLOCKS = 24


def check_model(
    folder: Path,
    prompt: tuple[int, ...],
    logits: Tensor,
    answer: tuple[int, ...],
    device: str,
    tolerance: float,
) -> None:
    """Two cold prompts at once, a decode beside a chunk on a cached prefix, then greedy decodes."""
    from engine.loader import load_model

    model = BareModel([load_model(folder, _ops(device))], BLOCKS)

    def assert_close(found: Tensor, expected: Tensor) -> None:
        torch.testing.assert_close(found.cpu(), expected, atol=tolerance, rtol=0)

    first, second = model.logits([chunk(prompt, 0, 31, TABLE_A), chunk(prompt, 0, 20, TABLE_B)])
    assert_close(first, logits[:31])
    assert_close(second, logits[:20])
    second, first = model.logits([chunk(prompt, 20, 21, TABLE_B), chunk(prompt, 31, len(prompt), TABLE_A)])
    assert_close(second, logits[20:21])
    assert_close(first, logits[31:])
    tokens = (*prompt, int(first[-1].argmax()))
    greedy = 3 if device == "cpu" else len(answer)
    for _ in range(greedy - 1):
        (row,) = model.logits([chunk(tokens, len(tokens) - 1, len(tokens), TABLE_A)])
        tokens = (*tokens, int(row[-1].argmax()))
    assert tokens[len(prompt) :] == answer[:greedy]


def check_graphs(folder: Path, prompt: tuple[int, ...], device: str) -> None:
    """Three decodes padded to four: logits as when launched as usual, no block written but theirs."""
    from engine.decode_graphs import CudaRecorder, DecodeGraphs
    from engine.layout import KVLayout
    from engine.loader import load_model
    from engine.ops import StepTensors
    from engine.paged_cache import PagedCache, to_tensors

    ops = _ops(device)
    model = load_model(folder, ops)
    config = model.config
    layout = KVLayout.of(config, block_tokens=BLOCK_TOKENS)
    memory = torch.full((BLOCKS * layout.block_bytes // 4,), float("nan"), device=device)
    cache = PagedCache(layout, memory)
    limits = StepLimits(BLOCKS, BLOCK_TOKENS, config.context_tokens_max, config.vocab_size)

    def compute(step: StepTensors) -> Tensor:
        return model.logits(model.forward(model.embed(step.token_ids), step, cache))

    recorder = RepeatingRecorder() if device == "cpu" else CudaRecorder(ops.device)
    graphs = DecodeGraphs(
        compute, recorder, ops.device, blocks_max=8, vocab_size=config.vocab_size, batch_sizes=(2, 4)
    )
    tables, contexts = (TABLE_A, TABLE_B, (1, 4, 6)), [15, 16, 31]
    with torch.inference_mode():
        cold = [chunk(prompt, 0, end, table) for end, table in zip(contexts, tables, strict=True)]
        compute(to_tensors(flatten(cold, limits), ops.device))
        for used in (3, 2, 3):
            steps = [
                chunk(prompt, context, context + 1, table)
                for context, table in zip(contexts[:used], tables[:used], strict=True)
            ]
            tensors = to_tensors(flatten(steps, limits), ops.device)
            before = memory.clone()
            expected = compute(tensors)
            after = memory.clone()
            memory.copy_(before)
            found = graphs.run(tensors)
            torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
            torch.testing.assert_close(memory, after, atol=1e-4, rtol=1e-4, equal_nan=True)
            contexts[:used] = [context + 1 for context in contexts[:used]]
    assert graphs.recorded == (2, 4)


def _ops(device: str) -> Any:
    from engine.triton_kernels.common import Chip
    from engine.triton_ops import TritonOps

    return TritonOps(device, chip=Chip(1, 99 * 1024)) if device == "cpu" else TritonOps(device)
