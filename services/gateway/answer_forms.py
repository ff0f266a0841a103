"""An answer in the two forms of the API: as one object, or as the events of a stream.

Pure: text and endings in, JSON bytes out. Knows no connection.
"""

from dataclasses import dataclass
from typing import Protocol

import msgspec
from msgspec import UNSET, UnsetType

from gateway.answer_types import (
    AnswerMessage,
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatDelta,
    PromptTokensDetails,
    TextChoice,
    TextCompletion,
    TokenIds,
    Usage,
)
from gateway.api_errors import ApiError
from gateway.outbox import Ending
from policy.core import FinishReason

DONE = b"data: [DONE]\n\n"


class AnswerForm(Protocol):
    """Each method but `whole` gives whole server-sent events, or nothing where there is nothing to say."""

    def whole(self, text: str, token_ids: list[int], ending: Ending) -> bytes: ...

    def opening(self) -> bytes: ...

    def delta(self, text: str, token_ids: list[int]) -> bytes: ...

    def closing(self, ending: Ending) -> bytes: ...


@dataclass(frozen=True, slots=True)
class Header:
    """What every object of one answer begins with. `created` in seconds since 1970."""

    id: str
    created: int
    model: str
    include_usage: bool
    return_token_ids: bool

    def token_ids(self, token_ids: list[int]) -> TokenIds:
        return token_ids if self.return_token_ids else UNSET

    @property
    def no_usage(self) -> UnsetType | None:
        """Clients that asked for usage find it null in all chunks but the last."""
        return None if self.include_usage else UNSET


class ChatForm:
    def __init__(self, header: Header) -> None:
        self._header = header

    def whole(self, text: str, token_ids: list[int], ending: Ending) -> bytes:
        header = self._header
        shown = header.token_ids(token_ids)
        choice = ChatChoice(0, AnswerMessage(text), ending.reason, token_ids=shown)
        completion = ChatCompletion(header.id, header.created, header.model, [choice], _usage(ending))
        return msgspec.json.encode(completion)

    def opening(self) -> bytes:
        return self._chunk(ChatDelta(role="assistant", content=""))

    def delta(self, text: str, token_ids: list[int]) -> bytes:
        shown = self._header.token_ids(token_ids)
        return self._chunk(ChatDelta(content=text), token_ids=shown) if text or shown else b""

    def closing(self, ending: Ending) -> bytes:
        header = self._header
        last = self._chunk(ChatDelta(), finish_reason=ending.reason)
        if not header.include_usage:
            return last
        usage = ChatChunk(header.id, header.created, header.model, [], usage=_usage(ending))
        return last + _event(usage)

    def _chunk(
        self, delta: ChatDelta, *, finish_reason: FinishReason | None = None, token_ids: TokenIds = UNSET
    ) -> bytes:
        header = self._header
        choice = ChatChunkChoice(0, delta, finish_reason, token_ids=token_ids)
        return _event(ChatChunk(header.id, header.created, header.model, [choice], usage=header.no_usage))


class CompletionForm:
    def __init__(self, header: Header) -> None:
        self._header = header

    def whole(self, text: str, token_ids: list[int], ending: Ending) -> bytes:
        header = self._header
        choice = TextChoice(0, text, ending.reason, token_ids=header.token_ids(token_ids))
        completion = TextCompletion(header.id, header.created, header.model, [choice], usage=_usage(ending))
        return msgspec.json.encode(completion)

    def opening(self) -> bytes:
        return b""

    def delta(self, text: str, token_ids: list[int]) -> bytes:
        shown = self._header.token_ids(token_ids)
        return self._chunk(text, token_ids=shown) if text or shown else b""

    def closing(self, ending: Ending) -> bytes:
        header = self._header
        last = self._chunk("", finish_reason=ending.reason)
        if not header.include_usage:
            return last
        usage = TextCompletion(header.id, header.created, header.model, [], usage=_usage(ending))
        return last + _event(usage)

    def _chunk(
        self, text: str, *, finish_reason: FinishReason | None = None, token_ids: TokenIds = UNSET
    ) -> bytes:
        header = self._header
        choice = TextChoice(0, text, finish_reason, token_ids=token_ids)
        return _event(
            TextCompletion(header.id, header.created, header.model, [choice], usage=header.no_usage)
        )


def error_event(error: ApiError) -> bytes:
    """What ends a stream that cannot go on after HTTP 200; no [DONE] follows."""
    return b"event: error\n" + _event(error.body())


def _event(chunk: msgspec.Struct) -> bytes:
    return b"data: " + msgspec.json.encode(chunk) + b"\n\n"


def _usage(ending: Ending) -> Usage:
    return Usage(
        prompt_tokens=ending.prompt_tokens,
        completion_tokens=ending.completion_tokens,
        total_tokens=ending.prompt_tokens + ending.completion_tokens,
        prompt_tokens_details=PromptTokensDetails(ending.cached_tokens),
    )
