"""The HTTP API as an OpenAPI 3.1 document: what `/openapi.json` gives and `docs/openapi.json` must be.

    python -m gateway.api.openapi docs/openapi.json

Made of the operations and of the types that requests are decoded into, so that it says what the code does.
"""

import re
import sys
from collections.abc import Mapping
from http import HTTPStatus
from types import MappingProxyType

import msgspec

from cluster.admin import VERSION
from cluster.document_file import write_document
from gateway.api.admin_operations import ADMIN_OPERATIONS
from gateway.api.answer_types import ErrorBody
from gateway.api.neutral_parameters import Neutral
from gateway.api.openapi_headers import HEADER_PARAMETERS, RESPONSE_HEADERS, headers_of
from gateway.api.operations import JSON_TYPE, OPERATIONS, Operation
from gateway.api.parameter_texts import PARAMETER_TEXTS
from gateway.api.request_body import NEUTRAL_OF
from gateway.api.request_types import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
)

Schema = dict[str, object]

_HELLO = [{"role": "user", "content": "Say hello."}]
EXAMPLES: Mapping[type, Schema] = MappingProxyType(
    {
        ChatRequest: {"messages": _HELLO, "max_tokens": 16},
        CompletionRequest: {"prompt": "Once upon a time", "max_tokens": 16},
        TokenizeRequest: {"messages": _HELLO},
        DetokenizeRequest: {"tokens": [5, 6, 7]},
    }
)

SCHEMAS = "#/components/schemas/"
EVENT_STREAM_TYPE = "text/event-stream"
API_KEY = "apiKey"
EVENTS_TEXT = """\
The data of each event but the last, which is [DONE] and no JSON. An error ends the stream without it.
Comments keep the connection alive.
"""
NEUTRAL_TEXT = "Not supported: taken with these values only, at which it asks for nothing."
_PATH_VARIABLE = re.compile(r"\{(?P<name>\w+)(?::[^}]*)?\}")

ABOUT = """\
An OpenAI-compatible API. Moonpool splits the work on an answer between prefill and decode instances around a
pool of KV blocks; of that nothing is to be seen here but the time it saves.

A parameter that is not in this document does not exist, and a request that has one is refused: status 400,
with the parameter's name. Errors have OpenAI's body everywhere. Refusals for want of room, 429 and 503, say
when to come again. Where the gateway knows API keys, requests need one of them.
"""


def document(operations: tuple[Operation, ...] = OPERATIONS, model: str | None = None) -> Schema:
    """The whole document, of plain JSON values. `model`: the only one that the server has."""
    paths: dict[str, Schema] = {}
    for operation in (*operations, *ADMIN_OPERATIONS):
        path = _PATH_VARIABLE.sub(r"{\g<name>}", operation.path)
        paths.setdefault(path, {})[operation.method.lower()] = _operation(operation, model)
    return {
        "openapi": "3.1.0",
        "info": {"title": "Moonpool", "version": VERSION, "description": ABOUT},
        "paths": paths,
        "components": {
            "schemas": _schemas((*operations, *ADMIN_OPERATIONS), model),
            "headers": RESPONSE_HEADERS,
            "securitySchemes": {API_KEY: {"type": "http", "scheme": "bearer"}},
        },
    }


def document_bytes(model: str | None = None) -> bytes:
    """As it is served and kept in the repository."""
    return msgspec.json.format(msgspec.json.encode(document(model=model)), indent=2) + b"\n"


def _operation(operation: Operation, model: str | None) -> Schema:
    described: Schema = {
        "operationId": operation.name,
        "summary": operation.summary,
        "parameters": [*_path_parameters(operation, model), *(HEADER_PARAMETERS if operation.event else ())],
        "responses": {
            "200": _success(operation),
            **{str(status): _failure(operation, status) for status in _error_statuses(operation)},
        },
    }
    if operation.request is not None:
        content = {
            "schema": {"$ref": SCHEMAS + operation.request.__name__},
            "example": {"model": model or "model", **EXAMPLES[operation.request]},
        }
        described["requestBody"] = {"required": True, "content": {JSON_TYPE: content}}
    if operation.needs_key:
        described["security"] = [{API_KEY: []}, {}]
    return described


def _path_parameters(operation: Operation, model: str | None) -> list[Schema]:
    return [
        {
            "name": variable["name"],
            "in": "path",
            "required": True,
            "description": PARAMETER_TEXTS[variable["name"]],
            "schema": {"type": "string"} if model is None else {"type": "string", "enum": [model]},
        }
        for variable in _PATH_VARIABLE.finditer(operation.path)
    ]


def _success(operation: Operation) -> Schema:
    content: dict[str, Schema] = {operation.media_type: {"schema": _answer_schema(operation)}}
    if operation.event is not None:
        event = {"anyOf": [{"$ref": SCHEMAS + each.__name__} for each in (operation.event, ErrorBody)]}
        content[EVENT_STREAM_TYPE] = {
            "schema": {
                "type": "array",
                "description": EVENTS_TEXT,
                "items": event,
            }
        }
    return {"description": "OK", "headers": _headers(operation, HTTPStatus.OK), "content": content}


def _answer_schema(operation: Operation) -> Schema:
    if operation.response is None:
        return {"type": "object"} if operation.media_type == JSON_TYPE else {"type": "string"}
    return {"$ref": SCHEMAS + operation.response.__name__}


def _failure(operation: Operation, status: int) -> Schema:
    return {
        "description": HTTPStatus(status).phrase,
        "headers": _headers(operation, status),
        "content": {JSON_TYPE: {"schema": {"$ref": SCHEMAS + operation.error_body.__name__}}},
    }


def _headers(operation: Operation, status: int) -> Mapping[str, object]:
    # Only what asks for work counts against limits; an instance that is not ready says nothing of when.
    limited = operation.needs_key and operation.method == "POST"
    return headers_of(status, limited=limited, waiting=operation.error_body is ErrorBody)


def _error_statuses(operation: Operation) -> tuple[int, ...]:
    if operation.error_body is not ErrorBody:
        return operation.error_statuses
    return (*operation.error_statuses, HTTPStatus.INTERNAL_SERVER_ERROR.value)


def _schemas(operations: tuple[Operation, ...], model: str | None) -> Mapping[str, Schema]:
    types: dict[str, type] = {}
    for operation in operations:
        for each in (operation.request, operation.response, operation.event, operation.error_body):
            if each is not None:
                types[each.__name__] = each
    _, schemas = msgspec.json.schema_components(types.values(), ref_template=SCHEMAS + "{name}")
    for request, neutral in NEUTRAL_OF.items():
        if request.__name__ in schemas:
            schemas[request.__name__] = _request_schema(schemas[request.__name__], neutral, model)
    return schemas


def _request_schema(schema: Schema, neutral: Neutral, model: str | None) -> Schema:
    """With what each parameter means, and with those that are taken only where they ask for nothing."""
    fields = msgspec.convert(schema["properties"], dict[str, Schema])
    properties = {name: {**of, "description": PARAMETER_TEXTS[name]} for name, of in fields.items()}
    if model is not None:
        # Where it may be left out its type is one of several, and null is another value.
        properties["model"]["enum"] = [model] if "type" in fields["model"] else [model, None]
    for name, values in neutral.items():
        properties[name] = {"enum": list(values), "description": NEUTRAL_TEXT}
    return {**schema, "properties": properties, "additionalProperties": False}


def main(arguments: list[str]) -> int:
    return write_document("gateway.api.openapi", "docs/openapi.json", document_bytes, arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
