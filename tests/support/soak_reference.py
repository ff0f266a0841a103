"""Whether an answer is right, found out at a fraction of what the answer cost.

An engine by itself, without pool, batch or transfer, is given prompt and answer and says for every position
of the answer which token comes there: one pass over what it has not seen yet of the conversation, and one
step with a row for each position. Where two tokens are equally good but for rounding, either is right.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path

import torch

from engine.draw import Draw, DrawParameters
from engine.engine import Engine
from engine.layout import KVLayout
from engine.loader import load_model
from engine.model_folder import ModelConfig
from engine.sampler import uniform
from engine.step import SequenceStep
from engine.torch_ops import TorchOps
from kvhash import BLOCK_TOKENS
from policy.core import SamplingParams

NEAR_TIE_LOGITS = 1e-3
"""Float sums depend on their order: two greedy choices closer than this may fall either way."""
NEAR_BORDER = 1e-5
"""And so may a random number that is this close to where the next token begins."""


@dataclass(frozen=True, slots=True)
class Judgement:
    """`wrong` names the first position whose token is none of those it could be; None where all are right."""

    wrong: str | None
    near_ties: int


class SoakReference:
    """For one thread."""

    def __init__(self, folder: Path) -> None:
        config = ModelConfig.load(folder)
        layout = KVLayout.of(config)
        blocks = -(-config.context_tokens_max // BLOCK_TOKENS)
        self._ops = TorchOps()
        self._arena = memoryview(bytearray(blocks * layout.block_bytes))
        self._engine = Engine(load_model(folder, self._ops), layout, self._arena, blocks)
        self._block_ids = tuple(range(blocks))
        self._seen: tuple[int, ...] = ()
        """The tokens whose KV lies in the blocks."""

    def judge(self, prompt: Sequence[int], answer: Sequence[int], sampling: SamplingParams) -> Judgement:
        """`answer` may be the beginning of one."""
        if not answer:
            return Judgement(None, 0)
        logits = self._logits((*prompt, *answer), len(prompt), sampling)
        near_ties = 0
        for position, token_id in enumerate(answer):
            expected = self._choices(logits[position], sampling, position, 0.0)
            if token_id in expected:
                continue
            near = self._choices(logits[position], sampling, position, NEAR_BORDER)
            if token_id not in near:
                return Judgement(f"token {position} is {token_id}, must be one of {sorted(near)}", near_ties)
            near_ties += 1
        return Judgement(None, near_ties)

    def _logits(
        self, token_ids: tuple[int, ...], prompt_tokens: int, sampling: SamplingParams
    ) -> torch.Tensor:
        """[answer tokens, vocabulary]: what comes at each position of the answer."""
        known = _common(self._seen, token_ids)
        # The row of a position computes the token before it, whose own KV it writes once more.
        if known < len(token_ids):
            self._engine.logits([self._step(token_ids[known:], known, sampling)])
        self._seen = token_ids
        rows = [
            self._step(token_ids[position - 1 : position], position - 1, sampling)
            for position in range(prompt_tokens, len(token_ids))
        ]
        return self._engine.logits(rows)

    def _step(
        self, token_ids: tuple[int, ...], context_tokens: int, sampling: SamplingParams
    ) -> SequenceStep:
        return SequenceStep(token_ids, context_tokens, self._block_ids, sampling, 0)

    def _choices(
        self, logits: torch.Tensor, sampling: SamplingParams, position: int, tolerance: float
    ) -> set[int]:
        if sampling.temperature == 0.0:
            near = logits >= logits.max() - (NEAR_TIE_LOGITS if tolerance else 0.0)
            return set(near.nonzero().flatten().tolist())
        number = uniform(sampling.seed, 0, position)
        draws = [
            Draw(sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p, _within(near))
            for near in (number - tolerance, number, number + tolerance)
        ]
        rows = logits.expand(len(draws), -1).contiguous()
        return set(self._ops.draw(rows, DrawParameters.of(draws, logits.device)).tolist())


def _common(one: Sequence[int], other: Sequence[int]) -> int:
    """How many tokens both begin with."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))


def _within(number: float) -> float:
    """A random number is at least 0 and below 1."""
    return min(max(number, 0.0), 1.0 - 2.0**-53)
