"""Moonpool's engine, driven as `moonpool bench engine` drives it; in Moonpool's own environment."""

import os
from collections.abc import Sequence
from pathlib import Path

import torch

from moonpool.benchmarks.engine_under_test import EngineUnderTest
from worker import TokenIds, main

SEQUENCES_MAX = 32
TOKENS_MAX = 2304
BACKEND = os.environ.get("MOONPOOL_PEER_BACKEND")
"""Unset: the one that a worker would take."""


class MoonpoolSystem:
    def __init__(self, folder: str, threads: int) -> None:
        self._threads = threads
        self._engine = EngineUnderTest(
            Path(folder),
            threads=threads,
            backend=BACKEND,
            sequences_max=SEQUENCES_MAX,
            tokens_max=TOKENS_MAX,
        )
        self._outputs: list[list[int]] = []

    def about(self) -> dict[str, str]:
        return {
            "backend": self._engine.backend,
            "torch": torch.__version__,
            "threads": str(self._threads),
        }

    def prefill(self, prompt: TokenIds) -> int:
        return self._engine.prefill(prompt)

    def start_decode(self, prompts: Sequence[TokenIds], output_tokens_max: int) -> None:
        self._outputs = [self._engine.start(prompts)]

    def decode(self, steps: int) -> None:
        for _ in range(steps):
            self._outputs.append(self._engine.decode_step())

    def end_decode(self) -> list[list[int]]:
        return [list(tokens) for tokens in zip(*self._outputs, strict=True)]


main(MoonpoolSystem)
