"""The form an answer is to have, from any of the parameters that may say so. Pure.

Whether the form makes sense is for an instance that serves the model to say: what compiles it needs the
model's tokens.
"""

from dataclasses import dataclass

import msgspec
from msgspec import Raw

from gateway.api.api_errors import invalid
from gateway.api.ranges import check_range
from gateway.api.request_types import GenerationRequest, JsonObjectFormat, JsonSchemaFormat
from policy.core import STRUCTURE_BYTES_MAX, StructureKind, StructureSpec


@dataclass(frozen=True, slots=True)
class NamedStructure:
    """`param`: what the client called it, for errors."""

    param: str
    spec: StructureSpec


def structure_of(request: GenerationRequest) -> NamedStructure | None:
    """The one form that is asked for, None where there is none. Raises ApiError."""
    asked = [*_of_response_format(request), *_of_structured_outputs(request), *_of_guided(request)]
    if not asked:
        return None
    if len(asked) > 1:
        params = " and ".join(one.param for one in asked)
        raise invalid(asked[1].param, f"{params} are both given; give only one")
    named = asked[0]
    size_bytes = len(named.spec.text.encode())
    check_range(f"{named.param} (bytes)", size_bytes, 0, STRUCTURE_BYTES_MAX, param=named.param)
    return named


def _of_response_format(request: GenerationRequest) -> list[NamedStructure]:
    match request.response_format:
        case JsonObjectFormat():
            return [NamedStructure("response_format", StructureSpec(StructureKind.JSON_OBJECT))]
        case JsonSchemaFormat(json_schema):
            return [_schema("response_format.json_schema.schema", json_schema.schema)]
        case _:
            return []


def _of_structured_outputs(request: GenerationRequest) -> list[NamedStructure]:
    outputs = request.structured_outputs
    if outputs is None:
        return []
    asked = _of_texts("structured_outputs.", outputs.json, outputs.regex, outputs.choice, outputs.grammar)
    if outputs.json_object:
        spec = StructureSpec(StructureKind.JSON_OBJECT)
        asked.append(NamedStructure("structured_outputs.json_object", spec))
    return asked


def _of_guided(request: GenerationRequest) -> list[NamedStructure]:
    return _of_texts(
        "guided_", request.guided_json, request.guided_regex, request.guided_choice, request.guided_grammar
    )


def _of_texts(
    prefix: str, schema: Raw, regex: str | None, choice: list[str] | None, grammar: str | None
) -> list[NamedStructure]:
    asked = []
    if bytes(schema) not in (b"", b"null"):
        asked.append(_schema(f"{prefix}json", schema))
    if regex is not None:
        asked.append(NamedStructure(f"{prefix}regex", StructureSpec(StructureKind.REGEX, regex)))
    if choice is not None:
        text = msgspec.json.encode(choice).decode()
        asked.append(NamedStructure(f"{prefix}choice", StructureSpec(StructureKind.CHOICE, text)))
    if grammar is not None:
        asked.append(NamedStructure(f"{prefix}grammar", StructureSpec(StructureKind.GRAMMAR, grammar)))
    return asked


def _schema(param: str, schema: Raw) -> NamedStructure:
    """A schema as JSON, or as a string that holds it."""
    try:
        text = bytes(schema).decode()
    except UnicodeDecodeError as error:  # what msgspec passes over it does not decode
        raise invalid(param, f"{param} is not UTF-8 at byte {error.start}") from error
    if text.startswith('"'):
        text = msgspec.json.decode(text, type=str)
    return NamedStructure(param, StructureSpec(StructureKind.JSON_SCHEMA, text))
