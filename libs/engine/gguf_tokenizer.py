"""The tokenizer inside a GGUF file, as data for `tokenizer_file`."""

from engine.gguf_fields import GGUFFields
from engine.tokenizer_file import BytePairVocabulary, SpecialTokens

NORMAL, CONTROL, USER_DEFINED = 1, 3, 4
"""GGUF's token types that a byte-level BPE has."""
DIGITS_SPLIT = {"smollm": True, "gpt-2": False}
"""Pre-tokenizers by GGUF's name: whether digits are split one by one before the GPT-2 pattern."""


def read_special_tokens(fields: GGUFFields) -> SpecialTokens:
    vocab_size = len(fields.texts("tokenizer.ggml.tokens"))
    return SpecialTokens(
        bos=fields.token_id("tokenizer.ggml.bos_token_id", vocab_size),
        eos=fields.token_id("tokenizer.ggml.eos_token_id", vocab_size),
        unknown=fields.token_id("tokenizer.ggml.unknown_token_id", vocab_size),
        padding=fields.token_id("tokenizer.ggml.padding_token_id", vocab_size),
    )


def read_vocabulary(fields: GGUFFields) -> BytePairVocabulary:
    """Raises ModelFolderError for any tokenizer that is not byte-level BPE of a known pre-tokenizer."""
    fields.require("tokenizer.ggml.model", "gpt2")
    pre_tokenizer = fields.text("tokenizer.ggml.pre")
    if pre_tokenizer not in DIGITS_SPLIT:
        known = ", ".join(DIGITS_SPLIT)
        raise fields.error("tokenizer.ggml.pre", f"{pre_tokenizer!r} is not supported, only {known}")
    if fields.has("tokenizer.ggml.add_space_prefix"):
        fields.require("tokenizer.ggml.add_space_prefix", False)
    if fields.has("tokenizer.ggml.add_eos_token"):
        fields.require("tokenizer.ggml.add_eos_token", False)
    tokens = fields.texts("tokenizer.ggml.tokens")
    types = fields.integers("tokenizer.ggml.token_type")
    if len(types) != len(tokens):
        raise fields.error("tokenizer.ggml.token_type", f"has {len(types)} entries for {len(tokens)} tokens")
    for token, token_type in zip(tokens, types, strict=True):
        if token_type not in (NORMAL, CONTROL, USER_DEFINED):
            raise fields.error("tokenizer.ggml.token_type", f"{token_type} of {token!r} is not supported")
    return BytePairVocabulary(
        tokens=tokens,
        merges=[_merge(fields, merge) for merge in fields.texts("tokenizer.ggml.merges")],
        control_token_ids=[index for index, kind in enumerate(types) if kind == CONTROL],
        user_defined_token_ids=[index for index, kind in enumerate(types) if kind == USER_DEFINED],
        digits_split=DIGITS_SPLIT[pre_tokenizer],
        add_bos=fields.boolean("tokenizer.ggml.add_bos_token", False),
    )


def _merge(fields: GGUFFields, merge: str) -> tuple[str, str]:
    first, separator, second = merge.partition(" ")
    if not (first and separator and second) or " " in second:
        raise fields.error("tokenizer.ggml.merges", f"{merge!r} is not two symbols")
    return first, second
