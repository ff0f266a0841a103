"""The sequences that an instance decodes, and how long any number of steps takes while they stay the same.

A batch that does not change is advanced by many steps at once: with b sequences of K tokens in all, step i
takes d + e b + f (K + i b), which sums to a square of the number of steps.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from math import ceil, sqrt

import numpy as np
from numpy.typing import NDArray

from policy.core import CostCoefficients
from policy.cost import step_s
from simulator.device_memory import DeviceMemory
from simulator.request import SimulatedRequest


@dataclass(slots=True, eq=False)
class Decoding:
    """A sequence with its prompt behind it."""

    request: SimulatedRequest
    memory: DeviceMemory
    kv_tokens: int
    """Of whose tokens KV lies here: all but the last one."""
    left: int
    """Steps until its answer is whole, at least 1 while it decodes."""
    blocks: int
    """That it holds."""
    token_at_s: float
    """When it put out its last token before it came in."""
    first_step: int = 0
    joined_s: float = 0.0

    def lacking_blocks(self, steps: int) -> int:
        """Blocks to take before so many steps."""
        return max(0, self.memory.blocks_of(self.kv_tokens + steps) - self.blocks)

    def spare_blocks(self) -> int:
        """Blocks taken for steps that were not done."""
        memory = self.memory
        needed = max(memory.reserved_blocks(self.request.input_tokens), memory.blocks_of(self.kv_tokens))
        return max(0, self.blocks - needed)


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Of steps that follow each other with the same sequences: a first one, then each `rise_s` longer."""

    first_s: float
    rise_s: float

    def upto(self, steps: int) -> float:
        """Time of the first `steps`."""
        return steps * self.first_s + self.rise_s * (steps * (steps - 1) / 2)

    def each(self, steps: int) -> NDArray[np.float64]:
        return self.first_s + self.rise_s * np.arange(steps, dtype=np.float64)

    def begun_within(self, passed_s: float) -> int:
        """The fewest steps that take at least `passed_s`."""
        steps = max(0, ceil(self._steps(passed_s)))
        # Floats: the closed form may be one off.
        while steps > 0 and self.upto(steps - 1) >= passed_s:
            steps -= 1
        while self.upto(steps) < passed_s:
            steps += 1
        return steps

    def done_within(self, passed_s: float) -> int:
        """The most steps that take at most `passed_s`."""
        steps = self.begun_within(passed_s)
        return steps if self.upto(steps) <= passed_s else steps - 1

    def _steps(self, passed_s: float) -> float:
        if self.rise_s <= 0.0:
            return passed_s / self.first_s if self.first_s > 0.0 else 0.0
        half = self.first_s - self.rise_s / 2
        return (sqrt(half * half + 2 * self.rise_s * passed_s) - half) / self.rise_s


def step_times(cost: CostCoefficients, running: Iterable[Decoding]) -> StepTimes:
    kv_tokens = [decoding.kv_tokens for decoding in running]
    requests = len(kv_tokens)
    return StepTimes(step_s(cost, requests, sum(kv_tokens)), cost.step_per_kv_token_s * requests)


def steps_with_room(running: Iterable[Decoding], steps: int, free_blocks: int) -> int:
    """How many of `steps` the free blocks are enough for."""
    running = tuple(running)
    if sum(decoding.lacking_blocks(steps) for decoding in running) <= free_blocks:
        return steps
    enough, too_many = 0, steps
    while too_many - enough > 1:
        middle = (enough + too_many) // 2
        if sum(decoding.lacking_blocks(middle) for decoding in running) <= free_blocks:
            enough = middle
        else:
            too_many = middle
    return enough
