"""How a model writes calls, known by its chat template, and who reads them.

Formats that no template here is known by (those of XML, say) come out as words.
"""

import secrets
import string
from enum import StrEnum

from gateway.tool_calls import ToolParser
from gateway.tool_parser import CallLayout, CallParser, NamedCallParser, new_call_id
from gateway.tools import ToolChoice, ToolUse

MISTRAL_ID_CHARS = 9
"""Mistral's templates refuse ids that are not exactly so many letters and digits."""
_LETTERS_AND_DIGITS = string.ascii_letters + string.digits


class ToolFormat(StrEnum):
    HERMES = "hermes"
    """`<tool_call>{"name": …, "arguments": …}</tool_call>`: Qwen 2.5 and 3, Hermes, and whoever is told of
    tools in our own words."""
    LLAMA3_JSON = "llama3_json"
    """`{"name": …, "parameters": …}` as the whole answer; several divided by `;`."""
    MISTRAL = "mistral"
    """`[TOOL_CALLS] [{"name": …, "arguments": …}, …]`."""


_LAYOUT_OF = {
    ToolFormat.HERMES: CallLayout("<tool_call>", closing="</tool_call>"),
    ToolFormat.LLAMA3_JSON: CallLayout("<|python_tag|>", separator=";", bare=True),
    ToolFormat.MISTRAL: CallLayout("[TOOL_CALLS]", opening="[", separator=",", closing="]"),
}
_FORCED_LAYOUT = CallLayout("", opening="[", separator=",", closing="]", bare=True)
"""What `gateway.tool_schema.calls_schema` allows."""


def detect(template_source: str) -> ToolFormat:
    """The format that the template teaches; HERMES where it teaches none that is known."""
    if _LAYOUT_OF[ToolFormat.MISTRAL].marker in template_source:
        return ToolFormat.MISTRAL
    if _LAYOUT_OF[ToolFormat.HERMES].marker in template_source:
        return ToolFormat.HERMES
    if "<|python_tag|>" in template_source or '"parameters": dictionary of argument name' in template_source:
        return ToolFormat.LLAMA3_JSON
    return ToolFormat.HERMES


def markers(tool_format: ToolFormat) -> frozenset[str]:
    """What stands around calls: to be seen in the text also where it is a special token."""
    layout = _LAYOUT_OF[tool_format]
    return frozenset(filter(None, (layout.marker, layout.closing)))


def tool_parser(use: ToolUse, tool_format: ToolFormat) -> ToolParser:
    """A parser for one answer to a request that uses tools so."""
    new_id = _mistral_id if tool_format is ToolFormat.MISTRAL else new_call_id
    if use.named is not None:
        return NamedCallParser(use.named, new_id=new_id)
    forced = use.choice is ToolChoice.REQUIRED
    layout = _FORCED_LAYOUT if forced else _LAYOUT_OF[tool_format]
    return CallParser(layout, use.names, parallel=use.parallel, new_id=new_id)


def _mistral_id() -> str:
    return "".join(secrets.choice(_LETTERS_AND_DIGITS) for _ in range(MISTRAL_ID_CHARS))
