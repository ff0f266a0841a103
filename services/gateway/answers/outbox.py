"""What waits for one client: text that is ready with its tokens, and how the answer ended.

One text grows while the client is slow, instead of a queue of pieces; the length of all that waits for a
client is bounded. Knows no connection and no message.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from gateway.api.api_errors import ApiError
from gateway.text.token_log import LoggedToken
from policy.core import FinishReason

LOGGED_CHARS = 64
"""What a logged token, and each alternative to it, counts for: about its characters in JSON."""


@dataclass(frozen=True, slots=True)
class Ending:
    """How an answer ended, and what it took."""

    reason: FinishReason
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int


@dataclass(frozen=True, slots=True)
class TokenUsage:
    """What all answers to one request took, as the client is told."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int


class Piece(NamedTuple):
    """The next text for the client, which may be empty; the last piece has the ending."""

    text: str
    token_ids: list[int]
    logged: list[LoggedToken]
    ending: Ending | None = None

    @property
    def chars(self) -> int:
        """As `chars_of`."""
        return chars_of(self.text, self.token_ids, self.logged)


class UnsentRoom:
    """How much may wait for one client, in all its outboxes together: in characters, where a token id
    counts as one."""

    def __init__(self, chars_max: int) -> None:
        self.chars_max = chars_max
        self._chars = 0

    def take(self, chars: int) -> bool:
        """False where there is no room for so much: then nothing is taken."""
        if self._chars + chars > self.chars_max:
            return False
        self._chars += chars
        return True

    def give_back(self, chars: int) -> None:
        self._chars -= chars


class Outbox:
    """Filled by the answer, emptied by one reader. After an ending or a failure nothing more comes."""

    def __init__(self, room: UnsentRoom, ready: Callable[[], None]) -> None:
        """`ready` is called whenever there is more to take."""
        self._room = room
        self._ready = ready
        self._texts: list[str] = []
        self._token_ids: list[int] = []
        self._logged: list[LoggedToken] = []
        self._held_chars = 0
        self._end: Ending | ApiError | None = None

    @property
    def ended(self) -> bool:
        return self._end is not None

    def put(self, text: str, token_ids: Sequence[int] = (), logged: Sequence[LoggedToken] = ()) -> bool:
        """False where the reader is so slow that it does not fit any more: then nothing is taken."""
        if self.ended or not (text or token_ids or logged):
            return True
        chars = chars_of(text, token_ids, logged)
        if not self._room.take(chars):
            return False
        self._held_chars += chars
        self._texts.append(text)
        self._token_ids += token_ids
        self._logged += logged
        self._ready()
        return True

    def end(self, end: Ending | ApiError) -> None:
        """The first end counts."""
        if self._end is None:
            self._end = end
            self._ready()

    def take(self) -> Piece:
        """All there is, which may be nothing. A failure is raised as ApiError, after what came before it."""
        failure = self._end if isinstance(self._end, ApiError) else None
        ending = self._end if isinstance(self._end, Ending) else None
        if failure is not None and not self._held_chars:
            raise failure
        piece = Piece("".join(self._texts), self._token_ids, self._logged, ending)
        self._texts.clear()
        self._token_ids = []
        self._logged = []
        self._room.give_back(self._held_chars)
        self._held_chars = 0
        if failure is not None:
            self._ready()
        return piece

    def close(self) -> None:
        """Nobody reads what is left."""
        self._room.give_back(self._held_chars)
        self._held_chars = 0


def chars_of(text: str, token_ids: Sequence[int], logged: Sequence[LoggedToken]) -> int:
    """About how much it is to be kept and told: a token id counts as one character."""
    return len(text) + len(token_ids) + sum(map(_logged_chars, logged))


def _logged_chars(token: LoggedToken) -> int:
    alternatives = 0 if token.logprobs is None else len(token.logprobs.top)
    return LOGGED_CHARS * (1 + alternatives)
