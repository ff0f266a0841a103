"""Prompts of text completions, which are a text, token ids, or a list of either, and tokens to be told as
text. Pure.

They come as JSON that nobody has looked into, as long as a body may be: what is too much is counted on the
bytes and refused before objects are made of it.
"""

import re
from typing import TypeVar

import msgspec

from gateway.api.api_errors import invalid
from gateway.api.body_errors import explained, not_json
from gateway.api.model_limits import CONTEXT_EXCEEDED, ModelLimits, check_prompt_fits
from gateway.api.parameter_limits import PROMPTS_MAX
from gateway.api.ranges import check_token_ids
from gateway.api.request_types import CompletionRequest, DetokenizeRequest

PromptT = TypeVar("PromptT", str, list[str], list[int], list[list[int]])

_HEAD = re.compile(rb"[ \t\r\n]*(?P<list>\[?)[ \t\r\n]*(?P<item>.?)", re.DOTALL)


def prompts_of(request: CompletionRequest, limits: ModelLimits) -> tuple[str | list[int], ...]:
    """Each a text, or token ids that are in the vocabulary and fit into the context. At least one, and with
    `n` answers to each no more than PROMPTS_MAX answers in all. Raises ApiError."""
    prompts = _decoded(bytes(request.prompt), limits)
    answers = len(prompts) * (request.n or 1)
    if answers > PROMPTS_MAX:
        raise invalid(
            "n", f"{len(prompts)} prompts with n = {request.n} are {answers} answers, at most {PROMPTS_MAX}"
        )
    return prompts


def tokens_of(request: DetokenizeRequest, limits: ModelLimits) -> list[int]:
    """Token ids to be told as text: in the vocabulary, no more than the context holds. Raises ApiError."""
    written = bytes(request.tokens)
    tokens = written.count(b",") + 1
    if tokens > limits.context_tokens_max:
        message = f"tokens has {tokens} entries, must have at most the context of {limits.context_tokens_max}"
        raise invalid("tokens", message, CONTEXT_EXCEEDED)
    token_ids = _read("tokens", written, list[int])
    check_token_ids("tokens", token_ids, limits.vocabulary_tokens)
    return token_ids


def _decoded(written: bytes, limits: ModelLimits) -> tuple[str | list[int], ...]:
    head = _HEAD.match(written)
    if head is None or not head["list"]:
        return (_read("prompt", written, str),)
    match head["item"]:
        case b'"':
            # An escaped quote ends no string, so that is never more than there are, nor less than half.
            _check_prompts((written.count(b'"') - written.count(b'\\"')) // 2)
            texts = _read("prompt", written, list[str])
            _check_prompts(len(texts))
            return tuple(texts)
        case b"[":
            end = written.find(b'"')
            _check_prompts(written.count(b"[", 0, len(written) if end < 0 else end) - 1)
            lists = _read("prompt", written, list[list[int]])
            for index, token_ids in enumerate(lists):
                _check_ids(f"prompt[{index}]", token_ids, limits)
            return tuple(lists)
        case b"]":
            raise invalid("prompt", "prompt has no entries, must have at least one")
        case _:
            # Counted before they are looked at: a prompt over the context is named as such.
            check_prompt_fits("prompt", written.count(b",") + 1, limits)
            token_ids = _read("prompt", written, list[int])
            _check_ids("prompt", token_ids, limits)
            return (token_ids,)


def _read(param: str, written: bytes, form: type[PromptT]) -> PromptT:
    try:
        return msgspec.json.decode(written, type=form)
    except msgspec.ValidationError as error:
        raise explained(error, {}, param) from error
    except (msgspec.MsgspecError, RecursionError) as error:
        raise not_json(str(error)) from error


def _check_prompts(prompts: int) -> None:
    if prompts > PROMPTS_MAX:
        raise invalid("prompt", f"prompt has more than {PROMPTS_MAX} entries, must have at most that many")


def _check_ids(param: str, token_ids: list[int], limits: ModelLimits) -> None:
    check_prompt_fits(param, len(token_ids), limits)
    check_token_ids(param, token_ids, limits.vocabulary_tokens)
