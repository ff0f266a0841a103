"""A request body as JSON: bytes in, a struct whose names and types are right out, or a 400 that names the
parameter. Pure; ranges, and what goes with what, are `gateway.validate`'s.
"""

import re
from typing import TypeVar

import msgspec

from gateway.api_errors import ApiError, invalid
from gateway.api_types import CHAT_NEUTRAL, COMPLETION_NEUTRAL, ChatRequest, CompletionRequest, Neutral
from gateway.ranges import check_count, check_range

MESSAGES_MAX = 16_384
MESSAGE_PARTS_MAX = 4096
PARAMETER_BYTES_MAX = 256 * 1024
"""JSON of one parameter, but for the prompt, whose bound is the body's: all stop strings fit, escaped."""

RequestT = TypeVar("RequestT", ChatRequest, CompletionRequest)

_ERROR_PATH = re.compile(r"^(?P<what>.*) - at `\$\.?(?P<path>[^`]*)`$", re.DOTALL)
_MISSING_FIELD = re.compile(r"missing required field `(?P<field>[^`]*)`")
_UNKNOWN_FIELD = re.compile(r"unknown field `(?P<field>[^`]*)`")
_UNSUPPORTED_IN_MESSAGE = re.compile(
    r"^messages\[[^]]*\]\.(annotations|audio|function_call|refusal|tool_calls)(?=$|\W)"
)
_PROMPT_PARAMS = frozenset({"messages", "prompt"})
_UNSUPPORTED_OF: dict[type[ChatRequest] | type[CompletionRequest], Neutral] = {
    ChatRequest: CHAT_NEUTRAL,
    CompletionRequest: COMPLETION_NEUTRAL,
}
_UNREAD_OF = {
    cls: msgspec.defstruct(
        f"Unread{cls.__name__}",
        [
            (name, msgspec.Raw, msgspec.Raw())
            for name in (*(field.encode_name for field in msgspec.structs.fields(cls)), *unsupported)
        ],
        forbid_unknown_fields=True,
    )
    for cls, unsupported in _UNSUPPORTED_OF.items()
}
"""Every parameter there is as the JSON that came for it, empty where none came."""


def decode_chat(body: bytes) -> ChatRequest:
    """A chat request whose names and types are right. Raises ApiError."""
    request = _decode(body, ChatRequest)
    check_count("messages", request.messages, MESSAGES_MAX)
    for index, message in enumerate(request.messages):
        if isinstance(message.content, list):
            check_count(f"messages[{index}].content", message.content, MESSAGE_PARTS_MAX)
    return request


def decode_completion(body: bytes) -> CompletionRequest:
    """A text completion request whose names and types are right. Raises ApiError."""
    return _decode(body, CompletionRequest)


def _decode(body: bytes, request_class: type[RequestT]) -> RequestT:
    """Straight into `request_class`: a body made of other things than it should be, of millions of empty
    lists for instance, ends at the first of them instead of holding up the event loop for seconds."""
    try:
        unread = msgspec.json.decode(body, type=_UNREAD_OF[request_class])
        for param, value in msgspec.structs.asdict(unread).items():
            _check_unread(param, value, _UNSUPPORTED_OF[request_class])
        return msgspec.json.decode(body, type=request_class)
    except msgspec.ValidationError as error:
        raise _explained(str(error)) from error
    except (msgspec.MsgspecError, RecursionError) as error:
        raise _not_json(str(error)) from error


def _check_unread(param: str, value: msgspec.Raw, unsupported: Neutral) -> None:
    """What is too long to be looked at, or is not supported and asks for something, raises ApiError."""
    size_bytes = len(memoryview(value))
    if param not in _PROMPT_PARAMS:
        check_range(f"{param} (bytes)", size_bytes, 0, PARAMETER_BYTES_MAX, param=param)
    if param not in unsupported or not size_bytes:
        return
    asked = msgspec.json.decode(value)
    if not any(_same(asked, asks_nothing) for asks_nothing in unsupported[param]):
        choices = ", ".join(msgspec.json.encode(choice).decode() for choice in unsupported[param])
        raise invalid(param, f"{param} is not supported (only as {choices})", "unsupported_parameter")


def _same(value: object, other: object) -> bool:
    """Equality as JSON sees it: true is not 1."""
    return isinstance(value, bool) == isinstance(other, bool) and value == other


def _explained(message: str) -> ApiError:
    """msgspec's complaint with the parameter it is about."""
    path, what = "", message
    if located := _ERROR_PATH.match(message):
        path, what = located["path"], located["what"]
    if not path and what.startswith("Expected `object`"):
        return _not_json("it must be an object")
    if unsupported := _UNSUPPORTED_IN_MESSAGE.match(path):
        param = unsupported[0]
        return invalid(param, f"{param} is not supported (only as null or empty)", "unsupported_parameter")
    if (not path or path.startswith("messages")) and (unknown := _UNKNOWN_FIELD.search(what)):
        field = unknown["field"][:128]
        param = f"{path}.{field}" if path else field
        return invalid(param, f"unknown parameter: {param}", "unknown_parameter")
    if missing := _MISSING_FIELD.search(what):
        param = f"{path}.{missing['field']}" if path else missing["field"]
        return invalid(param, f"{param} is missing", "missing_required_parameter")
    return invalid(path or None, f"{path}: {what}" if path else what, "invalid_type")


def _not_json(reason: str) -> ApiError:
    return invalid(None, f"the body is not valid JSON: {reason}", "invalid_json")
