"""What an instance tells gateways: one message per gateway and step, split where it grows too large."""

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass, field

from cluster import subjects
from cluster.bus import Bus
from cluster.errors import MoonpoolError
from cluster.logs import Logger
from cluster.messages import FailedEntry, FinishEntry, ProgressEntry, StreamBatch, TokensEntry
from kvindex.core import InstanceId

Entry = ProgressEntry | TokensEntry | FinishEntry | FailedEntry

MESSAGE_BYTES_MAX = 256 * 1024
ENTRY_BYTES = 256
"""Upper estimate of an entry's JSON without its token ids."""
TOKEN_LOGPROB_BYTES = 64
"""Upper estimate of the JSON of one token's logprobs without its alternatives."""
TOP_LOGPROB_BYTES = 32
"""The same of one alternative."""
TOKENS_PER_ENTRY_MAX = 16 * 1024
"""Longer answers are sent again (resume) in several entries."""


@dataclass(slots=True)
class Outbox:
    """Entries wait until the end of the step that made them; `run` sends them.

    Where the bus is away they may be lost: the gateway asks `resume` when it is back.
    """

    bus: Bus
    log: Logger
    _pending: dict[InstanceId, list[Entry]] = field(default_factory=dict)
    _filled: asyncio.Event = field(default_factory=asyncio.Event)
    _sending: asyncio.Lock = field(default_factory=asyncio.Lock)

    def put(self, gateway: InstanceId, entry: Entry) -> None:
        self._pending.setdefault(gateway, []).append(entry)
        self._filled.set()

    async def run(self) -> None:
        """Send until cancelled; entries put in one turn of the event loop go out together."""
        while True:
            await self._filled.wait()
            self._filled.clear()
            await self.flush()

    async def flush(self) -> None:
        """Return when all that was put before is sent, in the order in which it was put."""
        async with self._sending:
            pending, self._pending = self._pending, {}
            for gateway, entries in pending.items():
                for batch in batches(entries):
                    await self._send(gateway, batch)

    async def _send(self, gateway: InstanceId, batch: StreamBatch) -> None:
        try:
            await self.bus.publish(subjects.stream(gateway), batch)
        except MoonpoolError as error:
            self.log.warning("stream entries lost", gateway=gateway, error=error)


def tokens_per_entry(logprobs: int | None) -> int:
    """Tokens that fit into one message, each with its logprobs and `logprobs` alternatives."""
    if logprobs is None:
        return TOKENS_PER_ENTRY_MAX
    return (MESSAGE_BYTES_MAX - ENTRY_BYTES) // (2 * 4 + TOKEN_LOGPROB_BYTES + logprobs * TOP_LOGPROB_BYTES)


def batches(entries: list[Entry]) -> Iterator[StreamBatch]:
    """`entries` in messages of at most MESSAGE_BYTES_MAX, in order."""
    batch: list[Entry] = []
    size_bytes = 0
    for entry in entries:
        entry_bytes = _entry_bytes(entry)
        if batch and size_bytes + entry_bytes > MESSAGE_BYTES_MAX:
            yield _message(batch)
            batch, size_bytes = [], 0
        batch.append(entry)
        size_bytes += entry_bytes
    if batch:
        yield _message(batch)


def _message(entries: list[Entry]) -> StreamBatch:
    return StreamBatch(
        progress=tuple(entry for entry in entries if isinstance(entry, ProgressEntry)),
        tokens=tuple(entry for entry in entries if isinstance(entry, TokensEntry)),
        finished=tuple(entry for entry in entries if isinstance(entry, FinishEntry)),
        failed=tuple(entry for entry in entries if isinstance(entry, FailedEntry)),
    )


def _entry_bytes(entry: Entry) -> int:
    if isinstance(entry, TokensEntry):
        alternatives = sum(len(logprobs.top) for logprobs in entry.logprobs if logprobs is not None)
        return (
            ENTRY_BYTES
            + len(entry.token_ids) * 4 // 3
            + len(entry.logprobs) * TOKEN_LOGPROB_BYTES
            + alternatives * TOP_LOGPROB_BYTES
        )
    if isinstance(entry, FailedEntry):
        return ENTRY_BYTES + len(entry.detail) * 6
    return ENTRY_BYTES
