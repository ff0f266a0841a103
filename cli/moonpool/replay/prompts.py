"""Prompts of token ids: the same block of a trace is the same tokens, wherever it comes.

A token is a pure function of the seed, the block's id and its place in the block. So a block that a trace
has only a part of begins as the whole one does, and no table of blocks is kept. Pure.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

FIRST_TOKEN_ID, LAST_TOKEN_ID = 300, 499
"""Without other advice: words and parts of words in the usual vocabularies, whose special tokens and single
bytes are below, or at the end. Where they are not, `--token-ids` names others."""
TOKEN_ID_MAX = 2**31 - 1

_MASK = 2**64 - 1
_MULTIPLIERS = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))
_INCREMENT = np.uint64(0x9E3779B97F4A7C15)


@dataclass(frozen=True, slots=True)
class TokenRange:
    """Ordinary token ids of the model, from `first` to `last`."""

    first: int = FIRST_TOKEN_ID
    last: int = LAST_TOKEN_ID


def prompt_token_ids(
    block_ids: Sequence[int], block_ends: Sequence[int], seed: int, tokens: TokenRange
) -> NDArray[np.int64]:
    """The tokens of blocks `block_ids`, of which block i ends before place `block_ends[i]` of the prompt and
    begins where the one before it ends."""
    ends = np.asarray(block_ends, np.int64)
    lengths = np.diff(ends, prepend=0)
    ids = np.asarray([block_id & _MASK for block_id in block_ids], np.uint64)
    keys = _mixed(ids + _mixed(np.asarray([seed & _MASK], np.uint64)))
    places = np.arange(ends[-1]) - np.repeat(ends - lengths, lengths)
    drawn = _mixed(np.repeat(keys, lengths) + places.astype(np.uint64))
    return (drawn % np.uint64(tokens.last - tokens.first + 1)).astype(np.int64) + tokens.first


def _mixed(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """splitmix64's output function, of each value: neighbours become unlike."""
    mixed = values + _INCREMENT
    mixed = (mixed ^ (mixed >> np.uint64(30))) * _MULTIPLIERS[0]
    mixed = (mixed ^ (mixed >> np.uint64(27))) * _MULTIPLIERS[1]
    return mixed ^ (mixed >> np.uint64(31))
