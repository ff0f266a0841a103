"""How models write calls of tools: the formats, what stands around the calls in each, and how a chat template
shows which one its model was trained on. Pure.

Formats that no template here is known by (those of XML, say) come out as words.
"""

from dataclasses import dataclass
from enum import StrEnum


class ToolFormat(StrEnum):
    HERMES = "hermes"
    """`<tool_call>{"name": …, "arguments": …}</tool_call>`: Qwen 2.5 and 3, Hermes, and whoever is told of
    tools in our own words."""
    LLAMA3_JSON = "llama3_json"
    """`{"name": …, "parameters": …}` as the whole answer; several divided by `;`."""
    MISTRAL = "mistral"
    """`[TOOL_CALLS] [{"name": …, "arguments": …}, …]`."""
    MISTRAL_ARGS = "mistral_args"
    """`[TOOL_CALLS]name[ARGS]{…}` for each call: Mistral's models since 2025."""


@dataclass(frozen=True, slots=True)
class CallLayout:
    """Calls stand as `marker opening object separator object … closing`, with white space in between.

    `opening` and `separator` are one character or nothing. Without a separator a group has one call; with
    one, it may be missing. `bare`: the first group may stand at the answer's beginning without a marker.
    `marker` empty: nowhere else can one stand. `named`: no object has the name, each call stands as
    `marker name mark object`, where the object is its arguments and the mark may be missing. `marks`: what
    else stands around calls and may be a special token. `calls_only`: the answer was held to calls, so what
    no call came of before it was cut is said to nobody."""

    marker: str
    opening: str = ""
    separator: str = ""
    closing: str = ""
    bare: bool = False
    named: bool = False
    marks: tuple[str, ...] = ()
    calls_only: bool = False


LAYOUT_OF = {
    ToolFormat.HERMES: CallLayout("<tool_call>", closing="</tool_call>"),
    ToolFormat.LLAMA3_JSON: CallLayout("<|python_tag|>", separator=";", bare=True),
    ToolFormat.MISTRAL: CallLayout("[TOOL_CALLS]", opening="[", separator=",", closing="]"),
    ToolFormat.MISTRAL_ARGS: CallLayout("[TOOL_CALLS]", named=True, marks=("[ARGS]", "[CALL_ID]")),
}
MISTRAL_FORMATS = frozenset({ToolFormat.MISTRAL, ToolFormat.MISTRAL_ARGS})
MISTRAL_ID_CHARS = 9
"""Mistral's templates refuse ids of calls that are not exactly so many letters and digits."""
FORCED_LAYOUT = CallLayout("", opening="[", separator=",", closing="]", bare=True, calls_only=True)
"""What `gateway.api.tool_schema.calls_schema` allows."""


def detect(template_source: str) -> ToolFormat:
    """The format that a template teaches which knows tools; HERMES where it is none of these."""
    if LAYOUT_OF[ToolFormat.MISTRAL].marker in template_source:
        return ToolFormat.MISTRAL_ARGS if "[ARGS]" in template_source else ToolFormat.MISTRAL
    if LAYOUT_OF[ToolFormat.HERMES].marker in template_source:
        return ToolFormat.HERMES
    llama = LAYOUT_OF[ToolFormat.LLAMA3_JSON].marker
    if llama in template_source or '"parameters": dictionary of argument name' in template_source:
        return ToolFormat.LLAMA3_JSON
    return ToolFormat.HERMES


def markers(tool_format: ToolFormat) -> frozenset[str]:
    """What stands around calls: to be seen in the text also where it is a special token."""
    layout = LAYOUT_OF[tool_format]
    return frozenset(filter(None, (layout.marker, layout.closing, *layout.marks)))
