"""Decode steps replayed as CUDA graphs: one launch instead of hundreds, which the CPU cannot issue in time.

A graph has fixed shapes and addresses. So there is one for each of a few batch sizes, recorded when it is
first needed, and a step is copied into fixed tensors and padded up to the next size. A padded row has no
context, and its slot is negative: its key and value are written nowhere, and no other row sees it.

Knows neither model nor cache: both are inside the function that it records. What the GPU does is behind
`Recorder`, so the rest is tested without one.
"""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from engine.errors import EngineError
from engine.ops import StepTensors

BATCH_SIZES = (1, 2, 4, *range(8, 64, 8), *range(64, 128, 16), *range(128, 257, 32))
"""Rows of padding: at most 7 up to 64, 15 up to 128, 31 above. Larger steps are launched as usual."""
NO_SLOT = -1

Compute = Callable[[StepTensors], Tensor]
"""A step of decodes → logits [S, vocabulary]; must not wait for the GPU nor read back from it."""


class Recording(Protocol):
    """What was recorded, ready to be done again."""

    def replay(self) -> None: ...


class Recorder(Protocol):
    """Makes recordings of a computation on tensors that stay where they are."""

    def record(self, compute: Callable[[], None]) -> Recording: ...


class DecodeGraphs:
    """Runs steps of decodes, by replay where the batch is small enough."""

    def __init__(
        self,
        compute: Compute,
        recorder: Recorder,
        device: torch.device,
        *,
        blocks_max: int,
        vocab_size: int,
        batch_sizes: Sequence[int] = BATCH_SIZES,
    ) -> None:
        """`blocks_max`: the most blocks of one sequence."""
        if not batch_sizes or list(batch_sizes) != sorted(set(batch_sizes)) or batch_sizes[0] < 1:
            raise EngineError(f"batch_sizes must be positive and ascending, not {tuple(batch_sizes)}")
        self._compute = compute
        self._recorder = recorder
        self._batch_sizes = tuple(batch_sizes)
        self._fixed = FixedStep(self._batch_sizes[-1], blocks_max, device)
        # One for all graphs: each keeping its own would add up to a gigabyte.
        self._logits = torch.empty((self._batch_sizes[-1], vocab_size), dtype=torch.float32, device=device)
        self._recordings: dict[int, Recording] = {}

    @property
    def recorded(self) -> tuple[int, ...]:
        """The batch sizes that have a graph so far."""
        return tuple(sorted(self._recordings))

    def run(self, step: StepTensors) -> Tensor:
        """Logits [S, vocabulary] of a step of decodes alone; they hold until the next call."""
        sequences = step.kv_tokens.shape[0]
        if step.decodes != sequences:
            raise EngineError(f"{sequences - step.decodes} of {sequences} sequences are not decodes")
        size = batch_size(sequences, self._batch_sizes)
        if size is None:
            return self._compute(step)
        fixed = self._fixed.hold(step, size)
        recording = self._recordings.get(size)
        if recording is None:
            recording = self._recorder.record(lambda: self._into_logits(fixed))
            self._recordings[size] = recording
        recording.replay()
        return self._logits[:sequences]

    def _into_logits(self, fixed: StepTensors) -> None:
        self._logits[: fixed.decodes].copy_(self._compute(fixed))


def batch_size(sequences: int, batch_sizes: Sequence[int]) -> int | None:
    """The least of the ascending `batch_sizes` that holds `sequences`; None if none does."""
    index = bisect_left(batch_sizes, sequences)
    return batch_sizes[index] if index < len(batch_sizes) else None


class FixedStep:
    """The tensors of a step of decodes at addresses that never change, shared by all batch sizes."""

    def __init__(self, sequences_max: int, blocks_max: int, device: torch.device) -> None:
        self._blocks_max = blocks_max
        self._token_ids = torch.zeros(sequences_max, dtype=torch.int64, device=device)
        self._positions = torch.zeros(sequences_max, dtype=torch.int64, device=device)
        self._slots = torch.full((sequences_max,), NO_SLOT, dtype=torch.int64, device=device)
        self._query_starts = torch.arange(sequences_max + 1, dtype=torch.int32, device=device)
        self._kv_tokens = torch.zeros(sequences_max, dtype=torch.int32, device=device)
        self._block_table = torch.zeros((sequences_max, blocks_max), dtype=torch.int32, device=device)

    def hold(self, step: StepTensors, size: int) -> StepTensors:
        """Copies `step` into the first rows of `size` and makes padding of the others."""
        sequences, blocks = step.block_table.shape
        if blocks > self._blocks_max:
            raise EngineError(f"a sequence has {blocks} blocks, over the limit of {self._blocks_max}")
        assert step.token_ids.shape[0] == sequences <= size
        self._token_ids[:sequences].copy_(step.token_ids)
        self._positions[:sequences].copy_(step.positions)
        self._slots[:sequences].copy_(step.slots)
        self._kv_tokens[:sequences].copy_(step.kv_tokens)
        self._block_table[:sequences, :blocks].copy_(step.block_table)
        if sequences < size:
            # Token ids and positions may be stale: any valid ones will do.
            self._slots[sequences:size].fill_(NO_SLOT)
            self._kv_tokens[sequences:size].zero_()
        return StepTensors(
            token_ids=self._token_ids[:size],
            positions=self._positions[:size],
            slots=self._slots[:size],
            query_starts=self._query_starts[: size + 1],
            kv_tokens=self._kv_tokens[:size],
            block_table=self._block_table[:size],
            decodes=size,
            query_tokens_max=1,
            kv_tokens_max=step.kv_tokens_max,  # of this step; a recording must not depend on it
        )


class CudaRecorder:
    """Records on a stream of its own. All graphs share one pool of memory: only one runs at a time."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: torch.cuda.Stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._pool = torch.cuda.graph_pool_handle()

    def record(self, compute: Callable[[], None]) -> torch.cuda.CUDAGraph:
        """Computes once first: kernels are compiled and libraries get their memory outside the graph."""
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            compute()
        current.wait_stream(self._stream)
        torch.cuda.synchronize(self._device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream):
            compute()
        return graph
