"""The tokenizer inside a GGUF file, put together for the tokenizers library."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum

from tokenizers import Tokenizer

from engine.byte_pair_tokenizer import Splitting, byte_pair_tokenizer
from engine.gguf_fields import GGUFFields
from engine.sentence_piece_tokenizer import SPACE, sentence_piece_tokenizer
from engine.tokenizer_file import SpecialTokens, Vocabulary

BYTE_PAIR, SENTENCE_PIECE = "gpt2", "llama"
"""The supported values of tokenizer.ggml.model."""
SPLITTINGS: Mapping[str, Splitting] = {
    "gpt-2": Splitting.GPT2,
    "smollm": Splitting.SMOLLM,
    "llama-bpe": Splitting.LLAMA3,
    "qwen2": Splitting.QWEN2,
}
"""By GGUF's name, tokenizer.ggml.pre."""
BYTES = 256


class TokenType(IntEnum):
    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    """Fills the vocabulary up; never made from text."""
    BYTE = 6


BYTE_PAIR_TYPES = (TokenType.NORMAL, TokenType.CONTROL, TokenType.USER_DEFINED, TokenType.UNUSED)


@dataclass(frozen=True, slots=True)
class ReadTokenizer:
    tokenizer: Tokenizer
    vocabulary: Vocabulary
    special: SpecialTokens


def read_tokenizer(fields: GGUFFields) -> ReadTokenizer:
    """Raises ModelFolderError naming the field of a tokenizer that is not exactly known."""
    model = fields.text("tokenizer.ggml.model")
    if fields.has("tokenizer.ggml.add_eos_token"):
        fields.require("tokenizer.ggml.add_eos_token", False)
    if model == BYTE_PAIR:
        return _byte_pair(fields)
    if model == SENTENCE_PIECE:
        return _sentence_piece(fields)
    raise fields.error(
        "tokenizer.ggml.model", f"{model!r} is not supported, only {BYTE_PAIR!r} and {SENTENCE_PIECE!r}"
    )


def _byte_pair(fields: GGUFFields) -> ReadTokenizer:
    name = fields.text("tokenizer.ggml.pre")
    splitting = SPLITTINGS.get(name)
    if splitting is None:
        raise fields.error("tokenizer.ggml.pre", f"{name!r} is not supported, only {', '.join(SPLITTINGS)}")
    if fields.has("tokenizer.ggml.add_space_prefix"):
        fields.require("tokenizer.ggml.add_space_prefix", False)
    tokens = _tokens(fields)
    types = _types(fields, tokens, BYTE_PAIR_TYPES)
    special = _special_tokens(fields, tokens)
    vocabulary = Vocabulary(
        tokens=tokens,
        control_token_ids=_of_type(types, TokenType.CONTROL),
        user_defined_token_ids=_of_type(types, TokenType.USER_DEFINED),
        add_bos=fields.boolean("tokenizer.ggml.add_bos_token", splitting is Splitting.LLAMA3),
    )
    merges = _merges(fields, frozenset(tokens))
    return ReadTokenizer(byte_pair_tokenizer(vocabulary, merges, splitting, special), vocabulary, special)


def _sentence_piece(fields: GGUFFields) -> ReadTokenizer:
    if fields.has("tokenizer.ggml.remove_extra_whitespaces"):
        fields.require("tokenizer.ggml.remove_extra_whitespaces", False)
    if fields.has("tokenizer.ggml.precompiled_charsmap"):
        raise fields.error("tokenizer.ggml.precompiled_charsmap", "is not supported")
    tokens = _tokens(fields)
    types = _types(fields, tokens, tuple(TokenType))
    _check_bytes(fields, tokens, types)
    user_defined = _of_type(types, TokenType.USER_DEFINED)
    for token_id in user_defined:
        if SPACE in tokens[token_id]:
            raise fields.error(
                "tokenizer.ggml.token_type",
                f"user-defined {tokens[token_id]!r} with a space is not supported",
            )
    scores = fields.numbers("tokenizer.ggml.scores")
    if len(scores) != len(tokens):
        raise fields.error("tokenizer.ggml.scores", f"has {len(scores)} entries for {len(tokens)} tokens")
    special = _special_tokens(fields, tokens)
    if special.unknown is None:
        raise fields.error("tokenizer.ggml.unknown_token_id", "is missing")
    vocabulary = Vocabulary(
        tokens=tokens,
        control_token_ids=[*_of_type(types, TokenType.UNKNOWN), *_of_type(types, TokenType.CONTROL)],
        user_defined_token_ids=user_defined,
        add_bos=fields.boolean("tokenizer.ggml.add_bos_token", True),
    )
    tokenizer = sentence_piece_tokenizer(
        vocabulary,
        scores,
        _of_type(types, TokenType.NORMAL),
        special,
        add_space_prefix=fields.boolean("tokenizer.ggml.add_space_prefix", True),
    )
    return ReadTokenizer(tokenizer, vocabulary, special)


def _special_tokens(fields: GGUFFields, tokens: Sequence[str]) -> SpecialTokens:
    def token_id(name: str) -> int | None:
        return fields.token_id(f"tokenizer.ggml.{name}_token_id", len(tokens))

    return SpecialTokens(
        bos=token_id("bos"),
        eos=token_id("eos"),
        unknown=token_id("unknown"),
        padding=token_id("padding"),
        further_ends=tuple(end for end in (token_id("eot"), token_id("eom")) if end is not None),
    )


def _tokens(fields: GGUFFields) -> list[str]:
    tokens = fields.texts("tokenizer.ggml.tokens")
    if len(set(tokens)) != len(tokens):
        (twice, _), *_ = Counter(tokens).most_common(1)
        raise fields.error("tokenizer.ggml.tokens", f"{twice!r} occurs more than once")
    return tokens


def _types(fields: GGUFFields, tokens: Sequence[str], allowed: Sequence[TokenType]) -> list[int]:
    types = fields.integers("tokenizer.ggml.token_type")
    if len(types) != len(tokens):
        raise fields.error("tokenizer.ggml.token_type", f"has {len(types)} entries for {len(tokens)} tokens")
    for token, token_type in zip(tokens, types, strict=True):
        if token_type not in allowed:
            raise fields.error("tokenizer.ggml.token_type", f"{token_type} of {token!r} is not supported")
    return types


def _of_type(types: Sequence[int], wanted: TokenType) -> list[int]:
    return [token_id for token_id, token_type in enumerate(types) if token_type == wanted]


def _check_bytes(fields: GGUFFields, tokens: Sequence[str], types: Sequence[int]) -> None:
    spelled = {tokens[token_id] for token_id in _of_type(types, TokenType.BYTE)}
    missing = [byte for byte in range(BYTES) if f"<0x{byte:02X}>" not in spelled]
    if missing:
        raise fields.error("tokenizer.ggml.token_type", f"no byte token for {missing[0]:#04x}")


def _merges(fields: GGUFFields, tokens: frozenset[str]) -> list[tuple[str, str]]:
    merges = []
    for merge in fields.texts("tokenizer.ggml.merges"):
        first, separator, second = merge.partition(" ")
        if not (first and separator and second) or " " in second:
            raise fields.error("tokenizer.ggml.merges", f"{merge!r} is not two symbols")
        for token in (first, second, first + second):
            if token not in tokens:
                raise fields.error("tokenizer.ggml.merges", f"{token!r} of {merge!r} is no token")
        merges.append((first, second))
    return merges
