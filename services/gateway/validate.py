"""A request body checked: bytes in, typed parameters out, or a 400 that names parameter and limit.

Pure. Owns every limit of the API; knows neither HTTP nor how text becomes tokens.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import msgspec

from gateway.api_errors import MODEL_NOT_FOUND, ApiError, invalid
from gateway.api_types import (
    CHAT_NEUTRAL,
    COMPLETION_NEUTRAL,
    ChatRequest,
    CompletionRequest,
    GenerationRequest,
    Neutral,
)
from policy.core import SamplingParams

TEMPERATURE_MAX = 2.0
TOP_K_MAX = 2**31 - 1
SEED_MIN, SEED_MAX = -(2**63), 2**63 - 1
STOP_STRINGS_MAX = 16
STOP_STRING_CHARS_MAX = 1024
STOP_TOKEN_IDS_MAX = 64
USER_CHARS_MAX = 512
MESSAGES_MAX = 16_384
MESSAGE_PARTS_MAX = 4096
PARAMETER_BYTES_MAX = 256 * 1024
"""JSON of one parameter, but for the prompt, whose bound is the body's: all stop strings fit, escaped."""
COMPLETION_TOKENS_DEFAULT = 16
"""What OpenAI's text completions generate where nobody says; a chat answers as long as there is room."""

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


@dataclass(frozen=True, slots=True)
class ModelLimits:
    """What the served model allows: token ids run from 0 to `vocabulary_tokens` - 1; prompt and answer
    together hold at most `context_tokens_max` tokens; `end_token_ids` end an answer."""

    name: str
    context_tokens_max: int
    vocabulary_tokens: int
    end_token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Generation:
    """A request's checked parameters, all but the prompt. `output_tokens_max` None: the client did not say,
    then `output_tokens_default`, and without that as many as fit. The `_param` fields are what the client
    called these, for errors."""

    stream: bool
    include_usage: bool
    return_token_ids: bool
    prompt_param: str
    output_tokens_param: str
    output_tokens_max: int | None
    output_tokens_default: int | None
    output_tokens_min: int
    temperature: float
    top_p: float
    top_k: int
    seed: int | None
    stop: tuple[str, ...]
    stop_token_ids: tuple[int, ...]


def decode_chat(body: bytes) -> ChatRequest:
    """A chat request whose names and types are right. Raises ApiError."""
    request = _decode(body, ChatRequest)
    _check_count("messages", request.messages, MESSAGES_MAX)
    for index, message in enumerate(request.messages):
        if isinstance(message.content, list):
            _check_count(f"messages[{index}].content", message.content, MESSAGE_PARTS_MAX)
    return request


def decode_completion(body: bytes) -> CompletionRequest:
    """A text completion request whose names and types are right. Raises ApiError."""
    return _decode(body, CompletionRequest)


def check_model(name: str, limits: ModelLimits) -> None:
    if name != limits.name:
        message = f"the model {name[:128]!r} does not exist; this server has {limits.name!r}"
        raise ApiError(MODEL_NOT_FOUND, message, param="model")


def check_chat(request: ChatRequest, limits: ModelLimits) -> Generation:
    """The checked parameters of a chat request. Raises ApiError."""
    if request.max_completion_tokens is not None:
        if request.max_tokens is not None and request.max_tokens != request.max_completion_tokens:
            raise invalid("max_tokens", "max_tokens and max_completion_tokens differ; give only one")
        return _check(request, limits, "messages", "max_completion_tokens", request.max_completion_tokens)
    return _check(request, limits, "messages", "max_tokens", request.max_tokens)


def check_completion(request: CompletionRequest, limits: ModelLimits) -> Generation:
    """The checked parameters of a text completion request. Raises ApiError."""
    if isinstance(request.prompt, list):
        # Counted before they are looked at: a prompt over the context is named as such.
        _check_prompt_fits("prompt", len(request.prompt), limits)
        _check_token_ids("prompt", request.prompt, limits)
    return _check(request, limits, "prompt", "max_tokens", request.max_tokens, COMPLETION_TOKENS_DEFAULT)


def sampling(
    generation: Generation, prompt_tokens: int, limits: ModelLimits, drawn_seed: int
) -> SamplingParams:
    """How the answer to a prompt of `prompt_tokens` is generated; `drawn_seed` where the client gave none.

    Raises ApiError `context_length_exceeded` where prompt and answer do not fit into the context. Only
    an answer's length that the client did not give is cut to what is left.
    """
    _check_prompt_fits(generation.prompt_param, prompt_tokens, limits)
    room_tokens = limits.context_tokens_max - prompt_tokens
    if generation.output_tokens_max is None:
        output_tokens_max = min(room_tokens, generation.output_tokens_default or room_tokens)
    else:
        output_tokens_max = generation.output_tokens_max
    if output_tokens_max > room_tokens:
        raise _context_exceeded(
            generation.output_tokens_param,
            f"prompt ({prompt_tokens} tokens) and {generation.output_tokens_param} "
            f"({_shown(output_tokens_max)}) together exceed the context of "
            f"{limits.context_tokens_max} tokens",
        )
    if generation.output_tokens_min > output_tokens_max:
        raise invalid(
            "min_tokens",
            f"min_tokens is {generation.output_tokens_min}, must be at most "
            f"{generation.output_tokens_param} = {output_tokens_max}",
        )
    return SamplingParams(
        output_tokens_max=output_tokens_max,
        stop_token_ids=generation.stop_token_ids,
        output_tokens_min=generation.output_tokens_min,
        temperature=generation.temperature,
        top_p=generation.top_p,
        top_k=generation.top_k,
        seed=drawn_seed if generation.seed is None else generation.seed,
    )


def text_too_long(param: str, chars: int, limits: ModelLimits) -> ApiError:
    """For a text so long that no tokenising is needed to see that it exceeds the context."""
    return _context_exceeded(
        param, f"a prompt of {chars} characters exceeds the context of {limits.context_tokens_max} tokens"
    )


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
        _check_range(f"{param} (bytes)", size_bytes, 0, PARAMETER_BYTES_MAX, param=param)
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


def _check(
    request: GenerationRequest,
    limits: ModelLimits,
    prompt_param: str,
    output_tokens_param: str,
    output_tokens_max: int | None,
    output_tokens_default: int | None = None,
) -> Generation:
    if output_tokens_max is not None and output_tokens_max < 1:
        raise invalid(
            output_tokens_param, f"{output_tokens_param} is {_shown(output_tokens_max)}, must be at least 1"
        )
    stream = bool(request.stream)
    if request.stream_options is not None and not stream:
        raise invalid("stream_options", "stream_options is only allowed where stream is true")
    if request.user is not None:
        _check_range("user (characters)", len(request.user), 0, USER_CHARS_MAX, param="user")
    client_stop_ids = tuple(request.stop_token_ids or ())
    _check_count("stop_token_ids", client_stop_ids, STOP_TOKEN_IDS_MAX, minimum=0)
    _check_token_ids("stop_token_ids", client_stop_ids, limits)
    end_token_ids = () if request.ignore_eos else limits.end_token_ids
    return Generation(
        stream=stream,
        include_usage=request.stream_options is not None and bool(request.stream_options.include_usage),
        return_token_ids=bool(request.return_token_ids),
        prompt_param=prompt_param,
        output_tokens_param=output_tokens_param,
        output_tokens_max=output_tokens_max,
        output_tokens_default=output_tokens_default,
        output_tokens_min=_in_range("min_tokens", request.min_tokens, 0, 0, limits.context_tokens_max),
        temperature=_in_range("temperature", request.temperature, 1.0, 0.0, TEMPERATURE_MAX),
        top_p=_top_p(request.top_p),
        top_k=max(0, _in_range("top_k", request.top_k, 0, -1, TOP_K_MAX)),
        seed=_seed(request.seed),
        stop=_stop_strings(request.stop),
        stop_token_ids=tuple(dict.fromkeys((*end_token_ids, *client_stop_ids))),
    )


def _top_p(value: float | None) -> float:
    top_p = _in_range("top_p", value, 1.0, 0.0, 1.0)
    if top_p == 0.0:
        raise invalid("top_p", "top_p is 0, must be greater than 0 and at most 1")
    return top_p


def _seed(value: int | None) -> int | None:
    """Samplers take seeds of 63 bits; a negative one is folded into them."""
    if value is None:
        return None
    _check_range("seed", value, SEED_MIN, SEED_MAX)
    return value & SEED_MAX


def _stop_strings(value: str | list[str] | None) -> tuple[str, ...]:
    if value is None:
        return ()
    strings = (value,) if isinstance(value, str) else tuple(dict.fromkeys(value))
    _check_count("stop", strings, STOP_STRINGS_MAX, minimum=0)
    for string in strings:
        _check_range("stop (characters)", len(string), 1, STOP_STRING_CHARS_MAX, param="stop")
    return strings


NumberT = TypeVar("NumberT", int, float)


def _in_range(param: str, value: NumberT | None, default: NumberT, low: NumberT, high: NumberT) -> NumberT:
    if value is None:
        return default
    _check_range(param, value, low, high)
    return value


def _check_range(what: str, value: float, low: float, high: float, *, param: str | None = None) -> None:
    if not low <= value <= high:
        raise invalid(param or what, f"{what} is {_shown(value)}, must be {low} to {high}")


def _check_count(param: str, values: Sequence[object], maximum: int, *, minimum: int = 1) -> None:
    if not minimum <= len(values) <= maximum:
        raise invalid(param, f"{param} has {len(values)} entries, must have {minimum} to {maximum}")


def _check_token_ids(param: str, token_ids: Sequence[int], limits: ModelLimits) -> None:
    if not token_ids or (min(token_ids) >= 0 and max(token_ids) < limits.vocabulary_tokens):
        return
    index, token_id = next(
        (index, token_id)
        for index, token_id in enumerate(token_ids)
        if not 0 <= token_id < limits.vocabulary_tokens
    )
    what = f"{param}[{index}]"
    raise invalid(what, f"{what} is {_shown(token_id)}, must be 0 to {limits.vocabulary_tokens - 1}")


def _check_prompt_fits(param: str, prompt_tokens: int, limits: ModelLimits) -> None:
    if prompt_tokens < 1:
        raise invalid(param, "the prompt has no tokens, must have at least one")
    if prompt_tokens >= limits.context_tokens_max:
        raise _context_exceeded(
            param,
            f"the prompt has {prompt_tokens} tokens, which leaves no room for an answer in the context "
            f"of {limits.context_tokens_max} tokens",
        )


def _shown(value: float) -> str:
    """For messages; Python refuses to print integers of thousands of digits."""
    return str(value) if -(2**64) < value < 2**64 else "beyond 64 bits"


def _context_exceeded(param: str, message: str) -> ApiError:
    return invalid(param, message, "context_length_exceeded")
