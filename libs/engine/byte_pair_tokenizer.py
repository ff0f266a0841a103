"""Byte-level BPE tokenizers (GPT-2, SmolLM, Llama 3, Qwen) put together from tokens and merges."""

from collections.abc import Sequence
from enum import StrEnum

from tokenizers import Regex, Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.normalizers import NFC
from tokenizers.pre_tokenizers import ByteLevel, Digits, PreTokenizer, Split
from tokenizers.pre_tokenizers import Sequence as PreTokenizers

from engine.tokenizer_file import SpecialTokens, Vocabulary, add_tokens

WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{digits}"
    r"| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""Where Llama 3 and Qwen cut a text before merging; they differ in how many digits stay together."""


class Splitting(StrEnum):
    """How a text is cut into the pieces within which tokens are merged."""

    GPT2 = "gpt2"
    SMOLLM = "smollm"
    """Digits one by one, the rest as GPT-2."""
    LLAMA3 = "llama3"
    QWEN2 = "qwen2"


def byte_symbols() -> list[str]:
    """GPT-2's printable spelling of each byte, by byte value."""
    printable = [
        *range(ord("!"), ord("~") + 1),
        *range(ord("¡"), ord("¬") + 1),
        *range(ord("®"), ord("ÿ") + 1),
    ]
    symbols = {byte: chr(byte) for byte in printable}
    for shift, byte in enumerate(byte for byte in range(256) if byte not in symbols):
        symbols[byte] = chr(256 + shift)
    return [symbols[byte] for byte in range(256)]


def byte_pair_tokenizer(
    vocabulary: Vocabulary,
    merges: Sequence[tuple[str, str]],
    splitting: Splitting,
    special: SpecialTokens,
) -> Tokenizer:
    """`vocabulary.tokens` and `merges` are in GPT-2's spelling of bytes."""
    by_token = {token: index for index, token in enumerate(vocabulary.tokens)}
    # Llama 3 takes a piece that is a token as it is, even where merging would not arrive at it.
    ignore_merges = splitting is Splitting.LLAMA3
    tokenizer = Tokenizer(BPE(vocab=by_token, merges=list(merges), ignore_merges=ignore_merges))
    if splitting is Splitting.QWEN2:
        tokenizer.normalizer = NFC()
    tokenizer.pre_tokenizer = _pre_tokenizer(splitting)
    tokenizer.decoder = ByteLevelDecoder()
    add_tokens(tokenizer, vocabulary, special)
    return tokenizer


def _pre_tokenizer(splitting: Splitting) -> PreTokenizer:
    gpt2 = ByteLevel(add_prefix_space=False, use_regex=True)
    if splitting is Splitting.GPT2:
        return gpt2
    if splitting is Splitting.SMOLLM:
        return PreTokenizers([Digits(individual_digits=True), gpt2])
    digits = r"\p{N}{1,3}" if splitting is Splitting.LLAMA3 else r"\p{N}"
    words = Split(Regex(WORDS.format(digits=digits)), behavior="isolated", invert=False)
    return PreTokenizers([words, ByteLevel(add_prefix_space=False, use_regex=False)])
