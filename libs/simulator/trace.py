"""Request traces in the form of the Mooncake paper: one JSON object a line.

`timestamp` (ms), `input_length` and `output_length` (tokens) and `hash_ids`: an id for each block of
TRACE_BLOCK_TOKENS tokens of the prompt, the last one possibly part of a block. The same id means the same
block after the same blocks; that is checked, as all else here rests on it. A `priority` may be there
too, else it is 0. Other fields are passed over.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import count, islice
from pathlib import Path
from typing import BinaryIO

import msgspec

from policy.core import PRIORITY_MAX, PRIORITY_MIN

TRACE_BLOCK_TOKENS = 512
LINE_BYTES_MAX = 1 << 20
"""Of one request: 64 million tokens' ids fit."""
LINES_MAX = 1_000_000


class TraceError(Exception):
    """The trace cannot be used; the text names file, line and what is wrong."""


@dataclass(frozen=True, slots=True)
class TracedRequest:
    arrived_ms: int
    input_tokens: int
    output_tokens: int
    block_ids: tuple[int, ...]
    """Of its prompt, first to last; no two are equal."""
    priority: int = 0
    """The higher, the more important."""


class _Line(msgspec.Struct):
    timestamp: int
    input_length: int
    output_length: int
    hash_ids: tuple[int, ...]
    priority: int = 0


def read_trace(path: Path) -> list[TracedRequest]:
    """All requests, in the order of the file, of which there is at least one. TraceError; OSError where the
    file cannot be read."""
    with path.open("rb") as file:
        requests = list(parse_trace(_lines(file), str(path)))
    if not requests:
        raise TraceError(f"{path}: no request in it")
    return requests


def distinct_blocks(requests: Iterable[TracedRequest]) -> int:
    """What a cache holds in the end that never gives up a block."""
    return len({block_id for request in requests for block_id in request.block_ids})


def without_reuse(requests: Iterable[TracedRequest]) -> list[TracedRequest]:
    """The same requests with prompts that share nothing."""
    block_ids = count()
    return [
        replace(request, block_ids=tuple(islice(block_ids, len(request.block_ids)))) for request in requests
    ]


def parse_trace(lines: Iterable[bytes], name: str) -> Iterator[TracedRequest]:
    """The requests in `lines`, without blank ones. TraceError, with `name` and the line's number, where one
    is no request, or contradicts an earlier one about what a block follows."""
    decode = msgspec.json.Decoder(_Line).decode
    parents: dict[int, int | None] = {}
    for number, line in enumerate(lines, start=1):
        if number > LINES_MAX:
            raise TraceError(f"{name}:{number}: more than {LINES_MAX} lines")
        if len(line) > LINE_BYTES_MAX:
            raise TraceError(f"{name}:{number}: longer than {LINE_BYTES_MAX} bytes")
        if not line.strip():
            continue
        try:
            yield _request(decode(line), parents)
        except (msgspec.DecodeError, ValueError) as error:
            raise TraceError(f"{name}:{number}: {error}") from None


def _request(line: _Line, parents: dict[int, int | None]) -> TracedRequest:
    """Raises ValueError where it makes no sense; remembers what each block follows."""
    for field, value in (("timestamp", line.timestamp), ("output_length", line.output_length)):
        if value < 0:
            raise ValueError(f"{field}: {value}, at least 0")
    if line.input_length < 1:
        raise ValueError(f"input_length: {line.input_length}, at least 1")
    blocks = -(-line.input_length // TRACE_BLOCK_TOKENS)
    if len(line.hash_ids) != blocks:
        raise ValueError(
            f"hash_ids: {len(line.hash_ids)} for {line.input_length} tokens, {blocks} of {TRACE_BLOCK_TOKENS}"
        )
    if len(set(line.hash_ids)) != blocks:
        raise ValueError("hash_ids: one comes twice")
    parent = None
    for block_id in line.hash_ids:
        if parents.setdefault(block_id, parent) != parent:
            raise ValueError(
                f"hash_ids: {block_id} follows {parent}, and {parents[block_id]} in an earlier line"
            )
        parent = block_id
    if not PRIORITY_MIN <= line.priority <= PRIORITY_MAX:
        raise ValueError(f"priority: {line.priority}, {PRIORITY_MIN} to {PRIORITY_MAX}")
    return TracedRequest(line.timestamp, line.input_length, line.output_length, line.hash_ids, line.priority)


def _lines(file: BinaryIO) -> Iterator[bytes]:
    """The lines of a file; of one that is too long only so much that this can be told."""
    return iter(lambda: file.readline(LINE_BYTES_MAX + 1), b"")
