"""A model's tokens as masks and parsers see them, from its tokenizer."""

from dataclasses import dataclass
from pathlib import Path

from llguidance import LLTokenizer
from tokenizers import Tokenizer

from structures.errors import StructureError
from structures.explanation import shortened


@dataclass(frozen=True, slots=True)
class MaskVocabulary:
    """Token ids as masks see them."""

    model_tokens: int
    """Token ids the model has logits for; others are never allowed."""
    parser_tokens: int
    """As many or more: a tokenizer may know tokens that the model does not."""
    end_token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Vocabulary:
    parser: LLTokenizer
    masks: MaskVocabulary


def read_vocabulary(folder: Path, model_tokens: int, end_token_ids: tuple[int, ...]) -> Vocabulary:
    """Of the tokenizer.json in a model folder, about 0.3 s for 50,000 tokens. `model_tokens` is the size of
    the model's vocabulary. Raises StructureError where no answer could be held to anything."""
    path = folder / "tokenizer.json"
    if not end_token_ids:
        raise StructureError(f"{folder.name} names no end token: no answer could end")
    try:
        # Padding and truncation are for batches; llguidance would take them for part of every text.
        tokenizer = Tokenizer.from_file(str(path))
        tokenizer.no_padding()
        tokenizer.no_truncation()
        tokens = 1 + max(tokenizer.get_vocab(with_added_tokens=True).values(), default=0)
        tokens = max(tokens, model_tokens)
        parser = LLTokenizer(tokenizer.to_str(), n_vocab=tokens, eos_token=list(end_token_ids))
    except Exception as error:  # tokenizers raises nothing narrower
        detail = f"{path.name} of {folder.name} cannot be used: {shortened(str(error))}"
        raise StructureError(detail) from error
    return Vocabulary(parser, MaskVocabulary(model_tokens, tokens, end_token_ids))
