"""Answers in the two forms of the API: as one object, or as the events of a stream.

Pure: what is said and endings in, JSON bytes out. Knows no connection.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import msgspec
from msgspec import UNSET, UnsetType

from gateway.answers.outbox import TokenUsage
from gateway.api.answer_types import (
    AnswerMessage,
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatDelta,
    ChatLogprobs,
    CompletionLogprobs,
    PromptTokensDetails,
    TextChoice,
    TextCompletion,
    TokenIds,
    Usage,
)
from gateway.api.api_errors import ApiError
from gateway.api.tool_types import CalledFunction, FunctionDelta, ToolCall, ToolCallDelta
from gateway.logprobs import TokenNames, chat_logprobs, completion_logprobs
from gateway.text.token_log import LoggedToken
from gateway.text.tool_calls import CallArguments, CallBegun, Said, Spoken, ToolPiece

DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": keep-alive\n\n"
"""A comment, which clients pass over."""


class Delta(NamedTuple):
    """What is new of one answer: words and calls, and the tokens that came with them."""

    said: Sequence[ToolPiece]
    token_ids: list[int]
    logged: Sequence[LoggedToken]


@dataclass(frozen=True, slots=True)
class Whole:
    """One answer as a whole."""

    said: Said
    token_ids: list[int]
    logged: Sequence[LoggedToken]
    finish_reason: str


class AnswerForm(Protocol):
    """Answers are known by their number. Each method but `whole` gives whole server-sent events, or nothing
    where there is nothing to say."""

    def whole(self, answers: Sequence[Whole], usage: TokenUsage) -> bytes: ...

    def opening(self, index: int) -> bytes: ...

    def delta(self, index: int, delta: Delta) -> bytes: ...

    def closing(self, index: int, finish_reason: str) -> bytes: ...

    def usage(self, usage: TokenUsage) -> bytes: ...


class RunningUsage:
    """What each answer has taken so far, for clients that want it with every chunk."""

    def __init__(self, prompts_tokens: Sequence[int], answers: int) -> None:
        """The tokens of each prompt, to each of which there are `answers`."""
        self._prompts_tokens = prompts_tokens
        self._answers = answers
        self._completion_tokens = [0] * (len(prompts_tokens) * answers)

    def add(self, index: int, tokens: int) -> None:
        self._completion_tokens[index] += tokens

    def of(self, index: int) -> Usage:
        prompt_tokens = self._prompts_tokens[index // self._answers]
        completion_tokens = self._completion_tokens[index]
        return Usage(prompt_tokens, completion_tokens, prompt_tokens + completion_tokens)


@dataclass(frozen=True, slots=True)
class Header:
    """What every object of one response begins with, and what its client asked to see. `created` in seconds
    since 1970. `names`: of tokens, where logprobs are wanted."""

    id: str
    created: int
    model: str
    include_usage: bool
    return_token_ids: bool
    names: TokenNames | None = None
    running_usage: RunningUsage | None = None

    def token_ids(self, token_ids: list[int]) -> TokenIds:
        return token_ids if self.return_token_ids else UNSET

    def took(self, index: int, tokens: int) -> None:
        """The answer number `index` has so many tokens more."""
        if self.running_usage is not None:
            self.running_usage.add(index, tokens)

    def chunk_usage(self, index: int) -> Usage | UnsetType | None:
        """Clients that asked for usage find it null in all chunks but the last, or what it is so far."""
        if self.running_usage is not None:
            return self.running_usage.of(index)
        return None if self.include_usage else UNSET


class ChatForm:
    def __init__(self, header: Header) -> None:
        self._header = header

    def whole(self, answers: Sequence[Whole], usage: TokenUsage) -> bytes:
        header = self._header
        choices = [
            ChatChoice(
                index,
                _message(answer.said),
                answer.finish_reason,
                self._logprobs(answer.logged),
                header.token_ids(answer.token_ids),
            )
            for index, answer in enumerate(answers)
        ]
        return msgspec.json.encode(
            ChatCompletion(header.id, header.created, header.model, choices, _usage(usage))
        )

    def opening(self, index: int) -> bytes:
        return self._chunk(ChatChunkChoice(index, ChatDelta(role="assistant", content="")))

    def delta(self, index: int, delta: Delta) -> bytes:
        self._header.took(index, len(delta.token_ids))
        choices = [ChatChunkChoice(index, _chat_delta(piece)) for piece in delta.said]
        shown = self._header.token_ids(delta.token_ids)
        if shown or delta.logged:
            if not choices:
                choices.append(ChatChunkChoice(index, ChatDelta(content="")))
            choices[0].token_ids = shown
            if delta.logged:
                choices[0].logprobs = self._logprobs(delta.logged)
        return b"".join(map(self._chunk, choices))

    def closing(self, index: int, finish_reason: str) -> bytes:
        return self._chunk(ChatChunkChoice(index, ChatDelta(), finish_reason))

    def usage(self, usage: TokenUsage) -> bytes:
        header = self._header
        if not header.include_usage:
            return b""
        return _event(ChatChunk(header.id, header.created, header.model, [], usage=_usage(usage)))

    def _chunk(self, choice: ChatChunkChoice) -> bytes:
        header = self._header
        usage = header.chunk_usage(choice.index)
        return _event(ChatChunk(header.id, header.created, header.model, [choice], usage=usage))

    def _logprobs(self, logged: Sequence[LoggedToken]) -> ChatLogprobs | None:
        names = self._header.names
        return None if names is None else chat_logprobs(logged, names)


class CompletionForm:
    """Of text completions, which call no tools."""

    def __init__(self, header: Header, echoes: Sequence[str] = (), answers: int = 1) -> None:
        """`echoes`: the texts of the prompts, where they are to come before the answers, of which each
        prompt has `answers`."""
        self._header = header
        self._echoes = echoes
        self._answers = answers

    def whole(self, answers: Sequence[Whole], usage: TokenUsage) -> bytes:
        header = self._header
        choices = [
            TextChoice(
                index,
                self._echo(index) + answer.said.content,
                answer.finish_reason,
                self._logprobs(answer.logged),
                header.token_ids(answer.token_ids),
            )
            for index, answer in enumerate(answers)
        ]
        return msgspec.json.encode(
            TextCompletion(header.id, header.created, header.model, choices, _usage(usage))
        )

    def opening(self, index: int) -> bytes:
        echo = self._echo(index)
        return self._chunk(TextChoice(index, echo)) if echo else b""

    def delta(self, index: int, delta: Delta) -> bytes:
        self._header.took(index, len(delta.token_ids))
        text = "".join(piece.text for piece in delta.said if isinstance(piece, Spoken))
        shown = self._header.token_ids(delta.token_ids)
        if not (text or shown or delta.logged):
            return b""
        logprobs = self._logprobs(delta.logged) if delta.logged else None
        return self._chunk(TextChoice(index, text, None, logprobs, shown))

    def closing(self, index: int, finish_reason: str) -> bytes:
        return self._chunk(TextChoice(index, "", finish_reason))

    def usage(self, usage: TokenUsage) -> bytes:
        header = self._header
        if not header.include_usage:
            return b""
        return _event(TextCompletion(header.id, header.created, header.model, [], usage=_usage(usage)))

    def _echo(self, index: int) -> str:
        return self._echoes[index // self._answers] if self._echoes else ""

    def _chunk(self, choice: TextChoice) -> bytes:
        header = self._header
        usage = header.chunk_usage(choice.index)
        return _event(TextCompletion(header.id, header.created, header.model, [choice], usage=usage))

    def _logprobs(self, logged: Sequence[LoggedToken]) -> CompletionLogprobs | None:
        names = self._header.names
        return None if names is None else completion_logprobs(logged, names)


def error_event(error: ApiError) -> bytes:
    """What ends a stream that cannot go on after HTTP 200; no [DONE] follows."""
    return b"event: error\n" + _event(error.body())


def _message(said: Said) -> AnswerMessage:
    if not said.calls:
        return AnswerMessage(said.content)
    calls = [ToolCall(id=call.id, function=CalledFunction(call.name, call.arguments)) for call in said.calls]
    return AnswerMessage(said.content or None, tool_calls=calls)


def _chat_delta(piece: ToolPiece) -> ChatDelta:
    match piece:
        case Spoken(text):
            return ChatDelta(content=text)
        case CallBegun(index, call_id, name):
            call = ToolCallDelta(index, FunctionDelta("", name), call_id, "function")
        case CallArguments(index, text):
            call = ToolCallDelta(index, FunctionDelta(text))
    return ChatDelta(tool_calls=[call])


def _event(chunk: msgspec.Struct) -> bytes:
    return b"data: " + msgspec.json.encode(chunk) + b"\n\n"


def _usage(usage: TokenUsage) -> Usage:
    return Usage(
        prompt_tokens=usage.prompt_tokens,
        completion_tokens=usage.completion_tokens,
        total_tokens=usage.prompt_tokens + usage.completion_tokens,
        prompt_tokens_details=PromptTokensDetails(usage.cached_tokens),
    )
