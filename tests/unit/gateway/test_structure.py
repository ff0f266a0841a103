"""The form of an answer, whatever the client calls it: one spec, or a refusal by that name."""

import json

import pytest

from gateway.api.api_errors import ApiError, of_failure
from gateway.api.model_limits import ModelLimits
from gateway.api.parameter_limits import STRUCTURE_CHOICES_MAX
from gateway.api.request_body import decode_chat, decode_completion
from gateway.api.request_types import ChatRequest, CompletionRequest
from gateway.api.structure import structure_of
from gateway.api.validate import check_chat, sampling
from policy.core import STRUCTURE_BYTES_MAX, StructureKind, StructureSpec
from protocol.answer import Fail, FailureKind

pytestmark = pytest.mark.unit

SCHEMA = {"type": "object", "properties": {"a": {"enum": ["ä", "\n"]}}, "required": ["a"]}
SCHEMA_SPEC = StructureSpec(StructureKind.JSON_SCHEMA, json.dumps(SCHEMA))
LIMITS = ModelLimits(name="tiny", context_tokens_max=100, vocabulary_tokens=50, end_token_ids=(2, 3))


def chat(**parameters: object) -> ChatRequest:
    messages = [{"role": "user", "content": "hello"}]
    return decode_chat(json.dumps({"model": "tiny", "messages": messages} | parameters).encode())


def completion(**parameters: object) -> CompletionRequest:
    return decode_completion(json.dumps({"model": "tiny", "prompt": "hello"} | parameters).encode())


@pytest.mark.parametrize(
    ("parameters", "param", "spec"),
    [
        (
            {"response_format": {"type": "json_object"}},
            "response_format",
            StructureSpec(StructureKind.JSON_OBJECT),
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}},
            "response_format.json_schema.schema",
            SCHEMA_SPEC,
        ),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "x", "description": "y", "strict": True, "schema": SCHEMA},
                }
            },
            "response_format.json_schema.schema",
            SCHEMA_SPEC,
        ),
        ({"guided_json": SCHEMA}, "guided_json", SCHEMA_SPEC),
        ({"guided_json": json.dumps(SCHEMA)}, "guided_json", SCHEMA_SPEC),
        ({"guided_regex": "a+"}, "guided_regex", StructureSpec(StructureKind.REGEX, "a+")),
        ({"guided_choice": ["ä", "b"]}, "guided_choice", StructureSpec(StructureKind.CHOICE, '["ä","b"]')),
        ({"guided_grammar": "start: A"}, "guided_grammar", StructureSpec(StructureKind.GRAMMAR, "start: A")),
        ({"structured_outputs": {"json": SCHEMA}}, "structured_outputs.json", SCHEMA_SPEC),
        (
            {"structured_outputs": {"regex": "a+"}},
            "structured_outputs.regex",
            StructureSpec(StructureKind.REGEX, "a+"),
        ),
        (
            {"structured_outputs": {"choice": ["b"]}},
            "structured_outputs.choice",
            StructureSpec(StructureKind.CHOICE, '["b"]'),
        ),
        (
            {"structured_outputs": {"grammar": "x"}},
            "structured_outputs.grammar",
            StructureSpec(StructureKind.GRAMMAR, "x"),
        ),
        (
            {"structured_outputs": {"json_object": True}},
            "structured_outputs.json_object",
            StructureSpec(StructureKind.JSON_OBJECT),
        ),
    ],
)
def test_every_form_is_taken_by_chat_and_completion(
    parameters: dict[str, object], param: str, spec: StructureSpec
) -> None:
    for request in (chat(**parameters), completion(**parameters)):
        named = structure_of(request)
        assert named is not None
        assert (named.param, named.spec) == (param, spec)
    params = sampling(check_chat(chat(**parameters), LIMITS), 10, LIMITS, 0)
    assert params.structure == spec


@pytest.mark.parametrize(
    "parameters",
    [
        {},
        {"response_format": None},
        {"response_format": {"type": "text"}},
        {"guided_json": None, "guided_regex": None, "guided_choice": None, "guided_grammar": None},
        {"structured_outputs": None},
        {"structured_outputs": {}},
        {"structured_outputs": {"json": None, "json_object": False}},
    ],
)
def test_nothing_asked_is_nothing(parameters: dict[str, object]) -> None:
    assert structure_of(chat(**parameters)) is None
    assert sampling(check_chat(chat(**parameters), LIMITS), 10, LIMITS, 0).structure is None


@pytest.mark.parametrize(
    ("parameters", "param"),
    [
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": "json"}, "response_format"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {}}},
            "response_format.json_schema.schema",
        ),
        ({"response_format": {"type": "json_object", "schema": {}}}, "response_format.schema"),
        ({"guided_regex": 3}, "guided_regex"),
        ({"guided_choice": []}, "guided_choice"),
        ({"guided_choice": ["a", 1]}, "guided_choice[1]"),
        ({"guided_choice": ["a"] * (STRUCTURE_CHOICES_MAX + 1)}, "guided_choice"),
        ({"guided_regex": "a" * (STRUCTURE_BYTES_MAX + 1)}, "guided_regex"),
        ({"guided_json": {"a": "b" * STRUCTURE_BYTES_MAX}}, "guided_json"),
        ({"guided_json": SCHEMA, "guided_regex": "a"}, "guided_regex"),
        ({"guided_regex": "a", "response_format": {"type": "json_object"}}, "guided_regex"),
        ({"structured_outputs": {"regex": "a", "json_object": True}}, "structured_outputs.json_object"),
        ({"structured_outputs": {"structural_tag": "x"}}, "structured_outputs.structural_tag"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(parameters: dict[str, object], param: str) -> None:
    for decode in (chat, completion):
        with pytest.raises(ApiError) as caught:
            structure_of(decode(**parameters))
        assert caught.value.kind.status == 400
        assert caught.value.param == param
        assert param.split("[")[0].split(".")[-1] in caught.value.message


@pytest.mark.parametrize("schema", [b'{"a": "\xff"}', b'"\xff"'])
@pytest.mark.parametrize(
    ("body", "param"),
    [
        (b'"guided_json": %s', "guided_json"),
        (b'"structured_outputs": {"json": %s}', "structured_outputs.json"),
        (
            b'"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": %s}}',
            "response_format.json_schema.schema",
        ),
    ],
)
def test_a_schema_that_is_no_utf8_is_refused_by_name(schema: bytes, body: bytes, param: str) -> None:
    request = decode_completion(b'{"model": "m", "prompt": "p", ' + body % schema + b"}")
    with pytest.raises(ApiError, match="UTF-8") as caught:
        structure_of(request)
    assert (caught.value.kind.status, caught.value.param) == (400, param)


def test_a_form_that_does_not_compile_is_told_by_the_clients_name() -> None:
    failure = Fail(FailureKind.BAD_REQUEST, "bad_request", "sampling.structure: json_schema: no such type")
    error = of_failure(failure, "response_format.json_schema.schema")
    assert (error.kind.status, error.param) == (400, "response_format.json_schema.schema")
    assert error.message == "response_format.json_schema.schema: json_schema: no such type"
    other = of_failure(Fail(FailureKind.BAD_REQUEST, "bad_request", "prompt_tokens is 0"), "guided_json")
    assert other.param is None
    assert of_failure(failure, None).message == failure.detail


def test_a_form_ends_an_answer_whatever_ignore_eos_says() -> None:
    assert check_chat(chat(guided_regex="a", ignore_eos=True), LIMITS).stop_token_ids == (2, 3)
    assert check_chat(chat(ignore_eos=True), LIMITS).stop_token_ids == ()
