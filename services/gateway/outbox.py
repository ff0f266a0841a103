"""What waits for one client: text that is ready with its tokens, and how the answer ended.

One text grows while the client is slow, instead of a queue of pieces; its length is bounded. Knows no
connection and no message.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from gateway.api_errors import ApiError
from policy.core import FinishReason


@dataclass(frozen=True, slots=True)
class Ending:
    """How an answer ended, and what it took."""

    reason: FinishReason
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int


@dataclass(frozen=True, slots=True)
class Piece:
    """The next text for the client, which may be empty; the last piece has the ending."""

    text: str
    token_ids: list[int]
    ending: Ending | None = None


class Outbox:
    """Filled by the answer, emptied by one reader. After an ending or a failure nothing more comes."""

    def __init__(self, unsent_chars_max: int) -> None:
        """`unsent_chars_max` bounds the waiting text; a waiting token id counts as one character."""
        self._unsent_chars_max = unsent_chars_max
        self._texts: list[str] = []
        self._token_ids: list[int] = []
        self._text_chars = 0
        self._end: Ending | ApiError | None = None
        self._changed = asyncio.Event()

    @property
    def ended(self) -> bool:
        return self._end is not None

    def put(self, text: str, token_ids: Sequence[int] = ()) -> bool:
        """False where the reader is so slow that it does not fit any more: then nothing is taken."""
        unsent_chars = self._text_chars + len(self._token_ids)
        if unsent_chars + len(text) + len(token_ids) > self._unsent_chars_max:
            return False
        if (text or token_ids) and not self.ended:
            self._texts.append(text)
            self._text_chars += len(text)
            self._token_ids += token_ids
            self._changed.set()
        return True

    def end(self, end: Ending | ApiError) -> None:
        """The first end counts."""
        if self._end is None:
            self._end = end
            self._changed.set()

    async def take(self) -> Piece:
        """Wait for something and return all there is. A failure is raised as ApiError, after what
        came before it."""
        await self._changed.wait()
        self._changed.clear()
        text, token_ids = "".join(self._texts), self._token_ids
        self._texts.clear()
        self._token_ids = []
        self._text_chars = 0
        if not isinstance(self._end, ApiError):
            return Piece(text, token_ids, self._end)
        if not text and not token_ids:
            raise self._end
        self._changed.set()
        return Piece(text, token_ids)
