"""The operations of the API, each declared once: what is routed and what the OpenAPI document describes.

Data only: handlers are `gateway.routes`'s.
"""

from dataclasses import dataclass
from enum import StrEnum

from msgspec import Struct

from gateway.api.answer_types import (
    ChatChunk,
    ChatCompletion,
    DetokenizeResponse,
    ErrorBody,
    ModelList,
    ModelObject,
    TextCompletion,
    TokenizeResponse,
)
from gateway.api.request_types import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest

JSON_TYPE = "application/json"


class OperationName(StrEnum):
    """Also the `route` of metrics and log lines."""

    CHAT_COMPLETIONS = "chat_completions"
    COMPLETIONS = "completions"
    MODELS = "models"
    MODEL = "model"
    TOKENIZE = "tokenize"
    DETOKENIZE = "detokenize"
    OPENAPI = "openapi"
    DOCS = "docs"


@dataclass(frozen=True, slots=True)
class Operation:
    """`path` as aiohttp writes it. `response` None: no JSON, or any object. `event` is what each event of a
    stream holds, where the operation can stream. `error_statuses` are those with OpenAI's error body (or
    `error_body`), beside 500. `needs_key`: the caller has to say who it is where the gateway knows keys."""

    method: str
    path: str
    name: str
    summary: str
    request: type[Struct] | None
    response: type | None
    event: type[Struct] | None = None
    error_statuses: tuple[int, ...] = ()
    needs_key: bool = True
    media_type: str = JSON_TYPE
    error_body: type = ErrorBody


GENERATION_ERROR_STATUSES = (400, 401, 404, 408, 413, 429, 503, 504)
TOKENS_ERROR_STATUSES = (400, 401, 404, 408, 413, 429, 503)

OPERATIONS: tuple[Operation, ...] = (
    Operation(
        "POST",
        "/v1/chat/completions",
        OperationName.CHAT_COMPLETIONS,
        "Answer a conversation",
        ChatRequest,
        ChatCompletion,
        ChatChunk,
        GENERATION_ERROR_STATUSES,
    ),
    Operation(
        "POST",
        "/v1/completions",
        OperationName.COMPLETIONS,
        "Continue a text",
        CompletionRequest,
        TextCompletion,
        TextCompletion,
        GENERATION_ERROR_STATUSES,
    ),
    Operation("GET", "/v1/models", OperationName.MODELS, "The models", None, ModelList, None, (401,)),
    Operation(
        "GET", "/v1/models/{model:.+}", OperationName.MODEL, "One model", None, ModelObject, None, (401, 404)
    ),
    Operation(
        "POST",
        "/tokenize",
        OperationName.TOKENIZE,
        "The tokens of a text or a conversation",
        TokenizeRequest,
        TokenizeResponse,
        None,
        TOKENS_ERROR_STATUSES,
    ),
    Operation(
        "POST",
        "/detokenize",
        OperationName.DETOKENIZE,
        "The text of tokens",
        DetokenizeRequest,
        DetokenizeResponse,
        None,
        TOKENS_ERROR_STATUSES,
    ),
    Operation("GET", "/openapi.json", OperationName.OPENAPI, "This document", None, None, needs_key=False),
    Operation(
        "GET",
        "/docs",
        OperationName.DOCS,
        "This document as a page to read and to try",
        None,
        None,
        needs_key=False,
        media_type="text/html",
    ),
)
