"""A set of token ids as a sampler takes it: a bit for each token of the vocabulary."""

import numpy as np
import numpy.typing as npt

TokenMask = npt.NDArray[np.int32]
"""[vocabulary / 32, rounded up]: token i is allowed where bit i % 32 of word i // 32 is set."""
MASK_WORD_BITS = 32


def mask_words(vocab_size: int) -> int:
    """Length of a TokenMask."""
    return -(-vocab_size // MASK_WORD_BITS)
