"""Paged attention on the CPU without gathering the context: which way to keep (float32, one layer).

    gather   engine.torch_ops: each sequence's context is copied together, then torch's attention
    flex     torch's flex_attention with a paged block mask, compiled by inductor
    numba    a kernel on the blocks in place, compiled by numba
    native   engine.native: C++ on the blocks in place

Candidates take turns within each round. numba is no dependency of this project: give it an environment of
its own and let that one see the project's packages, then run

    export PYTHONPATH=<site-packages of the project's environment>:libs
    <numba's python> benchmarks/cpu_attention_candidates.py

A candidate that cannot be had is reported on standard error and left out. One JSON object a line. On a
machine that others use, `--clock cpu --threads 1` counts processor time instead of time that passed.
"""

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import torch
from torch import Tensor

from engine.native.native_ops import NativeOps
from engine.ops import StepTensors
from engine.torch_ops import TorchOps

HEADS, KV_HEADS, HEAD_DIM, BLOCK_TOKENS = 9, 3, 64, 16
SCALE = HEAD_DIM**-0.5
LAYERS = 8
"""Layers of the cache; each call takes the next, so that no cache of the processor holds the context."""
CONTEXT_TOKENS = 512
SEED = 3
TOLERANCE = 1e-4

Attend = Callable[[int], Tensor]
"""The attention of one layer, [N, heads, head_dim]."""


@dataclass(frozen=True, slots=True)
class Case:
    name: str
    sequences: int
    new_tokens: int
    """Of each sequence; together with what came before it has CONTEXT_TOKENS."""

    @property
    def rows(self) -> int:
        return self.sequences * self.new_tokens


CASES = (
    Case("decode_1", 1, 1),
    Case("decode_8", 8, 1),
    Case("decode_32", 32, 1),
    Case("prefill_512", 1, CONTEXT_TOKENS),
)


@dataclass(frozen=True, slots=True)
class Inputs:
    """A cache [block, layer, 2, kv_head, token, head_dim] with the sequences' blocks strewn over it."""

    case: Case
    query: Tensor
    cache: Tensor
    step: StepTensors

    @classmethod
    def make(cls, case: Case) -> "Inputs":
        torch.manual_seed(SEED)
        per_sequence = CONTEXT_TOKENS // BLOCK_TOKENS
        blocks = case.sequences * per_sequence
        table = torch.randperm(blocks, dtype=torch.int32).view(case.sequences, per_sequence)
        first = CONTEXT_TOKENS - case.new_tokens
        unused = torch.zeros(case.rows, dtype=torch.int64)
        step = StepTensors(
            token_ids=unused,
            positions=torch.arange(first, CONTEXT_TOKENS).repeat(case.sequences),
            slots=unused,
            query_starts=torch.arange(0, case.rows + 1, case.new_tokens, dtype=torch.int32),
            kv_tokens=torch.full((case.sequences,), CONTEXT_TOKENS, dtype=torch.int32),
            block_table=table,
            decodes=case.sequences if case.new_tokens == 1 else 0,
            query_tokens_max=case.new_tokens,
            kv_tokens_max=CONTEXT_TOKENS,
        )
        cache = torch.randn(blocks, LAYERS, 2, KV_HEADS, BLOCK_TOKENS, HEAD_DIM)
        return cls(case, torch.randn(case.rows, HEADS, HEAD_DIM), cache, step)

    def layer(self, layer: int) -> tuple[Tensor, Tensor]:
        return self.cache[:, layer, 0], self.cache[:, layer, 1]


def gather(inputs: Inputs) -> Attend:
    ops = TorchOps()
    return lambda layer: ops.attend(inputs.query, *inputs.layer(layer), inputs.step, SCALE, None)


def native(inputs: Inputs) -> Attend:
    ops = NativeOps.build(Path(tempfile.gettempdir()) / "cpu_attention_candidates")
    return lambda layer: ops.attend(inputs.query, *inputs.layer(layer), inputs.step, SCALE, None)


def flex(inputs: Inputs) -> Attend:
    """Its cache must be [kv_head, slot, head_dim] with one stride from slot to slot: it gets such a copy."""
    from torch.nn.attention.experimental._paged_attention import PagedAttention
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    case, step = inputs.case, inputs.step
    blocks = inputs.cache.shape[0]
    paged = PagedAttention(blocks, BLOCK_TOKENS, case.sequences, device="cpu")
    paged.page_table[:, : step.block_table.shape[1]] = step.block_table
    for sequence, row in enumerate(step.block_table.long()):
        paged.physical_to_logical[sequence, row] = torch.arange(len(row))
    first = CONTEXT_TOKENS - case.new_tokens

    def causal(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return query + first >= key

    logical = create_block_mask(
        causal,
        case.sequences,
        None,
        case.new_tokens,
        CONTEXT_TOKENS,
        device="cpu",
        BLOCK_SIZE=(BLOCK_TOKENS, BLOCK_TOKENS),
    )
    mask = paged.convert_logical_block_mask(logical)
    copies = [
        tuple(part.transpose(0, 1).reshape(1, KV_HEADS, -1, HEAD_DIM) for part in inputs.layer(layer))
        for layer in range(LAYERS)
    ]
    query = inputs.query.view(case.sequences, case.new_tokens, HEADS, HEAD_DIM).transpose(1, 2)
    compiled = torch.compile(flex_attention)

    def attend(layer: int) -> Tensor:
        keys, values = (part.expand(case.sequences, -1, -1, -1) for part in copies[layer])
        attended = compiled(query, keys, values, block_mask=mask, scale=SCALE, enable_gqa=True)
        return attended.transpose(1, 2).reshape(case.rows, HEADS, HEAD_DIM)

    return attend


def numba(inputs: Inputs) -> Attend:
    import numpy as np
    from numba import njit, prange, set_num_threads

    set_num_threads(torch.get_num_threads())
    group = HEADS // KV_HEADS

    @njit(parallel=True, fastmath=True)
    def kernel(query, keys, values, table, positions, new_tokens, output):  # type: ignore[no-untyped-def]
        for task in prange(query.shape[0] * KV_HEADS):
            row, kv_head = task // KV_HEADS, task % KV_HEADS
            tokens = positions[row] + 1
            scores = np.empty(BLOCK_TOKENS, dtype=np.float32)
            for head in range(kv_head * group, (kv_head + 1) * group):
                total = np.zeros(HEAD_DIM, dtype=np.float32)
                highest, weight = np.float32(-3e38), np.float32(0)
                for start in range(0, tokens, BLOCK_TOKENS):
                    block = table[row // new_tokens, start // BLOCK_TOKENS]
                    count = min(BLOCK_TOKENS, tokens - start)
                    updated = highest
                    for t in range(count):
                        score = np.float32(0)
                        for d in range(HEAD_DIM):
                            score += query[row, head, d] * keys[block, kv_head, t, d]
                        scores[t] = score * np.float32(SCALE)
                        updated = max(updated, scores[t])
                    factor = np.exp(highest - updated)
                    highest = updated
                    weight *= factor
                    for d in range(HEAD_DIM):
                        total[d] *= factor
                    for t in range(count):
                        scores[t] = np.exp(scores[t] - highest)
                        weight += scores[t]
                        for d in range(HEAD_DIM):
                            total[d] += scores[t] * values[block, kv_head, t, d]
                for d in range(HEAD_DIM):
                    output[row, head, d] = total[d] / weight

    query, step = inputs.query.numpy(), inputs.step
    table, positions = step.block_table.numpy(), step.positions.numpy()
    layers = [[part.numpy() for part in inputs.layer(layer)] for layer in range(LAYERS)]

    def attend(layer: int) -> Tensor:
        output = np.empty_like(query)
        kernel(query, *layers[layer], table, positions, inputs.case.new_tokens, output)
        return torch.from_numpy(output)

    return attend


CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}
CANDIDATES: dict[str, Callable[[Inputs], Attend]] = {
    "gather": gather,
    "flex": flex,
    "numba": numba,
    "native": native,
}


def measure(case: Case, names: list[str], rounds: int, threads: int, clock: str) -> None:
    inputs = Inputs.make(case)
    expected = gather(inputs)(0)
    candidates: dict[str, Attend] = {}
    for name in names:
        started_s = time.perf_counter()
        try:
            attend = CANDIDATES[name](inputs)
            difference = float((attend(0) - expected).abs().max())
        except Exception as error:  # whatever it is, the others are still to be measured
            print(f"{case.name}: {name}: {type(error).__name__}: {str(error)[:300]}", file=sys.stderr)
            continue
        if difference > TOLERANCE:
            print(f"{case.name}: {name} is wrong by {difference:.1e}", file=sys.stderr)
            continue
        print(f"{case.name}: {name} ready in {time.perf_counter() - started_s:.1f} s", file=sys.stderr)
        candidates[name] = attend
    times_s: dict[str, list[float]] = {name: [] for name in candidates}
    for _ in range(rounds):
        for name, attend in candidates.items():
            attend(0)
            started_s = CLOCKS[clock]()
            for layer in range(LAYERS):
                attend(layer)
            times_s[name].append((CLOCKS[clock]() - started_s) / LAYERS)
    for name, measured_s in times_s.items():
        line = {
            "bench": "cpu_attention_candidates",
            "case": f"{case.name}/{name}",
            "metric": "layer_time",
            "value": round(median(measured_s) * 1e6, 1),
            "unit": "us",
            "n": rounds,
            "min": round(min(measured_s) * 1e6, 1),
            "max": round(max(measured_s) * 1e6, 1),
            "context": {"threads": threads, "clock": clock, "torch": torch.__version__},
        }
        print(json.dumps(line), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--candidates", default=",".join(CANDIDATES))
    parser.add_argument("--cases", default=",".join(case.name for case in CASES))
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--clock", choices=CLOCKS, default="wall")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    with torch.inference_mode():
        for case in CASES:
            if case.name in options.cases.split(","):
                names = options.candidates.split(",")
                measure(case, names, options.rounds, options.threads, options.clock)


if __name__ == "__main__":
    main()
