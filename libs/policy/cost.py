"""The cost model of one instance (DESIGN §8): tokens, requests and bytes to seconds.

Owns the formulas, not the coefficients: an instance measures those and announces them in its load.
"""

from dataclasses import dataclass
from typing import overload

import numpy as np

from policy.columns import DecodeColumns, Floats, HolderColumns, PrefillColumns
from policy.core import CostCoefficients

ASSUMED_COST = CostCoefficients(
    prefill_fixed_s=0.01,
    prefill_per_token_s=1e-3,
    prefill_per_token_pair_s=1e-8,
    step_fixed_s=0.03,
    step_per_request_s=1e-3,
    step_per_kv_token_s=1e-7,
    transfer_fixed_s=1e-3,
    transfer_bytes_per_s=1e9,
)
"""Stands in for an instance that has not announced its own yet (its first second, at most)."""


@overload
def prefill_s(cost: CostCoefficients, new_tokens: int, prefix_tokens: int) -> float: ...
@overload
def prefill_s(cost: PrefillColumns, new_tokens: Floats, prefix_tokens: Floats) -> Floats: ...
def prefill_s(
    cost: CostCoefficients | PrefillColumns, new_tokens: int | Floats, prefix_tokens: int | Floats
) -> float | Floats:
    """Time to compute `new_tokens` tokens that attend to `prefix_tokens` cached ones and each other, at one
    instance or at each of many."""
    pairs = new_tokens * (prefix_tokens + new_tokens / 2)
    return (
        cost.prefill_fixed_s + cost.prefill_per_token_s * new_tokens + cost.prefill_per_token_pair_s * pairs
    )


@overload
def step_s(cost: CostCoefficients, requests: int, kv_tokens: int) -> float: ...
@overload
def step_s(cost: CostCoefficients | DecodeColumns, requests: Floats, kv_tokens: Floats) -> Floats: ...
def step_s(
    cost: CostCoefficients | DecodeColumns, requests: int | Floats, kv_tokens: int | Floats
) -> float | Floats:
    """Time of one decode step over `requests` sequences with `kv_tokens` tokens of KV in all; of several
    steps, or of one at each of many instances."""
    return cost.step_fixed_s + cost.step_per_request_s * requests + cost.step_per_kv_token_s * kv_tokens


@dataclass(frozen=True, slots=True)
class StepWork:
    """What one engine step computes: `decodes` sequences that take one token each, with `kv_tokens` tokens
    of KV in all, and chunks of prompts with `chunk_tokens` tokens and `chunk_pairs` pairs in all."""

    decodes: int = 0
    kv_tokens: int = 0
    chunk_tokens: int = 0
    chunk_pairs: float = 0.0


StepTerms = tuple[float, float, float, float, float, float]
"""Seconds of a step by what takes them: fixed, tokens and pairs of prefill, then fixed, requests and KV
tokens of decode."""


def step_terms(cost: CostCoefficients, work: StepWork) -> StepTerms:
    """What its chunks and its decodes would take, each in a step of their own."""
    return (
        cost.prefill_fixed_s if work.chunk_tokens else 0.0,
        cost.prefill_per_token_s * work.chunk_tokens,
        cost.prefill_per_token_pair_s * work.chunk_pairs,
        cost.step_fixed_s if work.decodes else 0.0,
        cost.step_per_request_s * work.decodes,
        cost.step_per_kv_token_s * work.kv_tokens,
    )


def in_one_step(terms: StepTerms) -> StepTerms:
    """A step that does both goes through the model once: of the fixed parts only the larger one counts."""
    prefill_fixed_s, tokens_s, pairs_s, step_fixed_s, requests_s, kv_s = terms
    if prefill_fixed_s >= step_fixed_s:
        return (prefill_fixed_s, tokens_s, pairs_s, 0.0, requests_s, kv_s)
    return (0.0, tokens_s, pairs_s, step_fixed_s, requests_s, kv_s)


def work_s(cost: CostCoefficients, work: StepWork) -> float:
    """Time of one step: `step_s` where it only decodes, `prefill_s` where it only computes one chunk, and in
    between where it does both or has several chunks."""
    return sum(in_one_step(step_terms(cost, work)))


@overload
def transfer_s(cost: CostCoefficients, transfer_bytes: int) -> float: ...
@overload
def transfer_s(cost: CostCoefficients | HolderColumns, transfer_bytes: Floats) -> Floats: ...
def transfer_s(cost: CostCoefficients | HolderColumns, transfer_bytes: int | Floats) -> float | Floats:
    """Time to move `transfer_bytes` from this instance to a peer."""
    return cost.transfer_fixed_s + transfer_bytes / cost.transfer_bytes_per_s


@overload
def ssd_read_s(cost: CostCoefficients, read_bytes: int) -> float: ...
@overload
def ssd_read_s(cost: CostCoefficients | PrefillColumns, read_bytes: Floats) -> Floats: ...
def ssd_read_s(cost: CostCoefficients | PrefillColumns, read_bytes: int | Floats) -> float | Floats:
    """Time to read `read_bytes` from this instance's SSD into its memory; nothing takes none."""
    read_s = cost.ssd_fixed_s + read_bytes / cost.ssd_bytes_per_s
    if isinstance(read_bytes, np.ndarray):
        return np.where(read_bytes > 0, read_s, 0.0)
    return read_s if read_bytes else 0.0
