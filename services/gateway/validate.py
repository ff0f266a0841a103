"""A request checked: structs in, typed parameters out, or a 400 that names parameter and limit.

Pure. Owns the limits of the API, together with `ranges`, `structure` and `urgency`; knows neither HTTP nor
how text becomes tokens.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from gateway.api_errors import MODEL_NOT_FOUND, ApiError, invalid
from gateway.api_types import ChatRequest, CompletionRequest, GenerationRequest
from gateway.ranges import check_count, check_range, check_token_ids, in_range, shown
from gateway.structure import NamedStructure, structure_of
from gateway.urgency import Urgency, urgency_of
from policy.core import SamplingParams
from policy.sampling_limits import (
    LOGIT_BIAS_ENTRIES_MAX,
    LOGIT_BIAS_MAX,
    LOGIT_BIAS_MIN,
    PENALTY_MAX,
    PENALTY_MIN,
    REPETITION_PENALTY_MAX,
    REPETITION_PENALTY_MIN,
    TOP_K_MAX,
)

TEMPERATURE_MAX = 2.0
SEED_MIN, SEED_MAX = -(2**63), 2**63 - 1
STOP_STRINGS_MAX = 16
STOP_STRING_CHARS_MAX = 1024
STOP_TOKEN_IDS_MAX = 64
USER_CHARS_MAX = 512
TOKEN_ID_DIGITS_MAX = 10
NO_HEADERS: Mapping[str, str] = MappingProxyType({})
COMPLETION_TOKENS_DEFAULT = 16
"""What OpenAI's text completions generate where nobody says; a chat answers as long as there is room."""


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
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logit_bias: tuple[tuple[int, float], ...]
    seed: int | None
    stop: tuple[str, ...]
    stop_token_ids: tuple[int, ...]
    structure: NamedStructure | None
    urgency: Urgency


def check_model(name: str, limits: ModelLimits) -> None:
    if name != limits.name:
        message = f"the model {name[:128]!r} does not exist; this server has {limits.name!r}"
        raise ApiError(MODEL_NOT_FOUND, message, param="model")


def check_chat(
    request: ChatRequest, limits: ModelLimits, headers: Mapping[str, str] = NO_HEADERS
) -> Generation:
    """The checked parameters of a chat request. Raises ApiError."""
    param, output_tokens_max = "max_tokens", request.max_tokens
    if request.max_completion_tokens is not None:
        if request.max_tokens is not None and request.max_tokens != request.max_completion_tokens:
            raise invalid("max_tokens", "max_tokens and max_completion_tokens differ; give only one")
        param, output_tokens_max = "max_completion_tokens", request.max_completion_tokens
    return _check(request, headers, limits, "messages", param, output_tokens_max)


def check_completion(
    request: CompletionRequest, limits: ModelLimits, headers: Mapping[str, str] = NO_HEADERS
) -> Generation:
    """The checked parameters of a text completion request. Raises ApiError."""
    if isinstance(request.prompt, list):
        # Counted before they are looked at: a prompt over the context is named as such.
        _check_prompt_fits("prompt", len(request.prompt), limits)
        check_token_ids("prompt", request.prompt, limits.vocabulary_tokens)
    return _check(
        request, headers, limits, "prompt", "max_tokens", request.max_tokens, COMPLETION_TOKENS_DEFAULT
    )


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
            f"({shown(output_tokens_max)}) together exceed the context of "
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
        min_p=generation.min_p,
        repetition_penalty=generation.repetition_penalty,
        presence_penalty=generation.presence_penalty,
        frequency_penalty=generation.frequency_penalty,
        logit_bias=generation.logit_bias,
        structure=generation.structure.spec if generation.structure else None,
    )


def text_too_long(param: str, chars: int, limits: ModelLimits) -> ApiError:
    """For a text so long that no tokenising is needed to see that it exceeds the context."""
    return _context_exceeded(
        param, f"a prompt of {chars} characters exceeds the context of {limits.context_tokens_max} tokens"
    )


def _check(
    request: GenerationRequest,
    headers: Mapping[str, str],
    limits: ModelLimits,
    prompt_param: str,
    output_tokens_param: str,
    output_tokens_max: int | None,
    output_tokens_default: int | None = None,
) -> Generation:
    if output_tokens_max is not None and output_tokens_max < 1:
        raise invalid(
            output_tokens_param, f"{output_tokens_param} is {shown(output_tokens_max)}, must be at least 1"
        )
    stream = bool(request.stream)
    if request.stream_options is not None and not stream:
        raise invalid("stream_options", "stream_options is only allowed where stream is true")
    if request.user is not None:
        check_range("user (characters)", len(request.user), 0, USER_CHARS_MAX, param="user")
    client_stop_ids = tuple(request.stop_token_ids or ())
    check_count("stop_token_ids", client_stop_ids, STOP_TOKEN_IDS_MAX, minimum=0)
    check_token_ids("stop_token_ids", client_stop_ids, limits.vocabulary_tokens)
    structure = structure_of(request)
    # An answer that is held to a form ends where the form is complete: then, too, with an end token.
    end_token_ids = () if request.ignore_eos and structure is None else limits.end_token_ids
    return Generation(
        stream=stream,
        include_usage=request.stream_options is not None and bool(request.stream_options.include_usage),
        return_token_ids=bool(request.return_token_ids),
        prompt_param=prompt_param,
        output_tokens_param=output_tokens_param,
        output_tokens_max=output_tokens_max,
        output_tokens_default=output_tokens_default,
        output_tokens_min=in_range("min_tokens", request.min_tokens, 0, 0, limits.context_tokens_max),
        temperature=in_range("temperature", request.temperature, 1.0, 0.0, TEMPERATURE_MAX),
        top_p=_top_p(request.top_p),
        top_k=max(0, in_range("top_k", request.top_k, 0, -1, TOP_K_MAX)),
        min_p=in_range("min_p", request.min_p, 0.0, 0.0, 1.0),
        repetition_penalty=in_range(
            "repetition_penalty",
            request.repetition_penalty,
            1.0,
            REPETITION_PENALTY_MIN,
            REPETITION_PENALTY_MAX,
        ),
        presence_penalty=in_range(
            "presence_penalty", request.presence_penalty, 0.0, PENALTY_MIN, PENALTY_MAX
        ),
        frequency_penalty=in_range(
            "frequency_penalty", request.frequency_penalty, 0.0, PENALTY_MIN, PENALTY_MAX
        ),
        logit_bias=_logit_bias(request.logit_bias, limits),
        seed=_seed(request.seed),
        stop=_stop_strings(request.stop),
        stop_token_ids=tuple(dict.fromkeys((*end_token_ids, *client_stop_ids))),
        structure=structure,
        urgency=urgency_of(request, headers),
    )


def _top_p(value: float | None) -> float:
    top_p = in_range("top_p", value, 1.0, 0.0, 1.0)
    if top_p == 0.0:
        raise invalid("top_p", "top_p is 0, must be greater than 0 and at most 1")
    return top_p


def _seed(value: int | None) -> int | None:
    """Samplers take seeds of 63 bits; a negative one is folded into them."""
    if value is None:
        return None
    check_range("seed", value, SEED_MIN, SEED_MAX)
    return value & SEED_MAX


def _logit_bias(value: dict[str, float] | None, limits: ModelLimits) -> tuple[tuple[int, float], ...]:
    """By token id, which JSON has as a string."""
    entries = value or {}
    check_count("logit_bias", entries, LOGIT_BIAS_ENTRIES_MAX, minimum=0)
    biases: dict[int, float] = {}
    for key, bias in entries.items():
        if not (key.isascii() and key.isdecimal() and len(key) <= TOKEN_ID_DIGITS_MAX):
            raise invalid("logit_bias", f"logit_bias names {key[:32]!r}, must name token ids")
        token_id = int(key)
        check_range("token in logit_bias", token_id, 0, limits.vocabulary_tokens - 1, param="logit_bias")
        check_range(f"logit_bias of token {key}", bias, LOGIT_BIAS_MIN, LOGIT_BIAS_MAX, param="logit_bias")
        biases[token_id] = bias
    return tuple(biases.items())


def _stop_strings(value: str | list[str] | None) -> tuple[str, ...]:
    if value is None:
        return ()
    strings = (value,) if isinstance(value, str) else tuple(dict.fromkeys(value))
    check_count("stop", strings, STOP_STRINGS_MAX, minimum=0)
    for string in strings:
        check_range("stop (characters)", len(string), 1, STOP_STRING_CHARS_MAX, param="stop")
    return strings


def _check_prompt_fits(param: str, prompt_tokens: int, limits: ModelLimits) -> None:
    if prompt_tokens < 1:
        raise invalid(param, "the prompt has no tokens, must have at least one")
    if prompt_tokens >= limits.context_tokens_max:
        raise _context_exceeded(
            param,
            f"the prompt has {prompt_tokens} tokens, which leaves no room for an answer in the context "
            f"of {limits.context_tokens_max} tokens",
        )


def _context_exceeded(param: str, message: str) -> ApiError:
    return invalid(param, message, "context_length_exceeded")
