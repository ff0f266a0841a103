"""The sampler's first stage: what a request's history, bias and grammar do to the logits of its row.

In order: logit bias, repetition penalty, frequency and presence penalty, then what is not allowed:
stop tokens while fewer than `output_tokens_min` came, and all but a mask's tokens. Definitions as in
OpenAI's API and vLLM. Rows that ask for nothing are not touched, and no row depends on another.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from engine.step import Int32Array, SequenceStep
from policy.core import SamplingParams
from structures.masks import MASK_WORD_BITS, TokenMask, mask_words


def shape_(logits: Tensor, sequences: Sequence[SequenceStep]) -> None:
    """Shapes float32 logits [S, vocabulary] in place; row s belongs to `sequences[s]`, which samples."""
    masks: list[tuple[int, TokenMask]] = []
    for index, sequence in enumerate(sequences):
        sampling = sequence.sampling
        assert sampling is not None, "a sequence without a row"
        row = logits[index]
        if sampling.logit_bias:
            _add_bias(row, sampling.logit_bias)
        if sampling.needs_history:
            _penalise(row, sampling, sequence)
        too_early = sampling.stop_token_ids if sequence.output_tokens < sampling.output_tokens_min else ()
        if sequence.allowed is not None:
            allowed = sequence.allowed()
            assert allowed.size == mask_words(logits.shape[1]), "a mask of another vocabulary"
            masks.append((index, _without(allowed, too_early)))
        elif too_early:
            _ban(row, too_early)
    if masks:
        _mask(logits, masks)


def _add_bias(row: Tensor, logit_bias: tuple[tuple[int, float], ...]) -> None:
    token_ids = torch.tensor([token_id for token_id, _ in logit_bias], device=row.device)
    row[token_ids] += torch.tensor([bias for _, bias in logit_bias], dtype=row.dtype, device=row.device)


def _penalise(row: Tensor, sampling: SamplingParams, sequence: SequenceStep) -> None:
    vocab_size = row.shape[0]
    output_token_ids = np.asarray(sequence.output_token_ids, np.int32)
    if sampling.repetition_penalty != 1.0:
        seen = np.zeros(vocab_size, np.bool_)
        seen[np.asarray(sequence.prompt_token_ids, np.int32)] = True
        seen[output_token_ids] = True
        token_ids = torch.from_numpy(np.flatnonzero(seen)).to(row.device)
        logits = row[token_ids]
        penalty = sampling.repetition_penalty
        row[token_ids] = torch.where(logits > 0, logits / penalty, logits * penalty)
    if sampling.presence_penalty != 0.0 or sampling.frequency_penalty != 0.0:
        used, counts = np.unique(output_token_ids, return_counts=True)
        penalties = sampling.frequency_penalty * counts + sampling.presence_penalty
        row[torch.from_numpy(used).to(row.device, torch.int64)] -= torch.from_numpy(penalties).to(row)


def _without(allowed: TokenMask, token_ids: tuple[int, ...]) -> TokenMask:
    """`allowed` without `token_ids`, unless nothing would be left: valid output goes before a long one."""
    words = allowed.copy()
    for token_id in token_ids:
        word, bit = divmod(token_id, MASK_WORD_BITS)
        if 0 <= word < words.size:
            words[word] &= np.int32(~(1 << bit) if bit < MASK_WORD_BITS - 1 else 0x7FFF_FFFF)
    return words if words.any() else allowed


def _ban(row: Tensor, token_ids: tuple[int, ...]) -> None:
    banned = {token_id for token_id in token_ids if 0 <= token_id < row.shape[0]}
    if len(banned) < row.shape[0]:
        row[torch.tensor(sorted(banned), dtype=torch.int64, device=row.device)] = -torch.inf


def _mask(logits: Tensor, masks: list[tuple[int, TokenMask]]) -> None:
    rows = torch.tensor([index for index, _ in masks], device=logits.device)
    packed: Int32Array = np.stack([mask for _, mask in masks])
    bits = torch.arange(MASK_WORD_BITS, dtype=torch.int32, device=logits.device)
    words = torch.from_numpy(packed).to(logits.device)
    allowed = (words.unsqueeze(-1) >> bits).bitwise_and_(1).flatten(1)[:, : logits.shape[1]].bool()
    logits[rows] = torch.where(allowed, logits[rows], -torch.inf)
