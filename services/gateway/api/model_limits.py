"""What the served model allows of any request, and the refusals that say so. Pure."""

from dataclasses import dataclass

from gateway.api.api_errors import ApiError, invalid
from gateway.api.ranges import shown
from gateway.text.call_layouts import ToolFormat

CONTEXT_EXCEEDED = "context_length_exceeded"


@dataclass(frozen=True, slots=True)
class ModelLimits:
    """What the served model allows: token ids run from 0 to `vocabulary_tokens` - 1; prompt and answer
    together hold at most `context_tokens_max` tokens; `end_token_ids` end an answer; calls of tools are
    written in `tool_format`."""

    name: str
    context_tokens_max: int
    vocabulary_tokens: int
    end_token_ids: tuple[int, ...]
    tool_format: ToolFormat = ToolFormat.HERMES


def check_prompt_fits(param: str, prompt_tokens: int, limits: ModelLimits) -> None:
    """Raises ApiError where a prompt of so many tokens leaves no room for an answer."""
    if prompt_tokens < 1:
        raise invalid(param, "the prompt has no tokens, must have at least one")
    if prompt_tokens >= limits.context_tokens_max:
        raise prompt_too_long(
            param,
            f"the prompt has {prompt_tokens} tokens, which leaves no room for an answer in the context "
            f"of {limits.context_tokens_max} tokens",
        )


def text_too_long(param: str, chars: int, limits: ModelLimits) -> ApiError:
    """For a text so long that no tokenising is needed to see that it exceeds the context."""
    return prompt_too_long(
        param, f"a prompt of {chars} characters exceeds the context of {limits.context_tokens_max} tokens"
    )


def prompt_too_long(param: str, message: str) -> ApiError:
    """LangChain and litellm, which then cut or send elsewhere, know this error by these first words alone."""
    return invalid(param, f"prompt is too long: {message}", CONTEXT_EXCEEDED)


def answer_too_long(param: str, output_tokens: int, prompt_tokens: int, room: str) -> ApiError:
    """For an answer that may be longer than what the prompt leaves of `room`: the prompt is not at fault."""
    message = (
        f"{param} is too large: {shown(output_tokens)}, which with the {prompt_tokens} tokens of the prompt "
        f"exceeds {room}"
    )
    return invalid(param, message, CONTEXT_EXCEEDED)
