"""Prompts longer than a bus message: cut into parts by the sender, put together by the receiver.

The receiver's buffer is bounded in requests, bytes and time; what is over a bound is refused by name.
"""

from dataclasses import dataclass, field

from cluster.messages import PromptPart, Work
from policy.core import RequestId

PART_BYTES_MAX = 192 * 1024
"""Raw bytes of a part: 256 KiB as base64, well under the bus's 1 MiB."""
PARTS_MAX = 64
BUFFERED_REQUESTS_MAX = 64
BUFFERED_BYTES_MAX = 256 * 1024 * 1024
BUFFERED_S_MAX = 60.0

PartKey = tuple[RequestId, int]


class PartsError(ValueError):
    """A part does not fit: the message names the field and the limit."""


class PartsFullError(PartsError):
    """There is no room for the part now; nothing is wrong with it."""


def split(token_ids: bytes) -> list[bytes]:
    """`token_ids` in parts of at most PART_BYTES_MAX, cut between tokens; none where one message will do."""
    if len(token_ids) <= PART_BYTES_MAX:
        return []
    return [token_ids[start : start + PART_BYTES_MAX] for start in range(0, len(token_ids), PART_BYTES_MAX)]


@dataclass(slots=True)
class _Collected:
    since_s: float
    parts: int
    received: dict[int, bytes] = field(default_factory=dict)


class PartBuffer:
    """Parts that wait for their request. Not shared between threads; the clock comes as `now_s`."""

    def __init__(self) -> None:
        self._collected: dict[PartKey, _Collected] = {}
        self._bytes = 0

    def add(self, part: PromptPart, now_s: float) -> None:
        """Keep `part`; the same part twice changes nothing. Raises PartsError."""
        self.expire(now_s)
        if not 1 <= part.parts <= PARTS_MAX:
            raise PartsError(f"parts is {part.parts}, must be 1 to {PARTS_MAX}")
        if not 0 <= part.part < part.parts:
            raise PartsError(f"part is {part.part}, must be 0 to parts - 1 = {part.parts - 1}")
        if len(part.token_ids) > PART_BYTES_MAX or len(part.token_ids) % 4:
            raise PartsError(
                f"token_ids has {len(part.token_ids)} bytes, must be whole int32 in at most {PART_BYTES_MAX}"
            )
        key = (part.request_id, part.attempt)
        collected = self._collected.get(key)
        if collected is None:
            if len(self._collected) >= BUFFERED_REQUESTS_MAX:
                raise PartsFullError(f"parts of {BUFFERED_REQUESTS_MAX} requests are waiting already")
            collected = self._collected[key] = _Collected(now_s, part.parts)
        if collected.parts != part.parts:
            raise PartsError(f"parts is {part.parts}, was {collected.parts} before")
        if part.part in collected.received:
            return
        if self._bytes + len(part.token_ids) > BUFFERED_BYTES_MAX:
            raise PartsFullError(f"more than {BUFFERED_BYTES_MAX} bytes of parts are waiting")
        collected.received[part.part] = part.token_ids
        self._bytes += len(part.token_ids)

    def take(self, request_id: RequestId, attempt: int, parts: int) -> bytes:
        """The whole prompt, which leaves the buffer. Raises PartsError where a part is missing."""
        collected = self._drop((request_id, attempt))
        if collected is None:
            raise PartsError(f"prompt_parts is {parts}, but no part came before it")
        if collected.parts != parts or len(collected.received) != parts:
            raise PartsError(f"prompt_parts is {parts}, but {len(collected.received)} parts came before it")
        return b"".join(collected.received[part] for part in range(parts))

    def prompt_of(self, work: Work) -> bytes:
        """The prompt of `work`, from the message itself or from the parts before it. Raises PartsError."""
        if work.prompt_parts == 0:
            return work.prompt_token_ids
        return self.take(work.request_id, work.attempt, work.prompt_parts)

    @property
    def buffered_bytes(self) -> int:
        return self._bytes

    def discard(self, request_id: RequestId, attempt: int) -> None:
        """Let go of the parts of an attempt that will not be done here."""
        self._drop((request_id, attempt))

    def expire(self, now_s: float) -> None:
        """Let go of parts whose request never came."""
        for key in [k for k, c in self._collected.items() if now_s - c.since_s > BUFFERED_S_MAX]:
            self._drop(key)

    def _drop(self, key: PartKey) -> _Collected | None:
        collected = self._collected.pop(key, None)
        if collected is not None:
            self._bytes -= sum(map(len, collected.received.values()))
        return collected
