"""What waits for one client: text that is ready, and how the answer ended.

One text grows while the client is slow, instead of a queue of pieces; its length is bounded. Knows no
connection and no message.
"""

import asyncio
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
    ending: Ending | None = None


class Outbox:
    """Filled by the answer, emptied by one reader. After an ending or a failure nothing more comes."""

    def __init__(self, unsent_chars_max: int) -> None:
        self._unsent_chars_max = unsent_chars_max
        self._texts: list[str] = []
        self._unsent_chars = 0
        self._end: Ending | ApiError | None = None
        self._changed = asyncio.Event()

    @property
    def ended(self) -> bool:
        return self._end is not None

    def put(self, text: str) -> bool:
        """False where the reader is so slow that the text does not fit any more: then it is not taken."""
        if self._unsent_chars + len(text) > self._unsent_chars_max:
            return False
        if text and not self.ended:
            self._texts.append(text)
            self._unsent_chars += len(text)
            self._changed.set()
        return True

    def end(self, end: Ending | ApiError) -> None:
        """The first end counts."""
        if self._end is None:
            self._end = end
            self._changed.set()

    async def take(self) -> Piece:
        """Wait for something and return all there is. A failure is raised as ApiError, after the text
        that came before it."""
        await self._changed.wait()
        self._changed.clear()
        text = "".join(self._texts)
        self._texts.clear()
        self._unsent_chars = 0
        if not isinstance(self._end, ApiError):
            return Piece(text, self._end)
        if not text:
            raise self._end
        self._changed.set()
        return Piece(text)
