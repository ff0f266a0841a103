"""Tokens to characters and stop strings, against the whole text as the plain truth."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.gateway.model_files import CORPUS, byte_level_tokenizer, sentence_piece_tokenizer
from tests.unit.gateway.plain_text import cut_naively
from tokenizers import Tokenizer, decoders, models

from cluster.errors import ConfigError
from gateway.text.detokenizer import Detokenizer, TokenBytes
from gateway.text.stop_matcher import StopMatcher, StopStrings

pytestmark = pytest.mark.unit

BYTE_LEVEL = byte_level_tokenizer()
SENTENCE_PIECE = sentence_piece_tokenizer()
TABLES = {tokenizer: TokenBytes(tokenizer) for tokenizer in (BYTE_LEVEL, SENTENCE_PIECE)}
BYTE_LEVEL_IDS = st.integers(0, BYTE_LEVEL.get_vocab_size() + 3)
TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=60) | st.sampled_from(
    ["👩‍👩‍👧🙂", "e\u0301a\u0308", "你好世界", "한국어", "🇫🇷🇩🇪", "\u200d\ufe0f", "�", CORPUS[:200]]
)


def deltas(tokenizer: Tokenizer, token_ids: list[int]) -> list[str]:
    detokenizer = Detokenizer(TABLES[tokenizer])
    return [*(detokenizer.feed([token_id]) for token_id in token_ids), detokenizer.finish()]


@given(st.lists(BYTE_LEVEL_IDS, max_size=40))
def test_any_byte_level_tokens_give_the_whole_text(token_ids: list[int]) -> None:
    """Invalid UTF-8, special tokens and ids without a token included."""
    assert "".join(deltas(BYTE_LEVEL, token_ids)) == BYTE_LEVEL.decode(token_ids, skip_special_tokens=True)


@given(TEXTS)
def test_no_character_is_ever_cut(text: str) -> None:
    token_ids = BYTE_LEVEL.encode(text, add_special_tokens=False).ids
    pieces = deltas(BYTE_LEVEL, token_ids)
    assert "".join(pieces) == text
    assert sum(piece.count("�") for piece in pieces) == text.count("�")


@given(TEXTS)
def test_characters_come_as_soon_as_they_are_whole(text: str) -> None:
    detokenizer = Detokenizer(TABLES[BYTE_LEVEL])
    token_ids = BYTE_LEVEL.encode(text, add_special_tokens=False).ids
    seen = ""
    for count, token_id in enumerate(token_ids, 1):
        seen += detokenizer.feed([token_id])
        whole = b"".join(map(TABLES[BYTE_LEVEL].of, token_ids[:count])).decode("utf-8", "ignore")
        assert seen == whole


@given(st.lists(st.sampled_from(["the ", "Paris", " ", "é", "你", "🙂", "ß", "ab", "\n"]), max_size=12))
def test_byte_fallback_tokens_make_whole_characters(words: list[str]) -> None:
    text = "".join(words)
    token_ids = SENTENCE_PIECE.encode(text.replace(" ", "▁"), add_special_tokens=False).ids
    pieces = deltas(SENTENCE_PIECE, token_ids)
    assert "".join(pieces) == text
    assert not any("�" in piece for piece in pieces)
    anchor = SENTENCE_PIECE.encode("a").ids
    assert SENTENCE_PIECE.decode([*anchor, *token_ids]) == "a" + text


def test_a_first_word_keeps_its_space() -> None:
    assert "".join(deltas(SENTENCE_PIECE, [SENTENCE_PIECE.token_to_id("▁Paris")])) == " Paris"


def test_a_decoder_that_is_not_known_is_an_error_by_name() -> None:
    tokenizer = Tokenizer(models.WordLevel({"a": 0}, unk_token="a"))
    for decoder in (None, decoders.WordPiece()):
        if decoder is not None:
            tokenizer.decoder = decoder
        with pytest.raises(ConfigError, match="decoder"):
            TokenBytes(tokenizer)


PIECES = st.lists(st.text("abc\n", max_size=4), max_size=20)
STOPS = st.lists(st.text("abc\n", min_size=1, max_size=5), max_size=5, unique=True)


@given(PIECES, STOPS)
def test_stop_strings_cut_where_the_whole_text_would_be_cut(pieces: list[str], stops: list[str]) -> None:
    matcher = StopMatcher(StopStrings(stops))
    emitted, matched = "", None
    for count, piece in enumerate(pieces, 1):
        found = matcher.feed(piece)
        emitted += found.text
        matched = found.matched
        if matched is not None:
            break
        # Nothing is held back longer than it may still begin a stop string.
        held = "".join(pieces[:count])[len(emitted) :]
        assert held not in stops
        assert held == "" or any(stop.startswith(held) for stop in stops)
    if matched is None:
        emitted += matcher.finish()
    assert (emitted, matched) == cut_naively("".join(pieces), stops)


def test_a_near_miss_is_emitted_whole() -> None:
    matcher = StopMatcher(StopStrings(["END!"]))
    assert [matcher.feed(character).text for character in "ENEND?x"] == ["", "", "EN", "", "", "END?", "x"]
    matcher = StopMatcher(StopStrings(["aab"]))
    assert "".join(matcher.feed(character).text for character in "aaac") + matcher.finish() == "aaac"


def test_overlapping_stop_strings_end_at_the_first_that_completes() -> None:
    matcher = StopMatcher(StopStrings(["abcd", "bc"]))
    assert matcher.feed("xab").text == "x"
    found = matcher.feed("cd")
    assert (found.text, found.matched) == ("a", "bc")
