"""Tools that a request offers, and what it asks of them: checked, as frozen data. Pure.

Knows neither how a model is told of them (`gateway.chat_messages`) nor how it writes a call
(`gateway.text.call_layouts`).
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

import msgspec

from gateway.api import tool_grammar
from gateway.api.api_errors import ApiError, invalid
from gateway.api.parameter_limits import TOOL_NAME_PATTERN
from gateway.api.ranges import check_range
from gateway.api.request_types import ChatRequest
from gateway.api.structure import NamedStructure, structure_of
from gateway.api.tool_schema import SchemaTooDeepError, calls_schema
from gateway.api.tool_types import FunctionDefinition, NamedToolChoice, ToolDefinition
from gateway.text.call_layouts import ToolFormat
from policy.core import STRUCTURE_BYTES_MAX, StructureKind, StructureSpec
from structures.grammar import GRAMMAR_BYTES_MAX

_JSON_KINDS = (StructureKind.JSON_SCHEMA, StructureKind.JSON_OBJECT)
NO_PARAMETERS = '{"type":"object","properties":{}}'


class ToolChoice(StrEnum):
    """Who decides whether a tool is called. There is no `none`: such a request has no ToolUse."""

    AUTO = "auto"
    REQUIRED = "required"
    NAMED = "named"


@dataclass(frozen=True, slots=True)
class Tool:
    """`parameters` is the JSON of a schema, an object."""

    name: str
    description: str | None
    parameters: str

    @property
    def schema(self) -> dict[str, object]:
        return msgspec.json.decode(self.parameters, type=dict[str, object])

    @property
    def template_form(self) -> dict[str, object]:
        """As chat templates read it."""
        described = {} if self.description is None else {"description": self.description}
        function = {"name": self.name, **described, "parameters": self.schema}
        return {"type": "function", "function": function}


@dataclass(frozen=True, slots=True)
class ToolUse:
    """At least one tool, no two of one name. `named` is the tool to be called where `choice` is NAMED. Not
    `parallel`: at most one call. `structure` is what the answer is held to: the parameters of the named tool,
    or a list of calls of any tools; where the model decides, calls or the form that the request asks for,
    None where it asks for none."""

    tools: tuple[Tool, ...]
    choice: ToolChoice
    named: str | None = None
    parallel: bool = True
    structure: NamedStructure | None = None

    @property
    def names(self) -> frozenset[str]:
        return frozenset(tool.name for tool in self.tools)

    @property
    def chars(self) -> int:
        """About how long the tools are where a model is told of them."""
        return sum(len(tool.parameters) + len(tool.description or "") for tool in self.tools)

    @property
    def template_tools(self) -> list[dict[str, object]]:
        return [tool.template_form for tool in self.tools]


def tool_use_of(request: ChatRequest, tool_format: ToolFormat = ToolFormat.HERMES) -> ToolUse | None:
    """What the request's `tools`, `tool_choice` and `parallel_tool_calls` ask for; None where no tool can
    be called. The model writes calls in `tool_format`. Raises ApiError."""
    choice = request.tool_choice
    if not request.tools:
        if choice not in (None, "none", "auto"):
            raise invalid("tool_choice", "tool_choice asks for a call, but there are no tools")
        return None
    tools = _tools(request.tools)
    parallel = request.parallel_tool_calls is not False
    form = structure_of(request)
    match choice:
        case "none":
            return None
        case None | "auto":
            structure = None if form is None else _form_or_calls(form, tools, tool_format, parallel)
            return ToolUse(tools, ToolChoice.AUTO, parallel=parallel, structure=structure)
        case NamedToolChoice(_, function):
            _refuse_form(form, "a function")
            structure = _named_structure(tools, function.name)
            return ToolUse(tools, ToolChoice.NAMED, function.name, parallel, structure)
        case _:
            _refuse_form(form, "required")
            structure = _required_structure(tools, parallel)
            return ToolUse(tools, ToolChoice.REQUIRED, parallel=parallel, structure=structure)


def offered(definitions: Sequence[ToolDefinition] | None) -> ToolUse | None:
    """Tools that the model may call or not; None where there are none. Raises ApiError."""
    return ToolUse(_tools(definitions), ToolChoice.AUTO) if definitions else None


def _tools(definitions: Sequence[ToolDefinition]) -> tuple[Tool, ...]:
    tools = tuple(
        _tool(f"tools[{index}].function", definition.function) for index, definition in enumerate(definitions)
    )
    first_with: dict[str, int] = {}
    for index, tool in enumerate(tools):
        first = first_with.setdefault(tool.name, index)
        if first != index:
            param = f"tools[{index}].function.name"
            raise invalid(param, f"{param} is {tool.name!r}, which tools[{first}] has already")
    return tools


def _tool(param: str, function: FunctionDefinition) -> Tool:
    # As a search, which is how types are checked, the pattern lets a line break at the end pass.
    if not re.fullmatch(TOOL_NAME_PATTERN, function.name):
        raise invalid(f"{param}.name", f"{param}.name is {function.name!r}, must match {TOOL_NAME_PATTERN!r}")
    return Tool(function.name, function.description, _parameters(f"{param}.parameters", function.parameters))


def _parameters(param: str, raw: msgspec.Raw) -> str:
    written = bytes(raw)
    if written in (b"", b"null"):
        return NO_PARAMETERS
    check_range(f"{param} (bytes)", len(written), 0, STRUCTURE_BYTES_MAX, param=param)
    try:
        msgspec.json.decode(written, type=dict[str, object])
        return written.decode()
    except (msgspec.ValidationError, UnicodeDecodeError, RecursionError) as error:
        raise invalid(param, f"{param} must be a JSON schema, an object: {error}") from error


def _named_structure(tools: Sequence[Tool], name: str) -> NamedStructure:
    for index, tool in enumerate(tools):
        if tool.name == name:
            param = f"tools[{index}].function.parameters"
            return NamedStructure(param, StructureSpec(StructureKind.JSON_SCHEMA, tool.parameters))
    raise invalid("tool_choice", f"tool_choice names the function {name[:128]!r}, which no tool has")


def _required_structure(tools: Sequence[Tool], parallel: bool) -> NamedStructure:
    try:
        schema = calls_schema(_functions(tools), parallel=parallel)
    except SchemaTooDeepError as error:
        raise _too_deep(error) from error
    text = msgspec.json.encode(schema).decode()
    check_range(
        "tools (bytes of their schemas together)", len(text.encode()), 0, STRUCTURE_BYTES_MAX, param="tools"
    )
    return NamedStructure("tools", StructureSpec(StructureKind.JSON_SCHEMA, text))


def _form_or_calls(
    form: NamedStructure, tools: Sequence[Tool], tool_format: ToolFormat, parallel: bool
) -> NamedStructure:
    """What holds an answer to the form where it is no call."""
    if form.spec.kind not in _JSON_KINDS or not tool_grammar.can_be_written(tool_format):
        raise _form_and_calls(form, "auto")
    schema = _json_schema(form)
    try:
        text = tool_grammar.form_or_calls(schema, _functions(tools), tool_format, parallel=parallel)
    except SchemaTooDeepError as error:
        raise _too_deep(error) from error
    except RecursionError as error:
        raise invalid(form.param, f"{form.param} is nested too deep: {error}") from error
    size_bytes = len(text.encode())
    check_range(f"{form.param} and tools (bytes)", size_bytes, 0, GRAMMAR_BYTES_MAX, param=form.param)
    return NamedStructure(form.param, StructureSpec(StructureKind.GRAMMAR, text))


def _json_schema(form: NamedStructure) -> dict[str, object]:
    if form.spec.kind is StructureKind.JSON_OBJECT:
        return {"type": "object"}
    try:
        return msgspec.json.decode(form.spec.text, type=dict[str, object])
    except (msgspec.MsgspecError, RecursionError) as error:
        raise invalid(form.param, f"{form.param} must be a JSON schema, an object: {error}") from error


def _functions(tools: Sequence[Tool]) -> list[tuple[str, dict[str, object]]]:
    return [(tool.name, tool.schema) for tool in tools]


def _too_deep(error: SchemaTooDeepError) -> ApiError:
    return invalid("tools", f"the schema of a tool's parameters {error}")


def _refuse_form(form: NamedStructure | None, choice: str) -> None:
    if form is not None:
        raise _form_and_calls(form, choice)


def _form_and_calls(form: NamedStructure, choice: str) -> ApiError:
    return invalid(
        form.param,
        f"{form.param} and tools with tool_choice {choice} are both given; an answer in that form calls no "
        "tool: give tool_choice none, or no form",
    )
