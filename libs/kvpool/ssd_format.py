"""What the files of an SsdStore say about themselves: records and superblocks, as bytes. Pure.

Everything carries a check of its own, so that what a crash or a failing disk left behind is told from what
was written. A store of another version is not read.
"""

import json
import zlib
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Self

import numpy as np
import xxhash

from kvhash import HASH_BYTES, BlockHash

FORMAT = "moonpool ssd store"
VERSION = 1

RECORD_BYTES = 64
_RECORD = np.dtype(
    [
        ("block_hash", f"V{HASH_BYTES}"),
        ("parent", f"V{HASH_BYTES}"),
        ("checksum", f"V{HASH_BYTES}"),
        ("sequence", "<u8"),
        ("has_parent", "<u4"),
        ("check", "<u4"),
    ]
)
_CHECKED_BYTES = RECORD_BYTES - 4
_NO_PARENT = bytes(HASH_BYTES)

SUPERBLOCK_COPY_BYTES = 4096
SUPERBLOCK_BYTES = 2 * SUPERBLOCK_COPY_BYTES
"""Two copies, written in turn and in place: one torn by a crash leaves the other, and a full disk stops
neither."""

IDENTITY_BYTES_MAX = 1024

EPOCH_SHIFT = 40
"""A sequence number is epoch << 40 | count of the write: it grows over restarts without a look at the
records. 2**40 blocks of 4 KiB are 4 EiB written under one epoch."""
EPOCH_MAX = 2**24 - 1


@dataclass(frozen=True, slots=True)
class Record:
    """What a slot holds."""

    block_hash: BlockHash
    parent: BlockHash | None
    checksum: bytes
    sequence: int
    """Of two records with one hash the higher is the newer."""


def checksum_of(block_hash: BlockHash, data: memoryview) -> bytes:
    """xxh3_128 over the data of a block, seeded with its hash: good data under a wrong hash fails too."""
    return xxhash.xxh3_128_digest(data, seed=int.from_bytes(block_hash[:8], "little"))


def encode_record(record: Record) -> bytes:
    """RECORD_BYTES bytes."""
    parent = _NO_PARENT if record.parent is None else record.parent
    checked = b"".join(
        (
            record.block_hash,
            parent,
            record.checksum,
            record.sequence.to_bytes(8, "little"),
            (record.parent is not None).to_bytes(4, "little"),
        )
    )
    assert len(checked) == _CHECKED_BYTES, f"a record of {len(checked)} bytes"
    return checked + zlib.crc32(checked).to_bytes(4, "little")


def decode_record(raw: bytes) -> Record | None:
    """None where `raw` is no whole record."""
    if len(raw) != RECORD_BYTES:
        return None
    return next((record for _, record in decode_records(raw)), None)


def decode_records(raw: bytes | memoryview) -> Iterator[tuple[int, Record]]:
    """(slot within the segment, record) of every good record in the bytes of a record file.

    Slots never written and records that are damaged are left out, and so is a piece at the end.
    """
    rows = np.frombuffer(raw, _RECORD, count=len(raw) // RECORD_BYTES)
    written = np.flatnonzero(rows["sequence"])
    columns = (rows[name][written].tolist() for name in _RECORD.names or ())
    for slot, block_hash, parent, checksum, sequence, has_parent, check in zip(
        written.tolist(), *columns, strict=True
    ):
        start = slot * RECORD_BYTES
        if has_parent <= 1 and zlib.crc32(raw[start : start + _CHECKED_BYTES]) == check:
            yield slot, Record(block_hash, parent if has_parent else None, checksum, sequence)


@dataclass(frozen=True, slots=True)
class Superblock:
    """What a folder's store is."""

    identity: str
    """Hexadecimal: what has to be equal before blocks may be used again."""
    block_bytes: int
    segment_bytes: int
    slots: int
    epoch: int
    """How often it was opened."""

    def encoded(self) -> bytes:
        """SUPERBLOCK_COPY_BYTES bytes, to be read by people too."""
        text = json.dumps({"format": FORMAT, "version": VERSION, **asdict(self)}).encode()
        lines = b"%s\n%s\n" % (text, xxhash.xxh3_64_hexdigest(text).encode())
        assert len(lines) <= SUPERBLOCK_COPY_BYTES, f"a superblock of {len(lines)} bytes"
        return lines.ljust(SUPERBLOCK_COPY_BYTES, b"\0")

    @classmethod
    def decoded(cls, raw: bytes) -> Self | None:
        """The inverse of `encoded`; None where `raw` is none, is damaged or is of another version."""
        text, _, rest = raw.partition(b"\n")
        check, ended, _ = rest.partition(b"\n")
        if not ended or xxhash.xxh3_64_hexdigest(text).encode() != check:
            return None
        try:
            fields = json.loads(text)
            if (fields.pop("format"), fields.pop("version")) != (FORMAT, VERSION):
                return None
            return cls(**fields)
        except (ValueError, TypeError, KeyError, AttributeError):
            return None


def newest_superblock(raw: bytes) -> Superblock | None:
    """Of the two copies in a superblock file the good one, the later if both are."""
    copies = (
        Superblock.decoded(raw[start : start + SUPERBLOCK_COPY_BYTES])
        for start in range(0, SUPERBLOCK_BYTES, SUPERBLOCK_COPY_BYTES)
    )
    return max((copy for copy in copies if copy), key=lambda copy: copy.epoch, default=None)
