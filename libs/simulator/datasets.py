"""Requests made to the statistics that the Mooncake paper publishes of its data sets (arXiv 2407.00079, its
table of end-to-end experiments), for where the data sets themselves are not at hand.

Published are the means of prompt and answer, the share of prompts that is cached, and that arrivals are
Poisson. The rest is assumed, once for all: lengths of ArXiv and L-Eval are spread evenly over SPREAD around
their mean, those of the simulated data are all the same. Where prompts share something they are questions
about documents: each document is asked QUESTIONS times, the order of the questions of OPEN_DOCUMENTS at a
time is drawn, and the first question of a document finds nothing. A document is shared in whole blocks.

Deterministic: the seed draws all. Two rates with the same seed make the same requests in the same order, at
arrival times that differ by a factor.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from itertools import count
from random import Random

from simulator.trace import TRACE_BLOCK_TOKENS, TracedRequest

QUESTIONS = 8
OPEN_DOCUMENTS = 16
SPREAD = (0.5, 1.5)
"""Shortest and longest, in means."""
SIMULATED_REUSE = 0.5
SIMULATED_OUTPUT_TOKENS = 512
RATE_MAX = 1e6
"""Requests a second: arrivals are whole milliseconds."""


class DatasetName(StrEnum):
    ARXIV = "arxiv"
    LEVAL = "leval"
    SIMULATED_16K = "simulated-16k"
    SIMULATED_32K = "simulated-32k"
    SIMULATED_64K = "simulated-64k"
    SIMULATED_128K = "simulated-128k"


@dataclass(frozen=True, slots=True)
class Dataset:
    input_tokens_mean: int
    output_tokens_mean: int
    spread: bool
    """Lengths lie around their means; else all are equal."""
    shared_share: float
    """Of a prompt, what all questions about its document begin with."""

    def __post_init__(self) -> None:
        assert 0.0 <= self.shared_share < 1.0, "a question is more than its document"

    @property
    def reuse(self) -> float:
        """Of all prompts, what an unbounded cache would hit in the long run; less than half a block a prompt
        more or less, as documents are shared in whole blocks."""
        return self.shared_share * (QUESTIONS - 1) / QUESTIONS


def _simulated(input_tokens: int) -> Dataset:
    shared_share = SIMULATED_REUSE * QUESTIONS / (QUESTIONS - 1)
    return Dataset(input_tokens, SIMULATED_OUTPUT_TOKENS, spread=False, shared_share=shared_share)


DATASETS: dict[DatasetName, Dataset] = {
    DatasetName.ARXIV: Dataset(8_088, 229, spread=True, shared_share=0.0),
    DatasetName.LEVAL: Dataset(19_019, 72, spread=True, shared_share=0.95),
    DatasetName.SIMULATED_16K: _simulated(16 * 1024),
    DatasetName.SIMULATED_32K: _simulated(32 * 1024),
    DatasetName.SIMULATED_64K: _simulated(64 * 1024),
    DatasetName.SIMULATED_128K: _simulated(128 * 1024),
}


def dataset_requests(name: DatasetName, requests: int, rate_per_s: float, seed: int) -> list[TracedRequest]:
    """So many requests, at least 1, that arrive at `rate_per_s`, at most RATE_MAX, in the mean."""
    dataset = DATASETS[name]
    random = Random(f"{name} {seed}")
    prompts = _prompts(dataset, random)
    made = []
    arrived_s = 0.0
    for _ in range(requests):
        input_tokens, block_ids = next(prompts)
        output_tokens = _length(dataset.output_tokens_mean, dataset.spread, random)
        made.append(TracedRequest(round(arrived_s * 1e3), input_tokens, output_tokens, block_ids))
        arrived_s += random.expovariate(1.0) / rate_per_s
    return made


def _prompts(dataset: Dataset, random: Random) -> Iterator[tuple[int, tuple[int, ...]]]:
    """Tokens and blocks of one prompt after the other, without end."""
    fresh = count()
    while True:
        documents = [_document(dataset, random, fresh) for _ in range(OPEN_DOCUMENTS)]
        asked = [document for document in documents for _ in range(QUESTIONS)]
        random.shuffle(asked)
        for input_tokens, shared in asked:
            own_blocks = -(-input_tokens // TRACE_BLOCK_TOKENS) - len(shared)
            yield input_tokens, shared + tuple(next(fresh) for _ in range(own_blocks))


def _document(dataset: Dataset, random: Random, fresh: "count[int]") -> tuple[int, tuple[int, ...]]:
    """Tokens of each prompt that asks about it, and the blocks that they share."""
    input_tokens = _length(dataset.input_tokens_mean, dataset.spread, random)
    shared_blocks = round(dataset.shared_share * input_tokens / TRACE_BLOCK_TOKENS)
    return input_tokens, tuple(next(fresh) for _ in range(shared_blocks))


def _length(mean: int, spread: bool, random: Random) -> int:
    if not spread:
        return mean
    shortest, longest = SPREAD
    return max(1, round(random.uniform(shortest * mean, longest * mean)))
