"""A conversation as chat templates read it: plain dictionaries, the way transformers passes them.

Templates that know nothing of tools get them told in words: the form is Hermes's, which Qwen and many others
were trained on.
"""

import json
from collections.abc import Sequence

import msgspec

from gateway.api.request_types import AssistantMessage, ChatMessage, Content, ToolMessage
from gateway.api.tool_types import ToolCall
from gateway.text.call_layouts import MISTRAL_FORMATS, MISTRAL_ID_CHARS, ToolFormat

TemplateMessage = dict[str, object]

_TOOLS_IN_WORDS = """\
# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
{signatures}
</tools>

For each function call, return a json object with function name and arguments within <tool_call></tool_call> \
XML tags:
<tool_call>
{{"name": <function-name>, "arguments": <args-json-object>}}
</tool_call>"""


def content_chars(message: ChatMessage) -> int:
    """How much of a prompt the message is, at least."""
    content = message.content or ""
    chars = len(content) if isinstance(content, str) else sum(len(part.text) for part in content)
    if isinstance(message, AssistantMessage):
        chars += sum(len(call.function.arguments) for call in message.tool_calls or ())
    return chars


def plain_messages(messages: Sequence[ChatMessage], tool_format: ToolFormat) -> list[TemplateMessage]:
    """For templates that know tools."""
    return [_plain(each, tool_format) for each in messages]


def told_in_words(
    messages: Sequence[TemplateMessage], tools: Sequence[dict[str, object]]
) -> list[TemplateMessage]:
    """Plain messages for templates that know none: tools in the system message, calls in the assistant's
    words, their results in the user's, those that follow each other in one message."""
    told: list[TemplateMessage] = [_system_with(messages, tools)] if tools else []
    system_told = bool(tools) and _is_system(messages)
    results: list[str] = []
    for message in messages[1:] if system_told else messages:
        if message["role"] == "tool":
            results.append(f"<tool_response>\n{message['content']}\n</tool_response>")
            continue
        told += _user_with(results)
        results.clear()
        told.append(_with_calls_in_words(message))
    return told + _user_with(results)


def _plain(message: ChatMessage, tool_format: ToolFormat) -> TemplateMessage:
    """`developer` is the newer name of `system`."""
    role = "system" if message.role == "developer" else message.role
    plain: TemplateMessage = {"role": role, "content": _text(message.content)}
    if message.name is not None:
        plain["name"] = message.name
    if isinstance(message, ToolMessage):
        plain["tool_call_id"] = _call_id(message.tool_call_id, tool_format)
    if isinstance(message, AssistantMessage) and message.tool_calls:
        plain["tool_calls"] = [_plain_call(call, tool_format) for call in message.tool_calls]
    return plain


def _text(content: Content | None) -> str:
    """Parts are lines. Nothing is an empty text: templates put it after others."""
    if content is None or isinstance(content, str):
        return content or ""
    return "\n".join(part.text for part in content)


def _plain_call(call: ToolCall, tool_format: ToolFormat) -> dict[str, object]:
    function = {"name": call.function.name, "arguments": _arguments(call.function.arguments)}
    return {"id": _call_id(call.id, tool_format), "type": "function", "function": function}


def _arguments(written: str) -> dict[str, object] | str:
    """As an object, or as they are where they were cut: a conversation may go on from there."""
    if not written.strip():
        return {}
    try:
        return msgspec.json.decode(written, type=dict[str, object])
    except (msgspec.MsgspecError, RecursionError, UnicodeEncodeError):
        return written


def _call_id(given: str, tool_format: ToolFormat) -> str:
    """As the model's template takes it, the same for a call and its result: ids come from other servers
    too, and Mistral's templates refuse all but their own."""
    if tool_format not in MISTRAL_FORMATS:
        return given
    letters_and_digits = "".join(filter(str.isalnum, given.encode("ascii", "ignore").decode()))
    return letters_and_digits[-MISTRAL_ID_CHARS:].rjust(MISTRAL_ID_CHARS, "0")


def _is_system(messages: Sequence[TemplateMessage]) -> bool:
    return bool(messages) and messages[0]["role"] == "system"


def _system_with(messages: Sequence[TemplateMessage], tools: Sequence[dict[str, object]]) -> TemplateMessage:
    signatures = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
    words = _TOOLS_IN_WORDS.format(signatures=signatures)
    if not _is_system(messages):
        return {"role": "system", "content": words}
    return messages[0] | {"content": f"{messages[0]['content']}\n\n{words}"}


def _with_calls_in_words(message: TemplateMessage) -> TemplateMessage:
    calls = message.get("tool_calls")
    if not isinstance(calls, list):
        return message
    content = [str(message["content"])] if message["content"] else []
    for call in calls:
        # Name and arguments, in this order.
        content.append(f"<tool_call>\n{json.dumps(call['function'], ensure_ascii=False)}\n</tool_call>")
    rest = {key: value for key, value in message.items() if key != "tool_calls"}
    return rest | {"content": "\n".join(content)}


def _user_with(results: Sequence[str]) -> list[TemplateMessage]:
    return [{"role": "user", "content": "\n".join(results)}] if results else []
