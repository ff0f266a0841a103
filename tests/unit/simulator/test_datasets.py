"""Data sets by published statistics: means, reuse and arrivals as they should be, and the seed says all."""

from collections import Counter
from itertools import pairwise
from statistics import fmean

import pytest

from simulator.datasets import DATASETS, OPEN_DOCUMENTS, QUESTIONS, SPREAD, DatasetName, dataset_requests
from simulator.trace import TRACE_BLOCK_TOKENS, TracedRequest

pytestmark = pytest.mark.unit

REQUESTS = 40 * QUESTIONS * OPEN_DOCUMENTS


def reused_share(requests: list[TracedRequest]) -> float:
    """Of all prompt tokens, those in whole blocks that an earlier prompt had."""
    seen: set[int] = set()
    reused = 0
    for request in requests:
        reused += sum(block_id in seen for block_id in request.block_ids)
        seen.update(request.block_ids)
    return reused * TRACE_BLOCK_TOKENS / sum(request.input_tokens for request in requests)


@pytest.mark.parametrize("name", DatasetName)
def test_the_statistics_are_the_published_ones(name: DatasetName) -> None:
    dataset = DATASETS[name]
    requests = dataset_requests(name, REQUESTS, 2.0, 0)
    assert len(requests) == REQUESTS
    assert fmean(one.input_tokens for one in requests) == pytest.approx(dataset.input_tokens_mean, rel=0.05)
    assert fmean(one.output_tokens for one in requests) == pytest.approx(dataset.output_tokens_mean, rel=0.02)
    assert reused_share(requests) == pytest.approx(dataset.reuse, abs=0.02)
    for one in requests:
        assert len(one.block_ids) == -(-one.input_tokens // TRACE_BLOCK_TOKENS)
        assert len(set(one.block_ids)) == len(one.block_ids)
        low, high = (round(end * dataset.input_tokens_mean) for end in (SPREAD if dataset.spread else (1, 1)))
        assert low <= one.input_tokens <= high


def test_published_reuse() -> None:
    assert DATASETS[DatasetName.ARXIV].reuse == 0.0
    assert DATASETS[DatasetName.LEVAL].reuse > 0.8
    assert DATASETS[DatasetName.SIMULATED_64K].reuse == pytest.approx(0.5)
    assert reused_share(dataset_requests(DatasetName.LEVAL, 2_000, 1.0, 3)) > 0.8


def test_arrivals_are_poisson_at_the_rate() -> None:
    requests = dataset_requests(DatasetName.ARXIV, 20_000, 5.0, 1)
    gaps_s = [(later.arrived_ms - earlier.arrived_ms) / 1e3 for earlier, later in pairwise(requests)]
    assert min(gaps_s) >= 0
    mean_s = fmean(gaps_s)
    assert mean_s == pytest.approx(1 / 5.0, rel=0.03)
    # Of an exponential distribution the deviation is the mean.
    assert fmean((gap_s - mean_s) ** 2 for gap_s in gaps_s) ** 0.5 == pytest.approx(mean_s, rel=0.05)


def test_a_block_always_follows_the_same_one() -> None:
    parents: dict[int, int | None] = {}
    for request in dataset_requests(DatasetName.LEVAL, 500, 1.0, 0):
        parent = None
        for block_id in request.block_ids:
            assert parents.setdefault(block_id, parent) == parent
            parent = block_id


def test_every_document_is_asked_about_as_often() -> None:
    requests = dataset_requests(DatasetName.SIMULATED_16K, 2 * QUESTIONS * OPEN_DOCUMENTS, 1.0, 0)
    assert set(Counter(one.block_ids[0] for one in requests).values()) == {QUESTIONS}


def test_the_seed_says_all_and_the_rate_only_when() -> None:
    requests = dataset_requests(DatasetName.LEVAL, 200, 1.0, 4)
    assert requests == dataset_requests(DatasetName.LEVAL, 200, 1.0, 4)
    assert requests != dataset_requests(DatasetName.LEVAL, 200, 1.0, 5)
    twice_as_fast = dataset_requests(DatasetName.LEVAL, 200, 2.0, 4)
    for slow, fast in zip(requests, twice_as_fast, strict=True):
        assert (slow.input_tokens, slow.output_tokens, slow.block_ids) == (
            fast.input_tokens,
            fast.output_tokens,
            fast.block_ids,
        )
        assert fast.arrived_ms == pytest.approx(slow.arrived_ms / 2, abs=1)
    assert dataset_requests(DatasetName.LEVAL, 50, 1.0, 4) == requests[:50]
