"""Which tokens the text of an answer is made of: the entries of its logprobs, in step with what is sent.

A token belongs to the text where any of its bytes does. Its entry goes out with the text that completes
it; what a stop string cuts off has none, and neither have tokens without text. Knows no form of the API.
"""

import codecs
from collections import deque
from dataclasses import dataclass

from policy.core import TokenLogprobs


@dataclass(frozen=True, slots=True)
class LoggedToken:
    """A token of the text. Its first character, which it may share with the token before, is number
    `offset_chars` of the answer. `logprobs` None: nobody knows them any more."""

    token_id: int
    logprobs: TokenLogprobs | None
    offset_chars: int


@dataclass(frozen=True, slots=True)
class _Waiting:
    token: LoggedToken
    end_chars: int


class TokenLog:
    """The tokens of one answer, from `add` until their text is `sent`."""

    def __init__(self) -> None:
        self._waiting: deque[_Waiting] = deque()
        self._whole_chars = 0
        self._sent_chars = 0

    def add(
        self,
        token_id: int,
        logprobs: TokenLogprobs | None,
        token_bytes: bytes,
        *,
        begun_before: bytes,
        text: str,
        begun_after: bytes,
    ) -> None:
        """A token that made `text` whole. `begun_before` and `begun_after` are the bytes of the character
        that was begun before it and after it."""
        begin = self._whole_chars
        self._whole_chars += len(text)
        if not token_bytes:
            return
        if begun_before and not _goes_on(begun_before, token_bytes[:1]):
            # The character before it remains broken, and none of its own.
            begin += 1
        end = self._whole_chars + (1 if begun_after else 0)
        self._waiting.append(_Waiting(LoggedToken(token_id, logprobs, begin), end))

    def sent(self, chars: int) -> tuple[LoggedToken, ...]:
        """The tokens whose text is out with these next `chars` characters."""
        self._sent_chars += chars
        complete = []
        while self._waiting and self._waiting[0].end_chars <= self._sent_chars:
            complete.append(self._waiting.popleft().token)
        return tuple(complete)

    def finish(self) -> tuple[LoggedToken, ...]:
        """Of the tokens that are left, those that the text ended within."""
        begun = [waiting.token for waiting in self._waiting if waiting.token.offset_chars < self._sent_chars]
        self._waiting.clear()
        return tuple(begun)


def _goes_on(begun: bytes, first: bytes) -> bool:
    """Whether the character that `begun` begins goes on with the byte `first`."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    text = decoder.decode(begun + first)
    return not text or (len(text) == 1 and not decoder.getstate()[0])
