"""Tools in the shapes of OpenAI's API: what a request offers, what it asks of them, what messages carry.

Owns names, types and ranges; what goes with what is `gateway.api.tools`'.
"""

from typing import Annotated, Literal

import msgspec
from msgspec import UNSET, Meta, Raw, Struct, UnsetType

from gateway.api.parameter_limits import TOOL_DESCRIPTION_CHARS_MAX, TOOL_NAME_PATTERN, TOOLS_MAX

FunctionName = Annotated[str, Meta(pattern=TOOL_NAME_PATTERN)]


class FunctionDefinition(Struct, forbid_unknown_fields=True):
    """`parameters` is a JSON schema; absent or null: the function takes none. `strict` is accepted; only a
    call that `tool_choice` asks for is held to the schema, whatever `strict` says."""

    name: FunctionName
    description: Annotated[str, Meta(max_length=TOOL_DESCRIPTION_CHARS_MAX)] | None = None
    parameters: Annotated[Raw, Meta(extra_json_schema={"type": ["object", "null"]})] = msgspec.field(
        default_factory=Raw
    )
    strict: bool | None = None


class ToolDefinition(Struct, forbid_unknown_fields=True):
    type: Literal["function"]
    function: FunctionDefinition


Tools = Annotated[list[ToolDefinition], Meta(max_length=TOOLS_MAX)]


class ChosenFunction(Struct, forbid_unknown_fields=True):
    name: str


class NamedToolChoice(Struct, forbid_unknown_fields=True):
    type: Literal["function"]
    function: ChosenFunction


ToolChoiceParam = Literal["none", "auto", "required"] | NamedToolChoice


class CalledFunction(Struct, forbid_unknown_fields=True):
    """`arguments` is JSON as the model wrote it. `parsed_arguments` is what OpenAI's client keeps beside it
    and sends back; nobody reads it."""

    name: str
    arguments: str
    parsed_arguments: Raw | UnsetType = UNSET


class ToolCall(Struct, forbid_unknown_fields=True, kw_only=True):
    """A call in an assistant's message, in answers and sent back. `index` is what clients keep that put the
    message together from a stream."""

    index: int | UnsetType = UNSET
    id: str
    type: Literal["function"] = "function"
    function: CalledFunction


class FunctionDelta(Struct):
    arguments: str
    name: str | UnsetType = UNSET


class ToolCallDelta(Struct):
    """The first of a call has its id, type and name; what follows has more of its arguments."""

    index: int
    function: FunctionDelta
    id: str | UnsetType = UNSET
    type: Literal["function"] | UnsetType = UNSET
