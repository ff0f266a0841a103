"""Answers that have a form or call a tool, as the model decides: what the grammar lets through, by what holds
answers to it."""

import json
from collections.abc import Callable, Iterator

import msgspec
import pytest
from tests.unit.gateway.model_files import byte_level_tokenizer

from gateway.api.api_errors import ApiError
from gateway.api.request_body import decode_chat
from gateway.api.tools import ToolUse, tool_use_of
from gateway.text.call_layouts import ToolFormat
from gateway.text.tool_calls import joined
from gateway.tool_parsers import tool_parser
from policy.core import StructureKind, StructureSpec
from structures.compiler import StructureCompiler
from structures.errors import StructureError
from structures.grammar import GRAMMAR_BYTES_MAX

pytestmark = pytest.mark.unit

PLACE = {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}
ROUTE = {
    "type": "object",
    "properties": {"end": {"$ref": "#/$defs/place"}},
    "required": ["end"],
    "additionalProperties": False,
    "$defs": {"place": PLACE},
}
FORM = {
    "type": "object",
    "properties": {"answer": {"$ref": "#/$defs/place"}},
    "required": ["answer"],
    "additionalProperties": False,
    "$defs": {"place": {"type": "string"}},
}
TOOLS = [
    {"type": "function", "function": {"name": "now"}},
    {"type": "function", "function": {"name": "find_route", "parameters": ROUTE}},
]
RESPONSE_FORMAT = {"type": "json_schema", "json_schema": {"name": "answer", "schema": FORM}}
HERMES, LLAMA = ToolFormat.HERMES, ToolFormat.LLAMA3_JSON

Allowed = Callable[[StructureSpec, str], bool]


@pytest.fixture(scope="module")
def allowed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Allowed]:
    """Whether a text is a whole answer that a structure allows."""
    folder = tmp_path_factory.mktemp("model")
    tokenizer = byte_level_tokenizer()
    tokenizer.save(str(folder / "tokenizer.json"))
    end = tokenizer.token_to_id("<|im_end|>")
    compiler = StructureCompiler(folder, tokenizer.get_vocab_size(), (end,))

    def check(spec: StructureSpec, text: str) -> bool:
        matcher = compiler.compile(spec).result(timeout=30).matcher()
        try:
            matcher.replay(tokenizer.encode(text, add_special_tokens=False).ids)
        except StructureError:
            return False
        return matcher.complete

    yield check
    compiler.close()


def use_of(tool_format: ToolFormat, **parameters: object) -> ToolUse:
    body = {
        "model": "tiny",
        "messages": [{"role": "user", "content": "x"}],
        "tools": TOOLS,
        "response_format": RESPONSE_FORMAT,
        **parameters,
    }
    use = tool_use_of(decode_chat(msgspec.json.encode(body)), tool_format)
    assert use is not None
    return use


def spec_of(use: ToolUse) -> StructureSpec:
    assert use.structure is not None
    assert use.structure.spec.kind is StructureKind.GRAMMAR
    return use.structure.spec


def written(tool_format: ToolFormat, name: str, arguments: object) -> str:
    key = "arguments" if tool_format is HERMES else "parameters"
    call = json.dumps({"name": name, key: arguments})
    return f"<tool_call>\n{call}\n</tool_call>" if tool_format is HERMES else call


@pytest.mark.parametrize("tool_format", [HERMES, LLAMA])
def test_an_answer_has_the_form_or_calls(allowed: Allowed, tool_format: ToolFormat) -> None:
    use = use_of(tool_format)
    assert use.structure is not None
    assert use.structure.param == "response_format.json_schema.schema"
    spec = spec_of(use)
    route = written(tool_format, "find_route", {"end": {"name": "Rome"}})
    two = route + ("\n" if tool_format is HERMES else "; ") + written(tool_format, "now", {})
    for text, calls in ((route, 1), (two, 2), ('{"answer": "x"}', 0), ('{\n  "answer": "x"\n}', 0)):
        assert allowed(spec, text), text
        parser = tool_parser(use, tool_format)
        said = joined([*parser.feed(text), *parser.finish()])
        assert len(said.calls) == calls
        assert said.content == ("" if calls else text)
    for text in (
        "hello",
        '{"answer": 1}',
        '{"other": "x"}',
        f"so: {route}",
        f'{route}{{"answer": "x"}}',
        written(tool_format, "find_route", {"end": {"name": 1}}),
        written(tool_format, "find_route", {}),
        written(tool_format, "other", {}),
    ):
        assert not allowed(spec, text), text


def test_at_most_one_call_where_no_more_are_wanted(allowed: Allowed) -> None:
    spec = spec_of(use_of(HERMES, parallel_tool_calls=False))
    call = written(HERMES, "now", {})
    assert allowed(spec, call)
    assert not allowed(spec, f"{call}\n{call}")


def test_any_object_is_a_form_too(allowed: Allowed) -> None:
    spec = spec_of(use_of(HERMES, response_format={"type": "json_object"}))
    assert allowed(spec, '{"a": [1]}')
    assert allowed(spec, written(HERMES, "now", {}))
    assert not allowed(spec, "[1]")


@pytest.mark.parametrize(
    ("tool_format", "parameters", "param"),
    [
        (ToolFormat.MISTRAL, {}, "response_format.json_schema.schema"),
        (HERMES, {"response_format": None, "guided_regex": "a"}, "guided_regex"),
        (HERMES, {"response_format": None, "guided_json": [1]}, "guided_json"),
        (
            HERMES,
            {"response_format": None, "guided_json": {"title": "t" * GRAMMAR_BYTES_MAX}},
            "guided_json",
        ),
    ],
)
def test_what_cannot_be_both_is_refused(
    tool_format: ToolFormat, parameters: dict[str, object], param: str
) -> None:
    with pytest.raises(ApiError) as caught:
        use_of(tool_format, **parameters)
    assert (caught.value.kind.status, caught.value.param) == (400, param)


@pytest.mark.parametrize("depth", [100, 200, 300, 400, 450])
def test_how_deep_a_form_is_nested_is_for_compiling_to_say(depth: int) -> None:
    schema: dict[str, object] = {"type": "string", "format": "path"}
    for _ in range(depth):
        schema = {"anyOf": [schema]}
    text = spec_of(use_of(HERMES, response_format=None, guided_json=schema)).text
    assert text.count('{"anyOf": ') > depth
    assert "path" not in text
