"""Logprobs in the two forms of the API. Pure.

A token is told as its text. Where its bytes are no whole characters it is told in escapes, as OpenAI does,
so that two tokens never look alike; special tokens by their names.
"""

from collections.abc import Sequence

from gateway.api.answer_types import ChatLogprobs, CompletionLogprobs, TokenLogprob, TopLogprob
from gateway.text.detokenizer import TokenBytes
from gateway.text.token_log import LoggedToken


class TokenNames:
    def __init__(self, token_bytes: TokenBytes) -> None:
        """`token_bytes` with special tokens kept."""
        self._token_bytes = token_bytes

    def bytes_of(self, token_id: int) -> bytes:
        return self._token_bytes.of(token_id)

    def chat(self, token_id: int) -> str:
        return self._name(token_id, "")

    def completion(self, token_id: int) -> str:
        return self._name(token_id, "bytes:")

    def _name(self, token_id: int, prefix: str) -> str:
        spelled = self._token_bytes.of(token_id)
        if not spelled:
            return f"token_id:{token_id}"
        try:
            return spelled.decode()
        except UnicodeDecodeError:
            return prefix + "".join(f"\\x{byte:02x}" for byte in spelled)


def chat_logprobs(logged: Sequence[LoggedToken], names: TokenNames) -> ChatLogprobs:
    return ChatLogprobs([_chat_entry(token, names) for token in logged])


def completion_logprobs(logged: Sequence[LoggedToken], names: TokenNames) -> CompletionLogprobs:
    """The chosen token is among its own alternatives always."""
    return CompletionLogprobs(
        tokens=[names.completion(token.token_id) for token in logged],
        token_logprobs=[_logprob(token) for token in logged],
        top_logprobs=[_alternatives(token, names) for token in logged],
        text_offset=[token.offset_chars for token in logged],
    )


def _chat_entry(token: LoggedToken, names: TokenNames) -> TokenLogprob:
    logprobs = token.logprobs
    return TokenLogprob(
        names.chat(token.token_id),
        _logprob(token),
        list(names.bytes_of(token.token_id)),
        []
        if logprobs is None
        else [
            TopLogprob(names.chat(token_id), logprob, list(names.bytes_of(token_id)))
            for token_id, logprob in logprobs.top
        ],
    )


def _logprob(token: LoggedToken) -> float | None:
    return None if token.logprobs is None else token.logprobs.token_logprob


def _alternatives(token: LoggedToken, names: TokenNames) -> dict[str, float] | None:
    if token.logprobs is None:
        return None
    alternatives = {names.completion(token_id): logprob for token_id, logprob in token.logprobs.top}
    alternatives.setdefault(names.completion(token.token_id), token.logprobs.token_logprob)
    return alternatives
