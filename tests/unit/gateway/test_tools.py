"""What a request may ask of tools, and the form that a forced call is held to."""

import json

import jsonschema
import msgspec
import pytest
from tests.unit.gateway.model_files import byte_level_tokenizer

from gateway.api.api_errors import ApiError
from gateway.api.parameter_limits import TOOL_DESCRIPTION_CHARS_MAX, TOOLS_MAX
from gateway.api.request_body import decode_chat
from gateway.api.tool_schema import FORCED_CALLS_MAX, SCHEMA_DEPTH_MAX
from gateway.api.tools import NO_PARAMETERS, ToolChoice, ToolUse, offered, tool_use_of
from policy.core import STRUCTURE_BYTES_MAX, StructureKind
from structures.compiler import StructureCompiler
from structures.errors import StructureError

pytestmark = pytest.mark.unit

CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TREE = {
    "type": "object",
    "properties": {"root": {"$ref": "#/$defs/node"}, "again": {"$ref": "#"}},
    "required": ["root"],
    "additionalProperties": False,
    "$defs": {
        "node": {
            "type": "object",
            "properties": {"leaf": {"const": "yes"}, "below": {"$ref": "#/$defs/node"}},
            "additionalProperties": False,
        }
    },
}


def function(name: str = "get_weather", **fields: object) -> dict[str, object]:
    return {"type": "function", "function": {"name": name, **fields}}


def use_of(**parameters: object) -> ToolUse | None:
    body = {"model": "tiny", "messages": [{"role": "user", "content": "x"}], **parameters}
    return tool_use_of(decode_chat(msgspec.json.encode(body)))


def refused(**parameters: object) -> ApiError:
    with pytest.raises(ApiError) as caught:
        use_of(**parameters)
    assert caught.value.kind.status == 400
    return caught.value


def named(name: str) -> dict[str, object]:
    return {"type": "function", "function": {"name": name}}


@pytest.mark.parametrize(
    "parameters",
    [
        {},
        {"tools": []},
        {"tools": None, "tool_choice": "none"},
        {"tool_choice": "auto", "parallel_tool_calls": False},
        {"tools": [function()], "tool_choice": "none"},
    ],
)
def test_without_tools_or_where_none_may_be_called_there_is_nothing(parameters: dict[str, object]) -> None:
    assert use_of(**parameters) is None


def test_tools_are_kept_in_order_as_templates_read_them() -> None:
    described = function("a", description="Does a.", parameters=CITY, strict=True)
    use = use_of(tools=[described, function("b-2_C")], tool_choice="auto")
    assert use is not None
    assert (use.choice, use.named, use.parallel, use.structure) == (ToolChoice.AUTO, None, True, None)
    assert use.names == {"a", "b-2_C"}
    assert use.template_tools == [
        function("a", description="Does a.", parameters=CITY),
        function("b-2_C", parameters=json.loads(NO_PARAMETERS)),
    ]
    assert use_of(tools=[function("a", parameters=None)]) == use_of(tools=[function("a")])


def test_tools_that_are_merely_offered() -> None:
    request = decode_chat(
        msgspec.json.encode(
            {
                "model": "tiny",
                "messages": [{"role": "user", "content": "x"}],
                "tools": [function("a")],
                "tool_choice": "none",
            }
        )
    )
    assert offered(request.tools) == use_of(tools=[function("a")])
    assert offered([]) is None


def test_a_named_function_holds_the_answer_to_its_parameters() -> None:
    use = use_of(tools=[function("a"), function("b", parameters=CITY)], tool_choice=named("b"))
    assert use is not None
    assert (use.choice, use.named) == (ToolChoice.NAMED, "b")
    assert use.structure is not None
    assert use.structure.param == "tools[1].function.parameters"
    assert use.structure.spec.kind is StructureKind.JSON_SCHEMA
    assert json.loads(use.structure.spec.text) == CITY


@pytest.mark.parametrize(
    ("parallel", "calls_max"), [(True, FORCED_CALLS_MAX), (None, FORCED_CALLS_MAX), (False, 1)]
)
def test_required_holds_the_answer_to_a_list_of_calls(parallel: bool | None, calls_max: int) -> None:
    tools = [function("weather", parameters=CITY), function("grow", parameters=TREE), function("now")]
    use = use_of(tools=tools, tool_choice="required", parallel_tool_calls=parallel)
    assert use is not None
    assert use.structure is not None
    assert use.structure.param == "tools"
    schema = json.loads(use.structure.spec.text)
    validator = jsonschema.Draft202012Validator(schema)
    tree = {"root": {"below": {"leaf": "yes"}}, "again": {"root": {}}}
    good = [
        {"name": "weather", "arguments": {"city": "Paris"}},
        {"name": "grow", "arguments": tree},
        {"name": "now", "arguments": {}},
    ]
    for call in good:
        validator.validate([call])
    assert validator.is_valid([good[0]] * calls_max)
    assert not validator.is_valid([good[0]] * (calls_max + 1))
    for bad in (
        [],
        good[0],
        [{"name": "other", "arguments": {}}],
        [{"name": "weather", "arguments": {}}],
        [{"name": "weather", "arguments": tree}],
        [{"name": "grow", "arguments": {"root": {"leaf": "no"}}}],
        [{"name": "grow", "arguments": {"root": {}, "again": {"root": 1}}}],
        [{"name": "now", "arguments": {}, "more": 1}],
        [{"name": "now"}],
    ):
        assert not validator.is_valid(bad), bad


def test_references_are_followed_where_the_answer_is_held_to_them(tmp_path) -> None:
    """By what instances hold answers with, which finds references its own way."""
    use = use_of(tools=[function("now"), function("grow", parameters=TREE)], tool_choice="required")
    assert use is not None
    assert use.structure is not None
    tokenizer = byte_level_tokenizer()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    end = tokenizer.token_to_id("<|im_end|>")
    compiler = StructureCompiler(tmp_path, tokenizer.get_vocab_size(), (end,))
    try:
        compiled = compiler.compile(use.structure.spec).result(timeout=30)
    finally:
        compiler.close()

    def held(arguments: object) -> None:
        call = json.dumps([{"name": "grow", "arguments": arguments}])
        matcher = compiled.matcher()
        matcher.replay(tokenizer.encode(call, add_special_tokens=False).ids)
        assert matcher.complete

    held({"root": {"below": {"leaf": "yes"}}, "again": {"root": {}}})
    for wrong in (
        {"root": {"leaf": "no"}},
        {"root": {"below": {"lead": 1}}},
        {"root": {}, "again": {"x": 1}},
    ):
        with pytest.raises(StructureError):
            held(wrong)


def test_data_that_looks_like_a_reference_stays_as_it_is() -> None:
    parameters = {"type": "object", "properties": {"$ref": {"const": "#/a"}}, "title": "#/b"}
    use = use_of(tools=[function(parameters=parameters)], tool_choice="required")
    assert use is not None
    assert use.structure is not None
    (call,) = json.loads(use.structure.spec.text)["items"]["anyOf"]
    assert call["properties"]["arguments"] == parameters


@pytest.mark.parametrize(
    ("parameters", "param", "message"),
    [
        ({"tools": [function(f"f{n}") for n in range(TOOLS_MAX + 1)]}, "tools", "128"),
        ({"tools": [function("")]}, "tools[0].function.name", "{1,64}"),
        ({"tools": [function("n" * 65)]}, "tools[0].function.name", "{1,64}"),
        ({"tools": [function("a"), function("get weather")]}, "tools[1].function.name", "{1,64}"),
        ({"tools": [function("é")]}, "tools[0].function.name", "{1,64}"),
        ({"tools": [function("a\n")]}, "tools[0].function.name", "{1,64}"),
        ({"tools": [function("a"), function("b"), function("a")]}, "tools[2].function.name", "tools.0. has"),
        (
            {"tools": [function(description="d" * (TOOL_DESCRIPTION_CHARS_MAX + 1))]},
            "tools[0].function.description",
            str(TOOL_DESCRIPTION_CHARS_MAX),
        ),
        ({"tools": [function(parameters=[])]}, "tools[0].function.parameters", "an object"),
        ({"tools": [function(parameters="{}")]}, "tools[0].function.parameters", "an object"),
        (
            {"tools": [function(parameters={"title": "t" * STRUCTURE_BYTES_MAX})]},
            "tools[0].function.parameters",
            str(STRUCTURE_BYTES_MAX),
        ),
        ({"tool_choice": "required"}, "tool_choice", "no tools"),
        ({"tools": [], "tool_choice": named("f")}, "tool_choice", "no tools"),
        ({"tools": [function("f")], "tool_choice": named("g")}, "tool_choice", "'g'"),
        ({"tools": [function("f")], "tool_choice": "always"}, "tool_choice", "tool_choice"),
        (
            {
                "tools": [function(f"f{n}", parameters={"title": "t" * 9_000}) for n in range(8)],
                "tool_choice": "required",
            },
            "tools",
            str(STRUCTURE_BYTES_MAX),
        ),
    ],
)
def test_what_is_wrong_is_named_with_its_limit(
    parameters: dict[str, object], param: str, message: str
) -> None:
    error = refused(**parameters)
    assert error.param == param
    assert message.replace(".0.", "[0]") in error.message


@pytest.mark.parametrize("choice", ["required", named("get_weather")])
def test_an_answer_cannot_be_held_to_a_form_and_to_calls(choice: object) -> None:
    error = refused(tools=[function()], tool_choice=choice, response_format={"type": "json_object"})
    assert error.param == "response_format"
    assert "tool_choice" in error.message
    assert use_of(tools=[function()], tool_choice="none", guided_choice=["a"]) is None
    assert use_of(tools=[function()], response_format={"type": "text"}) is not None


def test_schemas_have_a_depth() -> None:
    def nested(depth: int) -> dict[str, object]:
        schema: dict[str, object] = {"type": "object"}
        for _ in range(depth):
            schema = {"type": "object", "properties": {"a": schema}}
        return schema

    use_of(tools=[function(parameters=nested(SCHEMA_DEPTH_MAX // 2 - 1))], tool_choice="required")
    error = refused(tools=[function(parameters=nested(SCHEMA_DEPTH_MAX))], tool_choice="required")
    assert error.param == "tools"
    assert str(SCHEMA_DEPTH_MAX) in error.message
