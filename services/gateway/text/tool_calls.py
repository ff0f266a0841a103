"""What an answer consists of where tools may be called: words for the user, and calls.

Owns the pieces that a parser finds in an answer's text and their putting together; knows no format.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from policy.core import FinishReason

TOOL_CALLS_REASON = "tool_calls"
"""Why an answer ended, where it ended by itself and calls tools."""


@dataclass(frozen=True, slots=True)
class Spoken:
    text: str


@dataclass(frozen=True, slots=True)
class CallBegun:
    """`index` counts the calls of one answer from 0."""

    index: int
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """More of the arguments of the call that was begun last: JSON as the model wrote it, split anywhere."""

    index: int
    text: str


ToolPiece = Spoken | CallBegun | CallArguments


class ToolParser(Protocol):
    """Of one answer. The pieces of all calls joined are the same however the text was cut."""

    @property
    def called(self) -> bool:
        """A call has begun."""

    @property
    def complete(self) -> bool:
        """Nothing that follows would be shown: the one call that is allowed has been made."""

    def feed(self, text: str) -> tuple[ToolPiece, ...]:
        """What this text makes certain."""

    def finish(self) -> tuple[ToolPiece, ...]:
        """What was held back, once no text follows."""

    def finish_reason(self, reason: FinishReason) -> str:
        """What the client is told, where the answer ended for `reason`."""


@dataclass(frozen=True, slots=True)
class MadeCall:
    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class Said:
    """An answer as a whole."""

    content: str
    calls: tuple[MadeCall, ...]


def joined(pieces: Iterable[ToolPiece]) -> Said:
    """All pieces of one answer, put together."""
    content: list[str] = []
    begun: list[CallBegun] = []
    arguments: list[list[str]] = []
    for piece in pieces:
        match piece:
            case Spoken(text):
                content.append(text)
            case CallBegun():
                begun.append(piece)
                arguments.append([])
            case CallArguments(index, text):
                arguments[index].append(text)
    calls = (
        MadeCall(call.id, call.name, "".join(parts)) for call, parts in zip(begun, arguments, strict=True)
    )
    return Said("".join(content), tuple(calls))
