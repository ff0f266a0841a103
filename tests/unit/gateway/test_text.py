"""Tokens to characters and stop strings, against the whole text as the plain truth."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.gateway.model_files import CORPUS, byte_level_tokenizer, sentence_piece_tokenizer
from tokenizers import Tokenizer, decoders, models

from cluster.errors import ConfigError
from gateway.answer_text import AnswerText, TextRules
from gateway.detokenizer import Detokenizer, TokenBytes
from gateway.stop_matcher import StopMatcher, StopStrings

pytestmark = pytest.mark.unit

BYTE_LEVEL = byte_level_tokenizer()
SENTENCE_PIECE = sentence_piece_tokenizer()
BYTE_LEVEL_IDS = st.integers(0, BYTE_LEVEL.get_vocab_size() + 3)
TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=60) | st.sampled_from(
    ["👩‍👩‍👧🙂", "e\u0301a\u0308", "你好世界", "한국어", "🇫🇷🇩🇪", "\u200d\ufe0f", "�", CORPUS[:200]]
)


def deltas(tokenizer: Tokenizer, token_ids: list[int]) -> list[str]:
    detokenizer = Detokenizer(TokenBytes(tokenizer))
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
    detokenizer = Detokenizer(TokenBytes(BYTE_LEVEL))
    token_ids = BYTE_LEVEL.encode(text, add_special_tokens=False).ids
    seen = ""
    for count, token_id in enumerate(token_ids, 1):
        seen += detokenizer.feed([token_id])
        whole = b"".join(map(TokenBytes(BYTE_LEVEL).of, token_ids[:count])).decode("utf-8", "ignore")
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


def cut_naively(text: str, stops: list[str]) -> tuple[str, str | None]:
    """Cut at the first end of a stop string; of those that end there the longest counts."""
    found = [(text.find(stop) + len(stop), -len(stop), stop) for stop in stops if stop in text]
    if not found:
        return text, None
    end, _, stop = min(found)
    return text[: end - len(stop)], stop


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


def answer_text(
    *, stop=(), stop_token_ids=(), output_tokens_min=0, log_tokens=False, tokenizer=BYTE_LEVEL
) -> AnswerText:
    return AnswerText(
        TextRules(
            TokenBytes(tokenizer),
            StopStrings(stop),
            frozenset(stop_token_ids),
            output_tokens_min,
            log_tokens,
        )
    )


def ids(text: str) -> list[int]:
    return BYTE_LEVEL.encode(text, add_special_tokens=False).ids


def test_a_stop_string_ends_an_answer_within_its_token() -> None:
    text = answer_text(stop=["pital of"])
    token_ids = ids("The capital of France")
    emitted = ""
    fed = 0
    stopped_after = None
    while stopped_after is None:
        delta = text.feed([token_ids[fed]])
        fed, emitted, stopped_after = fed + 1, emitted + delta.text, delta.stopped_after
    assert emitted == "The ca"
    assert stopped_after == fed < len(token_ids)


def test_stop_tokens_add_no_text_and_what_was_held_comes_at_the_end() -> None:
    end = BYTE_LEVEL.token_to_id("<|im_end|>")
    word = ids("dog")
    text = answer_text(stop=["Paris!"], stop_token_ids=[end, word[-1]])
    assert text.feed(ids("in Pari")).text == "in "
    assert text.feed([end]).text == ""
    assert text.feed([word[-1]]).text == ""
    assert text.finish().text == "Pari"


def test_stop_strings_count_only_behind_the_least_number_of_tokens() -> None:
    letter, space = ids("a")[0], ids(" ")[0]
    text = answer_text(stop=["a"], output_tokens_min=3)
    delta = text.feed([letter, space, letter, space, letter, space])
    assert (delta.text, delta.stopped_after) == ("a a ", 5)


def test_half_a_character_at_the_end_is_shown_as_missing() -> None:
    token_ids = [BYTE_LEVEL.token_to_id("ð"), BYTE_LEVEL.token_to_id("Ł")]
    text = answer_text(stop=["�!"])
    assert text.feed(token_ids).text == ""
    assert text.finish().text == BYTE_LEVEL.decode(token_ids) == "�"
