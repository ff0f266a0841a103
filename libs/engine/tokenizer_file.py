"""Writes tokenizer.json and tokenizer_config.json of a tokenizer that was put together from data."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tokenizers import AddedToken, Tokenizer
from tokenizers.processors import TemplateProcessing


@dataclass(frozen=True, slots=True)
class SpecialTokens:
    """Token ids with a meaning of their own; None where the model has no such token."""

    bos: int | None
    eos: int | None
    unknown: int | None
    padding: int | None
    further_ends: tuple[int, ...] = ()
    """Tokens that end an answer besides `eos`, as the end of a turn."""

    @property
    def ends(self) -> tuple[int, ...]:
        """All tokens that end an answer, each once."""
        first = () if self.eos is None else (self.eos,)
        return tuple(dict.fromkeys((*first, *self.further_ends)))


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """What tokenizers of any kind have."""

    tokens: Sequence[str]
    """By id, as the tokenizer spells them."""
    control_token_ids: Sequence[int]
    """Never made from text, only from their exact spelling; skipped when decoding for people."""
    user_defined_token_ids: Sequence[int]
    """Matched before anything else, decoded like text."""
    add_bos: bool
    """Whether every text begins with the bos token."""


def add_tokens(tokenizer: Tokenizer, vocabulary: Vocabulary, special: SpecialTokens) -> None:
    """Tells a tokenizer which tokens are not made by merging, and that texts begin with bos."""
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


def write_tokenizer(
    folder: Path,
    tokenizer: Tokenizer,
    vocabulary: Vocabulary,
    special: SpecialTokens,
    *,
    chat_template: str | None,
    context_tokens_max: int,
) -> None:
    """Writes tokenizer.json and tokenizer_config.json."""
    tokenizer.save(str(folder / "tokenizer.json"))
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
