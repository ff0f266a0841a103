"""Pieces of texts make the tokens that the whole makes, and are tokenised once."""

import json
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers, trainers

from gateway.text import known_pieces
from gateway.text.known_pieces import PIECE_CHARS_MIN, KnownPieces, ends_words, pieces
from gateway.text_model import pack_token_ids
from kvhash import Namespace

pytestmark = pytest.mark.unit

SPACE, OTHERS = Namespace(b"one"), Namespace(b"two")
SPLIT_PATTERNS = sorted(known_pieces._SPLIT_PATTERNS)
WORDS = "the quick brown fox jumps over a lazy dog we're they'll don't I'd x y 12 3456 end. (so) être naïve"


def trained(pre_tokenizer: Any) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizer
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<|im_start|>", "<|im_end|>"],
        show_progress=False,
    )
    tokenizer.train_from_iterator([WORDS] * 4, trainer)
    return tokenizer


def byte_level() -> Any:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)


def split(pattern: str) -> Any:
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


TOKENIZERS = [
    trained(byte_level()),
    trained(pre_tokenizers.Sequence([pre_tokenizers.Digits(True), byte_level()])),
    *(trained(split(pattern)) for pattern in SPLIT_PATTERNS),
]

texts = st.lists(
    st.one_of(
        st.sampled_from(
            ["the quick brown", " ", "  ", "\n", "\r\n", "\t", "'s ", "'ll real", "1", "é", "e\u0301"]
        ),
        st.sampled_from(
            ["漢字", "🦊", "<|im_start|>", "<|im_end|>", "user\n", ". ", "a b", "A B", "\u00a0", " x"]
        ),
        st.text(max_size=4),
    ),
    max_size=60,
).map("".join)


@pytest.mark.parametrize("tokenizer", TOKENIZERS)
@given(texts=st.lists(texts, min_size=1, max_size=3))
@example(texts=["we're the end of it's 12 a b " * 40, "we're the end of it's 12 a b " * 39 + "other"])
@settings(max_examples=40, deadline=None)
def test_pieces_make_the_tokens_of_the_whole(tokenizer: Tokenizer, texts: list[str]) -> None:
    assert ends_words(tokenizer)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(known_pieces, "PIECE_CHARS_MIN", 8)
        known = KnownPieces(tokenizer, pieces_max=16)
        for text in [*texts, *texts]:
            assert "".join(pieces(text)) == text
            whole = tokenizer.encode(text, add_special_tokens=False).ids
            assert known.encode(text, SPACE) == pack_token_ids(whole)
            assert len(known) <= 16


def test_what_came_before_is_not_tokenised_again() -> None:
    known = KnownPieces(TOKENIZERS[0])
    text = "the quick brown fox jumps over a lazy dog " * 40
    assert known.unknown_chars(text, SPACE) == len(text)
    known.encode(text, SPACE)
    other = text[: len(text) // 2] + "and so on"
    assert known.unknown_chars(text, SPACE) < 3 * PIECE_CHARS_MIN
    assert known.unknown_chars(other, SPACE) < 3 * PIECE_CHARS_MIN
    assert known.unknown_chars(text, OTHERS) == len(text)


def test_a_text_without_words_is_one_piece_and_not_kept() -> None:
    known = KnownPieces(TOKENIZERS[0])
    text = "漢字" * 4096
    assert list(pieces(text)) == [text]
    known.encode(text, SPACE)
    assert len(known) == 0


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("normalizer", {"type": "Lowercase"}),
        ("pre_tokenizer", None),
        (
            "pre_tokenizer",
            {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": True},
        ),
        (
            "pre_tokenizer",
            {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        ),
        (
            "pre_tokenizer",
            {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False},
        ),
        (
            "pre_tokenizer",
            {
                "type": "Split",
                "pattern": {"Regex": r"\w+ \w+"},
                "behavior": "Isolated",
                "invert": False,
            },
        ),
    ],
)
def test_other_kinds_are_left_alone(field: str, value: object) -> None:
    described = json.loads(TOKENIZERS[0].to_str())
    assert not ends_words(Tokenizer.from_str(json.dumps(described | {field: value})))


@pytest.mark.parametrize(
    "token",
    [
        AddedToken("two words"),
        AddedToken("x", lstrip=True),
        AddedToken("x", rstrip=True),
        AddedToken("x", single_word=True),
    ],
)
def test_added_tokens_that_reach_over_spaces_are_left_alone(token: AddedToken) -> None:
    tokenizer = Tokenizer.from_str(TOKENIZERS[0].to_str())
    tokenizer.add_tokens([token])
    assert not ends_words(tokenizer)


def test_a_tokenizer_with_a_normalizer_is_left_alone() -> None:
    tokenizer = Tokenizer.from_str(TOKENIZERS[0].to_str())
    tokenizer.normalizer = normalizers.NFC()
    assert not ends_words(tokenizer)
