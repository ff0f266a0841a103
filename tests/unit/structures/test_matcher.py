"""Structured output: whatever is drawn from the masks is valid, and the state follows from the tokens."""

import json
import re
import string
from collections.abc import Iterator
from pathlib import Path

import jsonschema
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.models import smollm2_folder, tiny_folder
from tests.support.structures import allowed_ids, draw, matcher, tokenizer

from engine.sentence_piece_tokenizer import sentence_piece_tokenizer
from engine.tokenizer_file import SpecialTokens, Vocabulary
from policy.core import StructureKind
from structures.compiler import StructureCompiler
from structures.errors import StructureError
from structures.matcher import FORCED_TOKENS_MAX

pytestmark = pytest.mark.unit

END = 2
TINY_TOKENS, SMOLLM2_TOKENS = 512, 49_152
SEEDS = range(12)

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 1, "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "email": {"type": ["string", "null"], "pattern": "^[a-z]{1,8}@[a-z]{1,8}\\.(org|net)$"},
        "address": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "zip": {"type": "string", "pattern": "^[0-9]{5}$"}},
            "required": ["city", "zip"],
            "additionalProperties": False,
        },
    },
    "required": ["name", "age", "email", "address"],
    "additionalProperties": False,
}
SCHEMAS = {
    "nested": PERSON,
    "array": {"type": "array", "items": {"type": "integer"}, "minItems": 2, "maxItems": 4},
    "array of objects": {
        "type": "array",
        "items": {
            "type": "object",
            "properties": {"a": {"type": "boolean"}, "b": {"type": "number"}},
            "required": ["a"],
            "additionalProperties": False,
        },
        "maxItems": 3,
    },
    "enum": {"enum": ["red", 'a "quote"', "naïve ☃", 3, None, True, [1, "x"], {"k": "v"}]},
    "const": {"const": {"fixed": ["a", 1]}},
    "any of": {
        "anyOf": [{"type": "null"}, {"type": "string", "maxLength": 3}, {"$ref": "#/$defs/pair"}],
        "$defs": {
            "pair": {
                "type": "array",
                "prefixItems": [{"type": "integer"}, {"type": "string"}],
                "items": False,
                "minItems": 2,
            }
        },
    },
    "numbers": {
        "type": "object",
        "properties": {
            "i": {"type": "integer", "exclusiveMinimum": -3, "maximum": 12},
            "x": {"type": "number", "minimum": 0.5, "exclusiveMaximum": 2},
            "m": {"type": "integer", "multipleOf": 5, "minimum": 0, "maximum": 95},
        },
        "required": ["i", "x", "m"],
        "additionalProperties": False,
    },
    "recursive": {
        "$ref": "#/$defs/tree",
        "$defs": {
            "tree": {
                "type": "object",
                "properties": {
                    "leaf": {"type": "string", "maxLength": 2},
                    "children": {"type": "array", "maxItems": 2, "items": {"$ref": "#/$defs/tree"}},
                },
                "required": ["leaf"],
                "additionalProperties": False,
            }
        },
    },
    "open": {
        "type": "object",
        "properties": {"a": {"type": "string"}},
        "additionalProperties": {"type": "integer"},
    },
    "formats": {
        "type": "object",
        "properties": {
            "day": {"type": "string", "format": "date"},
            "id": {"type": "string", "format": "uuid"},
        },
        "required": ["day", "id"],
        "additionalProperties": False,
    },
}
REGEXES = [
    r"[0-9]{3}-[0-9]{4}",
    r"(yes|no|maybe)( or (yes|no))?",
    r"[A-ZÄÖÜ][a-zäöüß]{2,9}",
    r"\d{1,3}(\.\d{1,3}){3}",
    r"^#[0-9a-f]{6}$",
    r"(?i)hello, world[!?]",
    r"[^\x00-\x7f]{1,3}",
    r"(a|b)*a(a|b){5}",
]
CHOICES = ["yes", "no", "not sure", 'with "quotes" and \\', "new\nline", "naïve ☃", "no way"]
ARITHMETIC = """
start: sum
sum: product ("+" product)*
product: atom ("*" atom)*
atom: NUMBER | "(" sum ")"
NUMBER: /[1-9][0-9]{0,2}/
"""
GBNF = 'root ::= item ("," item)*\nitem ::= [a-c]+ | "<" root ">"\n'


@pytest.fixture(scope="module")
def tiny() -> Iterator[StructureCompiler]:
    compiler = StructureCompiler(tiny_folder(), TINY_TOKENS, (END,))
    yield compiler
    compiler.close()


@pytest.fixture(scope="module")
def smollm2() -> Iterator[StructureCompiler]:
    compiler = StructureCompiler(smollm2_folder(), SMOLLM2_TOKENS, (END, 0))
    yield compiler
    compiler.close()


def text_of(token_ids: list[int], folder: Path) -> str:
    """The answer without its end token."""
    assert token_ids[-1] in (END, 0), "did not end"
    return tokenizer(folder).decode(token_ids[:-1], skip_special_tokens=False)


@pytest.mark.parametrize("name", SCHEMAS)
def test_what_is_drawn_under_a_json_schema_is_valid(name: str, tiny: StructureCompiler) -> None:
    schema = SCHEMAS[name]
    jsonschema.Draft202012Validator.check_schema(schema)
    answers = set()
    for seed in SEEDS:
        start = matcher(tiny, StructureKind.JSON_SCHEMA, json.dumps(schema))
        text = text_of(draw(start, tiny_folder(), seed), tiny_folder())
        validator = jsonschema.Draft202012Validator(
            schema, format_checker=jsonschema.Draft202012Validator.FORMAT_CHECKER
        )
        validator.validate(json.loads(text))
        answers.add(text)
    assert len(answers) > 1 or name == "const"


@pytest.mark.parametrize("name", ["nested", "any of", "recursive"])
def test_so_it_is_with_a_large_vocabulary(name: str, smollm2: StructureCompiler) -> None:
    for seed in SEEDS[:3]:
        start = matcher(smollm2, StructureKind.JSON_SCHEMA, json.dumps(SCHEMAS[name]))
        text = text_of(draw(start, smollm2_folder(), seed), smollm2_folder())
        jsonschema.Draft202012Validator(SCHEMAS[name]).validate(json.loads(text))


def test_any_json_object(tiny: StructureCompiler) -> None:
    for seed in SEEDS:
        text = text_of(draw(matcher(tiny, StructureKind.JSON_OBJECT), tiny_folder(), seed), tiny_folder())
        assert isinstance(json.loads(text), dict)


@pytest.mark.parametrize("pattern", REGEXES)
def test_what_is_drawn_under_a_regex_matches_it(pattern: str, tiny: StructureCompiler) -> None:
    for seed in SEEDS:
        text = text_of(draw(matcher(tiny, StructureKind.REGEX, pattern), tiny_folder(), seed), tiny_folder())
        assert re.fullmatch(pattern, text), text


def test_every_choice_can_be_drawn_and_nothing_else(tiny: StructureCompiler) -> None:
    spec = json.dumps(CHOICES)
    texts = {
        text_of(draw(matcher(tiny, StructureKind.CHOICE, spec), tiny_folder(), seed), tiny_folder())
        for seed in range(80)
    }
    assert texts == set(CHOICES)


def test_many_choices(tiny: StructureCompiler) -> None:
    many = [f"choice number {number}" for number in range(3000)]
    text = text_of(
        draw(matcher(tiny, StructureKind.CHOICE, json.dumps(many)), tiny_folder(), 1), tiny_folder()
    )
    assert text in many


def test_a_grammar_in_lark(tiny: StructureCompiler) -> None:
    for seed in SEEDS:
        start = matcher(tiny, StructureKind.GRAMMAR, ARITHMETIC)
        text = text_of(draw(start, tiny_folder(), seed, closing=False), tiny_folder())
        assert re.fullmatch(r"[0-9+*()]+", text)
        assert isinstance(eval(text), int)


def test_a_grammar_in_gbnf(tiny: StructureCompiler) -> None:
    for seed in SEEDS:
        start = matcher(tiny, StructureKind.GRAMMAR, GBNF)
        text = text_of(draw(start, tiny_folder(), seed, closing=False), tiny_folder())
        while re.search(r"<[a-c]+(,[a-c]+)*>", text):
            text = re.sub(r"<[a-c]+(,[a-c]+)*>", "a", text)
        assert re.fullmatch(r"[a-c]+(,[a-c]+)*", text)


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 2**32), name=st.sampled_from(sorted(SCHEMAS)))
def test_replayed_at_any_cut_the_state_is_the_same(seed: int, name: str) -> None:
    text = json.dumps(SCHEMAS[name])
    token_ids = draw(matcher(SHARED, StructureKind.JSON_SCHEMA, text), tiny_folder(), seed)
    walked = matcher(SHARED, StructureKind.JSON_SCHEMA, text)
    for cut, token_id in enumerate(token_ids):
        replayed = matcher(SHARED, StructureKind.JSON_SCHEMA, text)
        replayed.replay(token_ids[:cut])
        assert replayed.forced() == walked.forced()
        assert np.array_equal(replayed.allowed(), walked.allowed())
        assert replayed.complete == walked.complete
        walked.accept(token_id)
    assert walked.ended


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 2**32), name=st.sampled_from(sorted(SCHEMAS)), large=st.booleans())
def test_forced_tokens_are_all_that_masks_would_have_allowed(seed: int, name: str, large: bool) -> None:
    compiler, folder = (SHARED_LARGE, smollm2_folder()) if large else (SHARED, tiny_folder())
    text = json.dumps(SCHEMAS[name])
    token_ids = draw(matcher(compiler, StructureKind.JSON_SCHEMA, text), folder, seed)
    walked, forced_tokens = matcher(compiler, StructureKind.JSON_SCHEMA, text), 0
    for cut, token_id in enumerate(token_ids):
        forced = walked.forced()
        jumped = matcher(compiler, StructureKind.JSON_SCHEMA, text)
        jumped.replay(token_ids[:cut])
        for forced_id in forced:
            allowed = allowed_ids(jumped.allowed())
            assert allowed == [forced_id] or set(allowed) == set(jumped_end(folder)) >= {forced_id}
            jumped.accept(forced_id)
        forced_tokens += bool(forced)
        walked.accept(token_id)
    assert forced_tokens, "no schema of these leaves everything open"


def jumped_end(folder: Path) -> tuple[int, ...]:
    return (END, 0) if folder == smollm2_folder() else (END,)


SHARED = StructureCompiler(tiny_folder(), TINY_TOKENS, (END,))
SHARED_LARGE = StructureCompiler(smollm2_folder(), SMOLLM2_TOKENS, (END, 0))


def test_an_end_token_is_allowed_exactly_where_the_text_is_complete(tiny: StructureCompiler) -> None:
    pattern = r"a(bc)*d?"
    for seed in SEEDS:
        state, token_ids = matcher(tiny, StructureKind.REGEX, pattern), []
        for token_id in draw(matcher(tiny, StructureKind.REGEX, pattern), tiny_folder(), seed):
            text = tokenizer(tiny_folder()).decode(token_ids)
            complete = re.fullmatch(pattern, text) is not None
            assert (END in allowed_ids(state.allowed())) == state.complete == complete
            state.accept(token_id)
            token_ids.append(token_id)
        assert state.ended
        assert not state.complete


def test_where_only_the_end_is_left_it_is_forced(tiny: StructureCompiler) -> None:
    state = matcher(tiny, StructureKind.CHOICE, '["a"]')
    state.accept(tokenizer(tiny_folder()).token_to_id("a"))
    assert state.complete
    assert state.forced() == (END,)
    assert allowed_ids(state.allowed()) == [END]
    state.accept(END)
    assert state.ended
    assert state.forced() == ()
    with pytest.raises(StructureError, match="the end"):
        state.accept(END)


def test_every_end_token_ends(smollm2: StructureCompiler) -> None:
    for end in (END, 0):
        state = matcher(smollm2, StructureKind.REGEX, "a*")
        assert {END, 0} <= set(allowed_ids(state.allowed()))
        state.accept(end)
        assert state.ended


def test_a_token_that_is_not_allowed_is_named_and_final(tiny: StructureCompiler) -> None:
    state = matcher(tiny, StructureKind.CHOICE, '["ab"]')
    with pytest.raises(StructureError, match="output token 1: token 104 is not allowed here"):
        state.replay([tokenizer(tiny_folder()).token_to_id("a") or 0, 104])
    assert state.failure is not None
    assert allowed_ids(state.allowed()) == []
    assert state.forced() == ()
    assert not state.complete


def test_ids_the_tokenizer_does_not_know_are_never_allowed() -> None:
    """A model's vocabulary is often padded."""
    compiler = StructureCompiler(tiny_folder(), TINY_TOKENS + 45, (END,))
    mask = matcher(compiler, StructureKind.REGEX, r"(?s:.)*").allowed()
    assert mask.dtype == np.int32
    assert mask.shape == (-(-(TINY_TOKENS + 45) // 32),)
    assert max(allowed_ids(mask)) < TINY_TOKENS
    assert len(allowed_ids(mask)) > TINY_TOKENS - 140
    compiler.close()


def test_tokens_the_model_has_no_logits_for_are_never_allowed() -> None:
    compiler = StructureCompiler(tiny_folder(), 300, (END,))
    state = matcher(compiler, StructureKind.REGEX, r"(?s:.)*")
    assert state.allowed().shape == (10,)
    assert max(allowed_ids(state.allowed())) < 300
    with pytest.raises(StructureError, match="no token of the model fits"):
        matcher(compiler, StructureKind.CHOICE, '["cdcdcd"]')  # "cd" is one of the others
    compiler.close()


def test_many_forced_tokens_come_in_portions(tiny: StructureCompiler) -> None:
    text = "xy" * FORCED_TOKENS_MAX
    state, told = matcher(tiny, StructureKind.CHOICE, json.dumps([text])), []
    while not state.ended:
        forced = state.forced()
        assert 0 < len(forced) <= FORCED_TOKENS_MAX
        state.replay(forced)
        told += forced
    assert text_of(told, tiny_folder()) == text


def test_whitespace_comes_to_an_end(tiny: StructureCompiler) -> None:
    state = matcher(tiny, StructureKind.JSON_SCHEMA, '{"type":"array","items":{"type":"null"},"maxItems":0}')
    blank = {tokenizer(tiny_folder()).token_to_id(text) for text in ("Ġ", "Ċ", "ĉ")}
    tokens = 0
    while not state.ended:
        allowed = allowed_ids(state.allowed())
        state.accept(next((token_id for token_id in allowed if token_id in blank), allowed[0]))
        tokens += 1
        assert tokens < 120


def sentence_piece_folder(folder: Path) -> tuple[Path, int]:
    """A tokenizer as Llama 2's and Mistral's: ▁ for spaces, bytes for what no piece spells."""
    special = SpecialTokens(bos=1, eos=2, unknown=0, padding=None)
    letters = [*string.printable[:94], "▁", "é"]
    merged = ["▁▁", "na", "me", "name", '"name', ':"', "▁:", "er", "age", "city", "▁c"]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *letters, *merged]
    vocabulary = Vocabulary(tokens, control_token_ids=(0, 1, 2), user_defined_token_ids=(), add_bos=True)
    normal_ids = range(259, len(tokens))
    scores = [-float(token_id) for token_id in range(len(tokens))]
    made = sentence_piece_tokenizer(vocabulary, scores, normal_ids, special, add_space_prefix=True)
    made.save(str(folder / "tokenizer.json"))
    return folder, len(tokens)


@pytest.mark.parametrize("name", ["nested", "enum", "any of", "recursive"])
def test_so_it_is_with_a_sentence_piece_tokenizer(name: str, tmp_path: Path) -> None:
    folder, tokens = sentence_piece_folder(tmp_path)
    compiler = StructureCompiler(folder, tokens, (END,))
    text = json.dumps(SCHEMAS[name])
    for seed in SEEDS:
        token_ids = draw(matcher(compiler, StructureKind.JSON_SCHEMA, text), folder, seed)
        answer = text_of(token_ids, folder)
        jsonschema.Draft202012Validator(SCHEMAS[name]).validate(json.loads(answer))
    compiler.close()


def test_forced_text_with_spaces_in_a_sentence_piece_tokenizer(tmp_path: Path) -> None:
    folder, tokens = sentence_piece_folder(tmp_path)
    compiler = StructureCompiler(folder, tokens, (END,))
    text = "a name,  é and ☃"
    state, told = matcher(compiler, StructureKind.CHOICE, json.dumps([text])), []
    while not state.ended:
        told += state.forced()
        state.replay(state.forced())
    assert text_of(told, folder) == text
    compiler.close()
