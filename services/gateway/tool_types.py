"""Tools in the shapes of OpenAI's API: what a request offers, what it asks of them, what messages carry.

Names and types only; limits, and what goes with what, are `gateway.tools`'.
"""

from typing import Literal

from msgspec import UNSET, Raw, Struct, UnsetType


class FunctionDefinition(Struct, forbid_unknown_fields=True):
    """`parameters` is a JSON schema; absent or null: the function takes none. `strict` is accepted; only a
    call that `tool_choice` asks for is held to the schema, whatever `strict` says."""

    name: str
    description: str | None = None
    parameters: Raw = Raw()
    strict: bool | None = None


class ToolDefinition(Struct, forbid_unknown_fields=True):
    type: Literal["function"]
    function: FunctionDefinition


class ChosenFunction(Struct, forbid_unknown_fields=True):
    name: str


class NamedToolChoice(Struct, forbid_unknown_fields=True):
    type: Literal["function"]
    function: ChosenFunction


ToolChoiceParam = Literal["none", "auto", "required"] | NamedToolChoice


class CalledFunction(Struct, forbid_unknown_fields=True):
    """`arguments` is JSON as the model wrote it."""

    name: str
    arguments: str


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
