"""A request's conversation as one text, by the model's template. Pure.

Owns which way the template is told of tools, and where the text ends: before an answer that begins, or
within one that goes on.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from gateway.api.api_errors import invalid
from gateway.api.request_types import AssistantMessage, ChatMessage, ChatRequest, TokenizeRequest
from gateway.api.tools import ToolUse
from gateway.chat_messages import plain_messages, told_in_words
from gateway.text.chat_template import RESERVED_VARIABLES, ChatTemplate, TemplateError


@dataclass(frozen=True, slots=True)
class TemplateOptions:
    """`begin_answer`: the text ends with what comes before an answer. `continue_last`: it ends with the last
    message, an assistant's, which the answer goes on. `variables` are the client's for the template."""

    begin_answer: bool = True
    continue_last: bool = False
    variables: Mapping[str, object] = field(default_factory=dict)


AS_USUAL = TemplateOptions()

_CONTINUE = "continue_final_message"
_HERE = "\ue0f0here\ue0f1"
"""Marks an end in a rendered text: characters for private use, which no template looks at."""


def template_options(request: ChatRequest | TokenizeRequest) -> TemplateOptions:
    """What the request says of rendering. Raises ApiError."""
    variables = request.chat_template_kwargs or {}
    for name in variables:
        if name in RESERVED_VARIABLES:
            param = f"chat_template_kwargs.{name}"
            raise invalid(param, f"{param} is the server's; it cannot be given")
    continue_last = bool(request.continue_final_message)
    if continue_last:
        _check_continued(request)
    begin_answer = not continue_last and request.add_generation_prompt is not False
    return TemplateOptions(begin_answer, continue_last, variables)


def _check_continued(request: ChatRequest | TokenizeRequest) -> None:
    if request.add_generation_prompt:
        raise invalid(_CONTINUE, f"{_CONTINUE} and add_generation_prompt are both true; give only one")
    last = request.messages[-1] if request.messages else None
    if not isinstance(last, AssistantMessage) or not last.content or last.tool_calls:
        raise invalid(
            _CONTINUE, f"{_CONTINUE} is true, but the last message is no assistant's with content alone"
        )


def render_chat(
    template: ChatTemplate,
    messages: Sequence[ChatMessage],
    tools: ToolUse | None,
    options: TemplateOptions = AS_USUAL,
) -> str:
    """Raises ApiError where the template refuses."""
    plain = plain_messages(messages, template.tool_format)
    offered = [] if tools is None else tools.template_tools
    if not template.knows_tools:
        plain, offered = told_in_words(plain, offered), []
    if options.continue_last:
        plain[-1] = plain[-1] | {"content": f"{plain[-1]['content']}{_HERE}"}
    try:
        rendered = template.render(
            plain, offered or None, begin_answer=options.begin_answer, variables=options.variables
        )
    except TemplateError as error:
        raise invalid("messages", f"the model's chat template refuses the messages: {error}") from error
    if not options.continue_last:
        return rendered
    # What the template puts behind the last message is left out.
    until_last, here, _ = rendered.rpartition(_HERE)
    if not here:
        raise invalid(_CONTINUE, "the model's chat template leaves out the last message: it cannot go on")
    return until_last
