"""Who reads the calls of an answer: by what the request asks of tools, and by how the model writes calls."""

import secrets
import string
from collections.abc import Callable

from gateway.api.tools import ToolChoice, ToolUse
from gateway.text.call_layouts import FORCED_LAYOUT, LAYOUT_OF, MISTRAL_FORMATS, MISTRAL_ID_CHARS, ToolFormat
from gateway.text.call_parser import CallParser
from gateway.text.tool_calls import CallArguments, CallBegun, ToolParser, ToolPiece
from policy.core import FinishReason

_LETTERS_AND_DIGITS = string.ascii_letters + string.digits


def tool_parser(use: ToolUse, tool_format: ToolFormat) -> ToolParser:
    """A parser for one answer to a request that uses tools so."""
    new_id = _mistral_id if tool_format in MISTRAL_FORMATS else _call_id
    if use.named is not None:
        return NamedCallParser(use.named, new_id)
    forced = use.choice is ToolChoice.REQUIRED
    layout = FORCED_LAYOUT if forced else LAYOUT_OF[tool_format]
    return CallParser(layout, use.names, parallel=use.parallel, new_id=new_id)


class NamedCallParser:
    """A `ToolParser` of an answer that is held to the parameters of one function: all of it is arguments.

    OpenAI's API ends such an answer with `stop`, not with `tool_calls`, and so do vLLM's and this one.
    """

    complete = False

    def __init__(self, name: str, new_id: Callable[[], str]) -> None:
        self._name = name
        self._new_id = new_id
        self.called = False

    def finish_reason(self, reason: FinishReason) -> str:
        return reason

    def feed(self, text: str) -> tuple[ToolPiece, ...]:
        if not text:
            return ()
        return (*self._begun(), CallArguments(0, text))

    def finish(self) -> tuple[ToolPiece, ...]:
        return self._begun()

    def _begun(self) -> tuple[ToolPiece, ...]:
        if self.called:
            return ()
        self.called = True
        return (CallBegun(0, self._new_id(), self._name),)


def _call_id() -> str:
    return f"call_{secrets.token_hex(12)}"


def _mistral_id() -> str:
    return "".join(secrets.choice(_LETTERS_AND_DIGITS) for _ in range(MISTRAL_ID_CHARS))
