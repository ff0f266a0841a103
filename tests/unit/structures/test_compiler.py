"""Specs from clients: each error says what is wrong, nothing takes the process down or fills its memory."""

import json
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from llguidance import LLParserLimits
from tests.support.models import smollm2_folder, tiny_folder
from tests.support.structure_specs import BAD, GOOD
from tests.support.structures import COMPILE_S_MAX, allowed_ids, matcher

from policy.core import STRUCTURE_BYTES_MAX, StructureKind, StructureSpec
from structures import compile_queue, grammar
from structures import compiler as structure_compiler
from structures import matcher as structured
from structures.compiler import StructureChecker, StructureCompiler
from structures.errors import StructureBusyError, StructureError
from structures.explanation import DETAIL_CHARS_MAX
from structures.grammar import FORMATS, GRAMMAR_BYTES_MAX, REGEX_BYTES_MAX, without_unknown_formats
from structures.matcher import CompiledStructure, Matcher

pytestmark = pytest.mark.unit

END = 2
TINY_TOKENS = 512


@pytest.fixture(scope="module")
def compiler() -> Iterator[StructureCompiler]:
    compiler = StructureCompiler(tiny_folder(), TINY_TOKENS, (END,))
    yield compiler
    compiler.close()


def compiled(compiler: StructureCompiler, kind: StructureKind, text: str) -> CompiledStructure:
    return compiler.compile(StructureSpec(kind, text)).result(COMPILE_S_MAX)


@pytest.mark.parametrize(("kind", "text", "reason"), BAD)
def test_a_spec_that_cannot_be_met_says_why(
    kind: StructureKind, text: str, reason: str, compiler: StructureCompiler
) -> None:
    for _ in range(2):  # the second time from memory
        with pytest.raises(StructureError) as caught:
            compiled(compiler, kind, text)
        assert reason in str(caught.value)
        assert 0 < len(str(caught.value)) <= DETAIL_CHARS_MAX + 100


def test_a_format_that_nobody_knows_is_a_remark() -> None:
    path = {"type": "string", "format": "path", "enum": [{"format": "path"}]}
    schema = {"properties": {"format": path, "at": {"format": "date"}}, "anyOf": [{"format": "color"}]}
    assert without_unknown_formats(schema) == {
        "properties": {
            "format": {"type": "string", "enum": [{"format": "path"}]},
            "at": {"format": "date"},
        },
        "anyOf": [{}],
    }


@pytest.mark.parametrize("keyword", ["properties", "patternProperties", "$defs", "definitions"])
@pytest.mark.parametrize("name", ["const", "default", "enum", "examples", "format", "properties"])
def test_a_name_that_reads_like_a_keyword_is_a_name(keyword: str, name: str) -> None:
    schema = {keyword: {name: {"type": "string", "format": "path"}}, "default": {"format": "path"}}
    assert without_unknown_formats(schema) == {
        keyword: {name: {"type": "string"}},
        "default": {"format": "path"},
    }
    assert schema[keyword] == {name: {"type": "string", "format": "path"}}, "what was given is left as it was"


def test_no_schema_is_too_deep_for_remarks() -> None:
    deep: dict[str, object] = {"format": "path"}
    for _ in range(5_000):
        deep = {"anyOf": [deep]}
    kept: object = without_unknown_formats(deep)
    depth = 0
    while kept:
        assert isinstance(kept, dict)
        (kept,) = kept["anyOf"]
        depth += 1
    assert depth == 5_000


@pytest.mark.parametrize("form", sorted(FORMATS))
def test_formats_that_are_known_compile(form: str, compiler: StructureCompiler) -> None:
    compiled(compiler, StructureKind.JSON_SCHEMA, f'{{"type": "string", "format": "{form}"}}')


def test_an_unknown_format_compiles(compiler: StructureCompiler) -> None:
    compiled(compiler, StructureKind.JSON_SCHEMA, '{"type": "string", "format": "path"}')


def test_a_long_text_is_refused_before_anything_is_done(compiler: StructureCompiler) -> None:
    for kind, bytes_max in (
        (StructureKind.JSON_SCHEMA, STRUCTURE_BYTES_MAX),
        (StructureKind.CHOICE, STRUCTURE_BYTES_MAX),
        (StructureKind.REGEX, REGEX_BYTES_MAX),
        (StructureKind.GRAMMAR, GRAMMAR_BYTES_MAX),
    ):
        with pytest.raises(StructureError, match=f"{bytes_max + 1} bytes, must have at most {bytes_max}"):
            compiled(compiler, kind, "a" * (bytes_max + 1))


def chain_of_rules(links: int) -> str:
    return "\n".join(["start: r0", *(f"r{i}:r{i + 1}" for i in range(links)), f'r{links}: "a"'])


def chain_of_references(links: int) -> str:
    chain = {str(i): {"items": {"$ref": f"#/d/{i + 1}"}} for i in range(links)}
    return json.dumps({"$ref": "#/d/0", "d": {**chain, str(links): {"type": "null"}}}, separators=(",", ":"))


@pytest.mark.parametrize(
    ("kind", "text", "bytes_max"),
    [
        (StructureKind.GRAMMAR, chain_of_rules(1_500), GRAMMAR_BYTES_MAX),
        (StructureKind.JSON_SCHEMA, chain_of_references(1_800), STRUCTURE_BYTES_MAX),
    ],
    ids=["rules", "references"],
)
def test_no_chain_of_rules_overflows_the_stack(
    kind: StructureKind, text: str, bytes_max: int, compiler: StructureCompiler
) -> None:
    """The usual stack of 8 MiB is too small for one of them."""
    assert bytes_max * 0.9 < len(text) <= bytes_max
    state = compiled(compiler, kind, text).matcher()
    for seed in range(20):
        state.accept(allowed_ids(state.allowed())[seed % 2 - 1])
        assert state.failure is None
        if state.ended:
            break


@pytest.mark.parametrize("large", [False, True], ids=["tiny", "smollm2"])
def test_a_checker_takes_what_a_compiler_takes_and_refuses_the_rest_in_the_same_words(large: bool) -> None:
    """What the gateway lets through an instance holds answers to."""
    model = (smollm2_folder(), 49_152, (END, 0)) if large else (tiny_folder(), TINY_TOKENS, (END,))
    compiler, checker = StructureCompiler(*model), StructureChecker(*model)
    specs = [*GOOD, *((kind, text) for kind, text, _ in BAD)]
    outcomes = []
    for kind, text in specs:
        spec = StructureSpec(kind, text)
        failure = compiler.compile(spec).exception(COMPILE_S_MAX)
        for _ in range(2):  # the second time from memory
            assert repr(checker.compile(spec).exception(COMPILE_S_MAX)) == repr(failure), text[:100]
        outcomes.append(failure is None)
    assert outcomes == [True] * len(GOOD) + [False] * len(BAD)
    compiler.close()
    checker.close()


def test_a_checker_forgets_the_least_recently_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(structure_compiler, "CHECKED_MAX", 2)
    seen = []

    def counting(spec: StructureSpec) -> str:
        seen.append(spec.text)
        return grammar.grammar_of(spec)

    monkeypatch.setattr(structure_compiler, "grammar_of", counting)
    checker = StructureChecker(tiny_folder(), TINY_TOKENS, (END,))
    for text in ('["0"]', "no JSON", '["0"]', '["2"]', '["0"]', "no JSON"):
        checker.compile(StructureSpec(StructureKind.CHOICE, text)).exception(COMPILE_S_MAX)
    assert seen == ['["0"]', "no JSON", '["2"]', "no JSON"]
    checker.close()


def test_one_compile_for_all_who_ask_and_all_are_told(compiler: StructureCompiler) -> None:
    spec = StructureSpec(StructureKind.CHOICE, '["asked for by many"]')
    futures = [compiler.compile(spec) for _ in range(50)]
    structures = {id(future.result(COMPILE_S_MAX)) for future in futures}
    assert len(structures) == 1


def test_answers_of_one_structure_do_not_touch_each_other(compiler: StructureCompiler) -> None:
    structure = compiled(compiler, StructureKind.CHOICE, '["ab", "ba"]')
    one, other = structure.matcher(), structure.matcher()
    before = other.allowed().copy()
    one.accept(allowed_ids(before)[0])
    assert (other.allowed() == before).all()
    assert (structure.matcher().allowed() == before).all()


def test_what_is_remembered_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(structure_compiler, "COMPILED_MAX", 2)
    compiler = StructureCompiler(tiny_folder(), TINY_TOKENS, (END,))
    first = compiled(compiler, StructureKind.CHOICE, '["0"]')
    second = compiled(compiler, StructureKind.CHOICE, '["1"]')
    assert compiled(compiler, StructureKind.CHOICE, '["0"]') is first
    compiled(compiler, StructureKind.CHOICE, '["2"]')
    assert compiled(compiler, StructureKind.CHOICE, '["0"]') is first
    assert compiled(compiler, StructureKind.CHOICE, '["1"]') is not second
    compiler.close()


def test_what_waits_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compile_queue, "WAITING_MAX", 2)
    compiler = StructureCompiler(tiny_folder(), TINY_TOKENS, (END,))
    entered, go_on = threading.Event(), threading.Event()

    def slow(spec: StructureSpec) -> str:
        entered.set()
        assert go_on.wait(COMPILE_S_MAX)
        return grammar.grammar_of(spec)

    monkeypatch.setattr(structure_compiler, "grammar_of", slow)
    specs = [StructureSpec(StructureKind.CHOICE, json.dumps([str(i)])) for i in range(3)]
    futures = [compiler.compile(spec) for spec in specs[:2]]
    assert entered.wait(COMPILE_S_MAX)
    with pytest.raises(StructureBusyError, match="2 structures"):
        compiler.compile(specs[2])
    assert compiler.compile(specs[0]) is futures[0]
    go_on.set()
    for future in futures:
        future.result(COMPILE_S_MAX)
    compiler.compile(specs[2]).result(COMPILE_S_MAX)
    compiler.close()


@pytest.mark.parametrize("content", [None, "{}", "no JSON"])
def test_a_folder_without_a_usable_tokenizer(content: str | None, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / "tokenizer.json").write_text(content)
    compiler = StructureCompiler(tmp_path, TINY_TOKENS, (END,))
    with pytest.raises(StructureError, match=f"tokenizer.json of {tmp_path.name} cannot be used"):
        compiled(compiler, StructureKind.REGEX, "a")
    compiler.close()


def test_a_model_without_end_tokens() -> None:
    compiler = StructureCompiler(tiny_folder(), TINY_TOKENS, ())
    with pytest.raises(StructureError, match="no end token"):
        matcher(compiler, StructureKind.REGEX, "a")
    compiler.close()


WORDS = r"[a-z]{1,30}(x|y)[a-z]{10}[0-9]{1,20}"
"""Every answer to it shows the lexer something new."""


def walk(structure: CompiledStructure, seed: int) -> Matcher:
    """An answer, up to its end or a failure."""
    state, generator = structure.matcher(), np.random.default_rng(seed)
    while not state.ended:
        allowed = allowed_ids(state.allowed())
        if state.failure is not None:
            break
        state.accept(int(generator.choice(allowed)))
    return state


def test_what_many_answers_have_filled_together_is_compiled_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """No answer is refused for what others have seen; one that fills the lexer by itself is."""
    limits = LLParserLimits(max_lexer_states=400, verbose_errors=False)
    monkeypatch.setattr(structure_compiler, "_LIMITS", limits)
    compiler = StructureCompiler(tiny_folder(), TINY_TOKENS, (END,))
    first = compiled(compiler, StructureKind.REGEX, WORDS)
    states = []
    while not states or states[-1].failure is None:
        assert compiled(compiler, StructureKind.REGEX, WORDS) is first
        states.append(walk(first, len(states)))
    assert len(states) > 2
    assert "states" in states[-1].failure
    assert not states[-1].failed_alone
    second = compiled(compiler, StructureKind.REGEX, WORDS)
    assert second is not first
    assert walk(second, len(states) - 1).ended
    greedy = walk(compiled(compiler, StructureKind.REGEX, r"([a-z]{1,200}x[a-z]{200}){5}"), 0)
    assert greedy.failure is not None
    assert greedy.failed_alone
    compiler.close()


def test_after_so_many_answers_it_is_compiled_anew(
    compiler: StructureCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(structured, "ANSWERS_PER_LEXER_MAX", 3)
    structures = []
    for _ in range(7):
        structures.append(compiled(compiler, StructureKind.CHOICE, '["used often"]'))
        structures[-1].matcher()
    assert [structures.index(one) for one in structures] == [0, 0, 0, 3, 3, 3, 6]
