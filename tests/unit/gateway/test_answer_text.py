"""Tokens in, an answer's text out: stop strings, what is held back, and the tokens that the text is made of,
against the plain way for random tokens of two kinds of vocabulary."""

import codecs
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.gateway.model_files import byte_level_tokenizer, sentence_piece_tokenizer
from tests.unit.gateway.plain_text import cut_naively
from tokenizers import Tokenizer

from gateway.text.answer_text import AnswerText, TextRules
from gateway.text.detokenizer import Detokenizer, TokenBytes
from gateway.text.stop_matcher import StopMatcher, StopStrings
from policy.core import TokenLogprobs

pytestmark = pytest.mark.unit

BYTE_LEVEL = byte_level_tokenizer()
SENTENCE_PIECE = sentence_piece_tokenizer()
TABLES = {tokenizer: TokenBytes(tokenizer) for tokenizer in (BYTE_LEVEL, SENTENCE_PIECE)}
BYTE_LEVEL_IDS = st.integers(0, BYTE_LEVEL.get_vocab_size() + 3)


def answer_text(
    *, stop=(), stop_token_ids=(), output_tokens_min=0, log_tokens=False, tokenizer=BYTE_LEVEL
) -> AnswerText:
    return AnswerText(
        TextRules(
            TABLES[tokenizer],
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


# --- whole answers, against a plain reference --------------------------------------------------------------

SENTENCE_PIECE_IDS = st.integers(0, SENTENCE_PIECE.get_vocab_size() + 2)
SNIPPETS = st.sampled_from(
    [
        "👩‍👩‍👧🙂",
        "e\u0301a\u0308o\u0323\u0304",
        "你好世界",
        "こんにちは",
        "한국어",
        "🇫🇷🇩🇪",
        "\u200d\ufe0f",
        "�",
        "END",
        " \n\n",
        "aab",
    ]
) | st.text(st.characters(exclude_categories=["Cs"]), max_size=6)


@st.composite
def token_streams(draw) -> tuple[Tokenizer, list[int]]:
    """Random tokens between tokens that spell something; of either kind of vocabulary."""
    tokenizer, any_id = draw(
        st.sampled_from([(BYTE_LEVEL, BYTE_LEVEL_IDS), (SENTENCE_PIECE, SENTENCE_PIECE_IDS)])
    )
    token_ids: list[int] = []
    for part in draw(st.lists(SNIPPETS | st.lists(any_id, max_size=5), max_size=8)):
        if isinstance(part, str):
            token_ids += tokenizer.encode(part.replace(" ", "▁"), add_special_tokens=False).ids
        else:
            token_ids += part
    return tokenizer, token_ids


def bytes_of(tokenizer: Tokenizer, token_ids: list[int]) -> bytes:
    return b"".join(map(TABLES[tokenizer].of, token_ids))


def fed_in_pieces(
    text: AnswerText, token_ids: list[int], cuts: list[int], logprobs=()
) -> "tuple[list, int | None]":
    """All deltas, and after how many tokens a stop string ended them."""
    deltas, fed = [], 0
    while fed < len(token_ids):
        end = min(len(token_ids), fed + (cuts.pop() if cuts else 1))
        deltas.append(text.feed(token_ids[fed:end], logprobs[fed:end]))
        if deltas[-1].stopped_after is not None:
            return deltas, deltas[-1].stopped_after
        fed = end
    return [*deltas, text.finish()], None


CUTS = st.lists(st.integers(1, 5), max_size=20)


@st.composite
def streams_and_stops(draw) -> tuple[Tokenizer, list[int], list[str]]:
    """Stop strings that often are there, across the borders of tokens too, or nearly."""
    tokenizer, token_ids = draw(token_streams())
    text = bytes_of(tokenizer, token_ids).decode("utf-8", "replace")
    stops = draw(st.lists(SNIPPETS.filter(bool), max_size=2))
    for _ in range(draw(st.integers(0, 3)) if text else 0):
        begin = draw(st.integers(0, len(text) - 1))
        piece = text[begin : begin + draw(st.integers(1, 6))]
        stops.append(piece[:-1] + "≠" if draw(st.booleans()) else piece)
    return tokenizer, token_ids, stops


@settings(max_examples=200)
@given(streams_and_stops(), CUTS)
def test_deltas_joined_are_the_whole_text_up_to_the_first_stop(stream, cuts) -> None:
    tokenizer, token_ids, stops = stream
    whole = bytes_of(tokenizer, token_ids).decode("utf-8", "replace")
    expected, matched = cut_naively(whole, stops)
    deltas, stopped_after = fed_in_pieces(answer_text(stop=stops, tokenizer=tokenizer), token_ids, cuts)
    assert "".join(delta.text for delta in deltas) == expected
    if stopped_after is not None:
        # It is there for certain with these tokens, and was not with one less.
        assert cut_naively(certain_text(tokenizer, token_ids[:stopped_after]), stops) == (expected, matched)
        assert cut_naively(certain_text(tokenizer, token_ids[: stopped_after - 1]), stops)[1] is None


def certain_text(tokenizer: Tokenizer, token_ids: list[int]) -> str:
    """Without a character that has only begun."""
    return codecs.getincrementaldecoder("utf-8")("replace").decode(bytes_of(tokenizer, token_ids))


@given(streams_and_stops(), CUTS)
def test_nothing_of_a_stop_string_is_ever_shown_and_no_other_text_is_late(stream, cuts) -> None:
    """At every moment what was shown is the text so far but for the longest end of it that may begin a stop
    string."""
    tokenizer, token_ids, stops = stream
    text = answer_text(stop=stops, tokenizer=tokenizer)
    shown = ""
    for count, token_id in enumerate(token_ids, 1):
        delta = text.feed([token_id])
        shown += delta.text
        so_far = certain_text(tokenizer, token_ids[:count])
        if delta.stopped_after is not None:
            break
        held = [
            chars
            for chars in range(1, len(so_far) + 1)
            if any(stop.startswith(so_far[-chars:]) and len(stop) > chars for stop in stops)
        ]
        assert shown == so_far[: len(so_far) - max(held, default=0)]


def test_regular_expression_characters_are_plain_stop_characters() -> None:
    for stop in ("]", "^", "-", "\\", "[", ".", "a-z]", "^]"):
        deltas, stopped_after = fed_in_pieces(answer_text(stop=[stop]), ids(f"bcd{stop}x"), [])
        assert "".join(delta.text for delta in deltas) == "bcd"
        assert stopped_after is not None


@settings(max_examples=200)
@given(streams_and_stops(), CUTS)
def test_logged_tokens_are_those_of_the_text(stream, cuts) -> None:
    """Each token of whose bytes any is in the text sent, once, in order; with the text that completes it."""
    tokenizer, token_ids, stops = stream
    table = TABLES[tokenizer]
    logprobs = [TokenLogprobs(-float(number)) for number in range(len(token_ids))]
    text = answer_text(stop=stops, tokenizer=tokenizer, log_tokens=True)
    deltas, _ = fed_in_pieces(text, token_ids, cuts, logprobs)
    shown = "".join(delta.text for delta in deltas)
    logged = [token for delta in deltas for token in delta.logged]
    offsets, character = characters_of(b"".join(map(table.of, token_ids)))
    begin = 0
    expected = []
    for number, token_id in enumerate(token_ids):
        spelled = table.of(token_id)
        if spelled and offsets[begin] < len(shown):
            expected.append((token_id, -float(number), offsets[begin]))
        begin += len(spelled)
    assert [(t.token_id, t.logprobs.token_logprob, t.offset_chars) for t in logged] == expected
    assert character == len(b"".join(map(table.of, token_ids)).decode("utf-8", "replace"))
    sent = 0
    for delta in deltas[:-1]:
        sent += len(delta.text)
        assert all(token.offset_chars < sent for token in delta.logged)


def characters_of(spelled: bytes) -> tuple[list[int], int]:
    """For each byte the number of the character it belongs to, and how many characters there are; decoded
    byte by byte, the slow way."""
    offsets: list[int] = []
    done = 0
    waiting: list[int] = []
    for position in range(len(spelled)):
        waiting.append(position)
        # The characters that are certain once this byte is known, whatever follows.
        certain = len(codecs.getincrementaldecoder("utf-8")("replace").decode(spelled[: position + 1]))
        pending = codecs.getincrementaldecoder("utf-8")("replace")
        pending.decode(spelled[: position + 1])
        begun = len(pending.getstate()[0])
        whole = len(waiting) - begun
        characters = certain - done
        # One new character takes all of them; where there are two, the last byte is the second.
        places = [0] * whole if characters <= 1 else [0] * (whole - 1) + [1]
        offsets += [done + place for place in places]
        waiting = waiting[whole:]
        done = certain
    return offsets + [done] * len(waiting), done + (1 if waiting else 0)


def test_a_token_that_a_stop_string_cuts_through_is_logged_and_those_behind_it_are_not() -> None:
    token_ids = ids("The capital of France")
    text = answer_text(stop=["pital of"], log_tokens=True)
    deltas, stopped_after = fed_in_pieces(text, token_ids, [], [None] * len(token_ids))
    shown = "".join(delta.text for delta in deltas)
    logged = [token.token_id for delta in deltas for token in delta.logged]
    assert shown == "The ca"
    assert logged == token_ids[: len(logged)]
    assert BYTE_LEVEL.decode(logged).startswith(shown)
    assert len(BYTE_LEVEL.decode(logged[:-1])) < len(shown)
    assert len(logged) < stopped_after


def test_special_tokens_that_are_kept_are_text() -> None:
    end = BYTE_LEVEL.token_to_id("<|im_end|>")
    kept = TokenBytes(BYTE_LEVEL, keep_special=True)
    assert Detokenizer(kept).feed([*ids("a"), end]) == "a<|im_end|>"
    assert Detokenizer(TokenBytes(BYTE_LEVEL)).feed([*ids("a"), end]) == "a"


def test_a_character_costs_little_where_no_stop_string_begins() -> None:
    """Passed over at once, however many strings there are: measured against one string that is begun
    everywhere, in time of this process."""
    text = "the quick brown fox " * 500

    def cpu_s(stops: list[str]) -> float:
        best = float("inf")
        for _ in range(5):
            matcher = StopMatcher(StopStrings(stops))
            began_s = time.process_time()
            matcher.feed(text)
            best = min(best, time.process_time() - began_s)
        return best

    assert cpu_s([f"#{number}" for number in range(16)]) * 10 < cpu_s(
        ["the quick red", "fox jumps", "brown dog"]
    )
