"""Builds tokenizer.json and tokenizer_config.json for byte-level BPE vocabularies."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tokenizers import AddedToken, Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel, Digits, PreTokenizer
from tokenizers.pre_tokenizers import Sequence as PreTokenizers
from tokenizers.processors import TemplateProcessing


@dataclass(frozen=True, slots=True)
class SpecialTokens:
    """Token ids with a meaning of their own; None where the model has no such token."""

    bos: int | None
    eos: int | None
    unknown: int | None
    padding: int | None


@dataclass(frozen=True, slots=True)
class BytePairVocabulary:
    """A byte-level BPE tokenizer as data."""

    tokens: Sequence[str]
    """By id, in GPT-2's spelling of bytes."""
    merges: Sequence[tuple[str, str]]
    control_token_ids: Sequence[int]
    """Never made from text, only from their exact spelling; skipped when decoding for people."""
    user_defined_token_ids: Sequence[int]
    """Matched before BPE, decoded like text."""
    digits_split: bool
    """Whether digits are split one by one before the GPT-2 pattern."""
    add_bos: bool


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


def write_tokenizer(
    folder: Path,
    vocabulary: BytePairVocabulary,
    special: SpecialTokens,
    *,
    chat_template: str | None,
    context_tokens_max: int,
) -> None:
    """Writes tokenizer.json and tokenizer_config.json."""
    _tokenizer(vocabulary, special).save(str(folder / "tokenizer.json"))
    config: dict[str, object] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": context_tokens_max,
        "clean_up_tokenization_spaces": False,
        "add_bos_token": vocabulary.add_bos,
        "add_eos_token": False,
    }
    names: Mapping[str, int | None] = {
        "bos_token": special.bos,
        "eos_token": special.eos,
        "unk_token": special.unknown,
        "pad_token": special.padding,
    }
    config.update({name: vocabulary.tokens[token] for name, token in names.items() if token is not None})
    if chat_template is not None:
        config["chat_template"] = chat_template
    write_json(folder / "tokenizer_config.json", config)


def write_json(path: Path, value: object) -> None:
    """One indented JSON file."""
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _tokenizer(vocabulary: BytePairVocabulary, special: SpecialTokens) -> Tokenizer:
    by_token = {token: index for index, token in enumerate(vocabulary.tokens)}
    tokenizer = Tokenizer(BPE(vocab=by_token, merges=list(vocabulary.merges)))
    tokenizer.pre_tokenizer = _pre_tokenizer(vocabulary.digits_split)
    tokenizer.decoder = ByteLevelDecoder()
    tokenizer.add_special_tokens(
        [
            AddedToken(vocabulary.tokens[token], special=True, normalized=False)
            for token in vocabulary.control_token_ids
        ]
    )
    tokenizer.add_tokens(
        [
            AddedToken(vocabulary.tokens[token], normalized=False)
            for token in vocabulary.user_defined_token_ids
        ]
    )
    if vocabulary.add_bos and special.bos is not None:
        bos = vocabulary.tokens[special.bos]
        tokenizer.post_processor = TemplateProcessing(
            single=f"{bos} $A", pair=f"{bos} $A {bos} $B", special_tokens=[(bos, special.bos)]
        )
    return tokenizer


def _pre_tokenizer(digits_split: bool) -> PreTokenizer:
    byte_level = ByteLevel(add_prefix_space=False, use_regex=True)
    return PreTokenizers([Digits(individual_digits=True), byte_level]) if digits_split else byte_level
