"""A request body as JSON: bytes in, a struct whose names, types and ranges are right out, or a 400 that
names the parameter. Pure; what goes with what, and what the model allows, is `gateway.api.validate`'s.
"""

from typing import TypeVar

import msgspec

from gateway.api.api_errors import invalid
from gateway.api.body_errors import PROMPT_PARAMS, explained, unreadable
from gateway.api.neutral_parameters import (
    CHAT_NEUTRAL,
    COMPLETION_NEUTRAL,
    DETOKENIZE_NEUTRAL,
    TOKENIZE_NEUTRAL,
    Neutral,
)
from gateway.api.ranges import check_range
from gateway.api.request_types import (
    AssistantMessage,
    ChatMessage,
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
)

PARAMETER_BYTES_MAX = 256 * 1024
"""JSON of one parameter, but for the prompt, whose bound is the body's: all stop strings fit, escaped."""

RequestT = TypeVar("RequestT", ChatRequest, CompletionRequest, TokenizeRequest, DetokenizeRequest)

NEUTRAL_OF: dict[type[msgspec.Struct], Neutral] = {
    ChatRequest: CHAT_NEUTRAL,
    CompletionRequest: COMPLETION_NEUTRAL,
    TokenizeRequest: TOKENIZE_NEUTRAL,
    DetokenizeRequest: DETOKENIZE_NEUTRAL,
}
_ABSENT = msgspec.Raw()
_UNREAD_OF = {
    cls: msgspec.defstruct(
        f"Unread{cls.__name__}",
        [
            (name, msgspec.Raw, _ABSENT)
            for name in (*(field.encode_name for field in msgspec.structs.fields(cls)), *neutral)
        ],
        forbid_unknown_fields=True,
    )
    for cls, neutral in NEUTRAL_OF.items()
}
"""Every parameter there is as the JSON that came for it, empty where none came."""


def decode_chat(body: bytes) -> ChatRequest:
    """A chat request whose names, types and ranges are right. Raises ApiError."""
    request = _decode(body, ChatRequest)
    _check_messages(request.messages)
    return request


def decode_completion(body: bytes) -> CompletionRequest:
    """The same of a text completion; its prompt is read by `gateway.api.prompts`. Raises ApiError."""
    return _decode(body, CompletionRequest)


def decode_tokenize(body: bytes) -> TokenizeRequest:
    """A text or a conversation to be tokenised: one of them is there. Raises ApiError."""
    request = _decode(body, TokenizeRequest)
    if (request.prompt is None) == (request.messages is None):
        raise invalid("prompt", "prompt or messages must be given, one of them")
    _check_messages(request.messages or [])
    return request


def decode_detokenize(body: bytes) -> DetokenizeRequest:
    """Raises ApiError."""
    return _decode(body, DetokenizeRequest)


def _decode(body: bytes, request_class: type[RequestT]) -> RequestT:
    """Straight into `request_class`: a body made of other things than it should be, of millions of empty
    lists for instance, ends at the first of them instead of holding up the event loop for seconds."""
    values: dict[str, msgspec.Raw] = {}
    try:
        values = msgspec.structs.asdict(msgspec.json.decode(body, type=_UNREAD_OF[request_class]))
        for param, value in values.items():
            if value is _ABSENT:
                continue
            _check_unread(param, value, NEUTRAL_OF[request_class])
        return msgspec.json.decode(body, type=request_class)
    except msgspec.ValidationError as error:
        raise explained(error, values) from error
    except (msgspec.MsgspecError, RecursionError) as error:
        raise unreadable(error, body) from error


def _check_unread(param: str, value: msgspec.Raw, neutral: Neutral) -> None:
    """What is too long to be looked at, or is not supported and asks for something, raises ApiError."""
    size_bytes = len(memoryview(value))
    if param not in PROMPT_PARAMS:
        check_range(f"{param} (bytes)", size_bytes, 0, PARAMETER_BYTES_MAX, param=param)
    if param not in neutral or not size_bytes:
        return
    asked = msgspec.json.decode(value)
    if not any(_same(asked, asks_nothing) for asks_nothing in neutral[param]):
        choices = ", ".join(msgspec.json.encode(choice).decode() for choice in neutral[param])
        raise invalid(param, f"{param} is not supported (only as {choices})", "unsupported_parameter")


def _same(value: object, other: object) -> bool:
    """Equality as JSON sees it: true is not 1."""
    return isinstance(value, bool) == isinstance(other, bool) and value == other


def _check_messages(messages: list[ChatMessage]) -> None:
    for index, message in enumerate(messages):
        if isinstance(message, AssistantMessage) and message.content is None and not message.tool_calls:
            param = f"messages[{index}].content"
            raise invalid(param, f"{param} is missing, and so are tool_calls: one must be given")
