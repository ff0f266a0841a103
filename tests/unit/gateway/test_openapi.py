"""The OpenAPI document says what the code does."""

import json
import re
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator
from referencing import Registry, Resource
from referencing.jsonschema import DRAFT202012

from gateway.api.admin_operations import ADMIN_OPERATIONS
from gateway.api.api_errors import ApiError
from gateway.api.openapi import EXAMPLES, document, document_bytes, main
from gateway.api.operations import OPERATIONS
from gateway.api.parameter_texts import PARAMETER_TEXTS
from gateway.api.request_body import (
    NEUTRAL_OF,
    decode_chat,
    decode_completion,
    decode_detokenize,
    decode_tokenize,
)
from gateway.api.request_types import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest

pytestmark = pytest.mark.unit

FILE = Path(__file__).parents[3] / "docs" / "openapi.json"
TREE = json.loads(document_bytes())
REGISTRY = Registry().with_resource(
    "urn:api", Resource.from_contents(TREE, default_specification=DRAFT202012)
)
DECODERS = {
    ChatRequest: decode_chat,
    CompletionRequest: decode_completion,
    TokenizeRequest: decode_tokenize,
    DetokenizeRequest: decode_detokenize,
}


def validator(name: str) -> Draft202012Validator:
    return Draft202012Validator({"$ref": f"urn:api#/components/schemas/{name}"}, registry=REGISTRY)


def test_the_document_in_the_repository_is_current() -> None:
    assert FILE.read_bytes() == document_bytes(), "run python -m gateway.api.openapi docs/openapi.json"


def test_a_document_is_written_where_it_is_asked_for(tmp_path, capsys) -> None:
    assert main([str(tmp_path / "openapi.json")]) == 0
    assert json.loads((tmp_path / "openapi.json").read_bytes()) == TREE
    assert main([str(tmp_path / "no" / "openapi.json")]) == 1
    assert "cannot write" in capsys.readouterr().err


def test_every_operation_is_told_with_its_statuses() -> None:
    told = {(method.upper(), path) for path, methods in TREE["paths"].items() for method in methods}
    operations = (*OPERATIONS, *ADMIN_OPERATIONS)
    assert told == {(each.method, re.sub(r":[^}]*}", "}", each.path)) for each in operations}
    for each in operations:
        told = TREE["paths"][re.sub(r":[^}]*}", "}", each.path)][each.method.lower()]
        assert {str(status) for status in each.error_statuses} | {"200"} <= set(told["responses"])
        for answer in told["responses"].values():
            assert "x-request-id" in answer["headers"]
    overloaded = TREE["paths"]["/v1/completions"]["post"]["responses"]["429"]
    assert {"Retry-After", "retry-after-ms", "x-moonpool-rejected-reason"} <= set(overloaded["headers"])


def test_every_reference_leads_somewhere() -> None:
    references = set(re.findall(r'"\$ref":\s*"#/([^"]+)"', json.dumps(TREE)))
    assert len(references) > 30
    for reference in references:
        found = TREE
        for word in reference.split("/"):
            found = found[word]
    for schema in TREE["components"]["schemas"].values():
        Draft202012Validator.check_schema(schema)


def test_every_parameter_has_its_text_and_every_text_a_parameter() -> None:
    fields = {field.encode_name for request in NEUTRAL_OF for field in msgspec.structs.fields(request)}
    assert fields == set(PARAMETER_TEXTS)
    for operation in OPERATIONS:
        if operation.request is not None:
            told = TREE["components"]["schemas"][operation.request.__name__]["properties"]
            assert all(of["description"] for of in told.values())
            assert set(told) == {
                *(field.encode_name for field in msgspec.structs.fields(operation.request)),
                *NEUTRAL_OF[operation.request],
            }


def test_the_served_model_is_the_only_one_that_is_told() -> None:
    served = document(model="tiny")
    assert served["components"]["schemas"]["ChatRequest"]["properties"]["model"]["enum"] == ["tiny"]
    assert set(served["components"]["schemas"]["TokenizeRequest"]["properties"]["model"]["enum"]) == {
        "tiny",
        None,
    }
    (variable,) = served["paths"]["/v1/models/{model}"]["get"]["parameters"]
    assert variable["schema"]["enum"] == ["tiny"]


READ_LATER = {"prompt", "tokens", "logit_bias", "tools"}
"""What is looked into, or not in whole, behind the decoder: by `prompts`, `validate` and `tools`."""
TYPE_CODES = {"invalid_type", "unknown_parameter", "missing_required_parameter"}
SERVED_REQUESTS = sorted(
    (operation.request for operation in OPERATIONS if operation.request is not None),
    key=lambda request: request.__name__,
)
BODIES = {request: {"model": "model", **EXAMPLES[request]} for request in DECODERS}
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.sampled_from([-1, 0, 1, 2, 20, 21, 100, 101, 128, 129])
    # JSON Schema takes 1.0 for an integer, msgspec does not.
    | st.floats(-1e9, 1e9).filter(lambda value: not value.is_integer())
    | st.text(max_size=4)
    | st.sampled_from(["auto", "none", "required", "7", "model", "user", "tool", "x" * 257, "x" * 1025]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.text(max_size=2)
            | st.sampled_from(["type", "text", "content", "role", "tool_call_id", "name", "function", "7"]),
            inner,
            max_size=3,
        )
    ),
    max_leaves=6,
)


@pytest.mark.parametrize("request_class", SERVED_REQUESTS)
def test_the_examples_are_taken(request_class) -> None:
    body = BODIES[request_class]
    validator(request_class.__name__).validate(body)
    DECODERS[request_class](json.dumps(body).encode())


@pytest.mark.parametrize("request_class", SERVED_REQUESTS)
@settings(max_examples=50)
@given(data=st.data())
def test_what_the_schema_refuses_is_refused_and_what_it_takes_has_the_right_type(request_class, data) -> None:
    schema = TREE["components"]["schemas"][request_class.__name__]
    changed = data.draw(
        st.dictionaries(st.sampled_from([*sorted(schema["properties"]), "x"]), VALUES, max_size=2)
    )
    body = BODIES[request_class] | changed
    taken = validator(request_class.__name__).is_valid(body)
    try:
        DECODERS[request_class](json.dumps(body).encode())
        refused = None
    except ApiError as error:
        refused = error
    if not taken and not set(changed) & READ_LATER:
        assert refused is not None, changed
    if taken and refused is not None:
        # Only what no schema says: what goes with what, such as a message's content and its calls.
        assert refused.code not in ("invalid_type", "unknown_parameter", "missing_required_parameter"), (
            changed
        )
