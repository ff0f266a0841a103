"""A request checked: structs in, typed parameters out, or a 400 that names parameter and limit.

Pure. Owns what goes with what, and what the served model allows; ranges that hold for every model are in
`gateway.api.request_types`. Knows neither HTTP nor how text becomes tokens.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import TypeVar

from gateway.api.api_errors import MODEL_NOT_FOUND, ApiError, invalid
from gateway.api.model_limits import ModelLimits, answer_too_long, check_prompt_fits
from gateway.api.parameter_limits import SEED_MAX, TOKEN_ID_DIGITS_MAX
from gateway.api.ranges import check_range, check_token_ids
from gateway.api.request_types import ChatRequest, CompletionRequest, GenerationRequest, StreamOptions
from gateway.api.structure import NamedStructure, structure_of
from gateway.api.tools import ToolUse, tool_use_of
from gateway.api.urgency import Urgency, urgency_of
from policy.core import SamplingParams
from policy.sampling_limits import LOGIT_BIAS_MAX, LOGIT_BIAS_MIN, STOP_TOKEN_IDS_MAX

NO_HEADERS: Mapping[str, str] = MappingProxyType({})
COMPLETION_TOKENS_DEFAULT = 16
"""What OpenAI's text completions generate where nobody says; a chat answers as long as there is room."""

ValueT = TypeVar("ValueT", int, float)


@dataclass(frozen=True, slots=True)
class Generation:
    """A request's checked parameters, all but the prompt. `output_tokens_max` None: the client did not say,
    then `output_tokens_default`, and without that as many as fit. The `_param` fields are what the client
    called these, for errors.

    `answers` to each prompt; `logprobs` as in SamplingParams: 0 of the chosen token, n of the n most
    probable too. `echo`: the prompt's text comes before the answer's. `keep_special_tokens`: special tokens
    are part of the text. `tools`: what may be called; the form of forced calls is in `structure`."""

    stream: bool
    include_usage: bool
    continuous_usage: bool
    return_token_ids: bool
    prompt_param: str
    output_tokens_param: str
    output_tokens_max: int | None
    output_tokens_default: int | None
    output_tokens_min: int
    answers: int
    logprobs: int | None
    echo: bool
    keep_special_tokens: bool
    cache_salt: str
    tools: ToolUse | None
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
    tools = tool_use_of(request, limits.tool_format)
    asked = _Asked(
        prompt_param="messages",
        output_tokens_param="max_tokens",
        output_tokens_max=request.max_tokens,
        logprobs=(request.top_logprobs or 0) if request.logprobs else None,
        structure=structure_of(request) if tools is None or tools.structure is None else tools.structure,
        tools=tools,
    )
    if request.top_logprobs and not request.logprobs:
        raise invalid("top_logprobs", f"top_logprobs is {request.top_logprobs}, but logprobs is not true")
    if request.max_completion_tokens is None:
        return _check(request, headers, limits, asked)
    if request.max_tokens not in (None, request.max_completion_tokens):
        raise invalid("max_tokens", "max_tokens and max_completion_tokens differ; give only one")
    return _check(
        request,
        headers,
        limits,
        replace(
            asked,
            output_tokens_param="max_completion_tokens",
            output_tokens_max=request.max_completion_tokens,
        ),
    )


def check_completion(
    request: CompletionRequest, limits: ModelLimits, headers: Mapping[str, str] = NO_HEADERS
) -> Generation:
    """The checked parameters of a text completion request, all but the prompts, which are
    `gateway.api.prompts`'s. Raises ApiError."""
    answers = request.n or 1
    if request.best_of not in (None, answers):
        message = f"best_of is {request.best_of}, must be n = {answers}: there is no choosing among answers"
        raise invalid("best_of", message, "unsupported_parameter")
    if request.echo and request.logprobs is not None:
        message = "logprobs and echo are both given: there are no logprobs of a prompt's tokens"
        raise invalid("logprobs", message, "unsupported_parameter")
    asked = _Asked(
        prompt_param="prompt",
        output_tokens_param="max_tokens",
        output_tokens_max=request.max_tokens,
        output_tokens_default=COMPLETION_TOKENS_DEFAULT,
        logprobs=request.logprobs,
        echo=bool(request.echo),
        structure=structure_of(request),
    )
    return _check(request, headers, limits, asked)


def sampling(
    generation: Generation, prompt_tokens: int, limits: ModelLimits, drawn_seed: int
) -> SamplingParams:
    """How the answer to a prompt of `prompt_tokens` is generated; `drawn_seed` where the client gave none.

    Raises ApiError `context_length_exceeded` where prompt and answer do not fit into the context. Only
    an answer's length that the client did not give is cut to what is left.
    """
    check_prompt_fits(generation.prompt_param, prompt_tokens, limits)
    room_tokens = limits.context_tokens_max - prompt_tokens
    if generation.output_tokens_max is None:
        output_tokens_max = min(room_tokens, generation.output_tokens_default or room_tokens)
    else:
        output_tokens_max = generation.output_tokens_max
    if output_tokens_max > room_tokens:
        room = f"the context of {limits.context_tokens_max} tokens"
        raise answer_too_long(generation.output_tokens_param, output_tokens_max, prompt_tokens, room)
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
        logprobs=generation.logprobs,
        structure=generation.structure.spec if generation.structure else None,
    )


@dataclass(frozen=True, slots=True)
class _Asked:
    """What chat and text completions say each in its own way."""

    prompt_param: str
    output_tokens_param: str
    output_tokens_max: int | None
    logprobs: int | None
    structure: NamedStructure | None
    output_tokens_default: int | None = None
    echo: bool = False
    tools: ToolUse | None = None


def _check(
    request: GenerationRequest, headers: Mapping[str, str], limits: ModelLimits, asked: _Asked
) -> Generation:
    stream = bool(request.stream)
    if request.stream_options is not None and not stream:
        raise invalid("stream_options", "stream_options is only allowed where stream is true")
    options = request.stream_options or StreamOptions()
    if options.continuous_usage_stats and not options.include_usage:
        message = "stream_options.continuous_usage_stats is only allowed where include_usage is true"
        raise invalid("stream_options", message)
    if request.min_tokens is not None:
        check_range("min_tokens", request.min_tokens, 0, limits.context_tokens_max)
    client_stop_ids = tuple(request.stop_token_ids or ())
    check_token_ids("stop_token_ids", client_stop_ids, limits.vocabulary_tokens)
    # An answer that is held to a form ends where the form is complete, and nowhere else.
    held = asked.structure is not None
    end_token_ids = limits.end_token_ids if held or not request.ignore_eos else ()
    stop_token_ids = tuple(dict.fromkeys((*end_token_ids, *client_stop_ids)))
    if len(stop_token_ids) > STOP_TOKEN_IDS_MAX:
        count = f"{len(stop_token_ids)} entries with the model's {len(end_token_ids)} end tokens"
        raise invalid("stop_token_ids", f"stop_token_ids has {count}, must have at most {STOP_TOKEN_IDS_MAX}")
    return Generation(
        stream=stream,
        include_usage=bool(options.include_usage),
        continuous_usage=bool(options.continuous_usage_stats),
        return_token_ids=bool(request.return_token_ids),
        prompt_param=asked.prompt_param,
        output_tokens_param=asked.output_tokens_param,
        output_tokens_max=asked.output_tokens_max,
        output_tokens_default=asked.output_tokens_default,
        output_tokens_min=0 if held else _or(request.min_tokens, 0),
        answers=_or(request.n, 1),
        logprobs=asked.logprobs,
        echo=asked.echo,
        keep_special_tokens=request.skip_special_tokens is False,
        cache_salt=request.cache_salt or "",
        tools=asked.tools,
        temperature=_or(request.temperature, 1.0),
        top_p=_or(request.top_p, 1.0),
        top_k=max(0, _or(request.top_k, 0)),
        min_p=_or(request.min_p, 0.0),
        repetition_penalty=_or(request.repetition_penalty, 1.0),
        presence_penalty=_or(request.presence_penalty, 0.0),
        frequency_penalty=_or(request.frequency_penalty, 0.0),
        logit_bias=_logit_bias(request.logit_bias, limits),
        seed=_seed(request.seed),
        stop=() if held else _stop_strings(request.stop),
        stop_token_ids=end_token_ids if held else stop_token_ids,
        structure=asked.structure,
        urgency=urgency_of(request, headers),
    )


def _or(value: ValueT | None, default: ValueT) -> ValueT:
    return default if value is None else value


def _seed(value: int | None) -> int | None:
    """Samplers take seeds of 63 bits; a negative one is folded into them."""
    return None if value is None else value & SEED_MAX


def _logit_bias(value: dict[str, float] | None, limits: ModelLimits) -> tuple[tuple[int, float], ...]:
    """By token id, which JSON has as a string."""
    biases: dict[int, float] = {}
    for key, bias in (value or {}).items():
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
    return (value,) if isinstance(value, str) else tuple(dict.fromkeys(value))
