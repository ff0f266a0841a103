"""Records and superblocks: what was written is read, and nothing else is."""

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from kvhash import BlockHash
from kvpool.ssd_format import (
    RECORD_BYTES,
    SUPERBLOCK_BYTES,
    SUPERBLOCK_COPY_BYTES,
    Record,
    Superblock,
    checksum_of,
    decode_record,
    decode_records,
    encode_record,
    newest_superblock,
)

pytestmark = pytest.mark.unit

hashes = st.binary(min_size=16, max_size=16).map(BlockHash)
records = st.builds(
    Record,
    block_hash=hashes,
    parent=st.none() | hashes,
    checksum=st.binary(min_size=16, max_size=16),
    sequence=st.integers(1, 2**64 - 1),
)
superblocks = st.builds(
    Superblock,
    identity=st.binary(min_size=1, max_size=1024).map(bytes.hex),
    block_bytes=st.integers(1, 2**40),
    segment_bytes=st.integers(1, 2**50),
    slots=st.integers(1, 2**31),
    epoch=st.integers(1, 2**24),
)


@given(records)
def test_a_record_is_read_as_it_was_written(record):
    assert decode_record(encode_record(record)) == record


@given(records, st.data())
def test_a_changed_record_is_none(record, data):
    raw = bytearray(encode_record(record))
    place = data.draw(st.integers(0, RECORD_BYTES - 1))
    raw[place] ^= data.draw(st.integers(1, 255))
    assert decode_record(bytes(raw)) is None


@given(st.binary(max_size=4 * RECORD_BYTES))
def test_bytes_that_nobody_wrote_are_no_record(raw):
    assert list(decode_records(raw)) == []
    assert decode_record(raw) is None


@given(
    st.lists(st.none() | records, max_size=12),
    st.binary(max_size=RECORD_BYTES - 1),
    st.sets(st.integers(0, 11)),
)
def test_of_a_file_exactly_the_good_records_are_read(written, piece, damaged):
    rows = [bytes(RECORD_BYTES) if record is None else encode_record(record) for record in written]
    damaged = {slot for slot in damaged if slot < len(rows)}
    for slot in damaged:
        rows[slot] = rows[slot][:7] + bytes([rows[slot][7] ^ 1]) + rows[slot][8:]
    expected = [
        (slot, record) for slot, record in enumerate(written) if record is not None and slot not in damaged
    ]
    assert list(decode_records(b"".join(rows) + piece)) == expected


@given(hashes, hashes, st.binary(min_size=1, max_size=300))
def test_a_checksum_is_of_the_data_and_of_whose_it_is(block_hash, other, data):
    checksum = checksum_of(block_hash, memoryview(data))
    assert len(checksum) == 16
    assert checksum_of(block_hash, memoryview(data + b"\0")) != checksum
    if other[:8] != block_hash[:8]:
        assert checksum_of(other, memoryview(data)) != checksum


@given(superblocks)
def test_a_superblock_is_read_as_it_was_written(superblock):
    raw = superblock.encoded()
    assert len(raw) == SUPERBLOCK_COPY_BYTES
    assert Superblock.decoded(raw) == superblock


@given(superblocks, st.data())
def test_a_changed_superblock_is_none(superblock, data):
    raw = bytearray(superblock.encoded())
    place = data.draw(st.integers(0, raw.rindex(b"\n")))
    raw[place] ^= data.draw(st.integers(1, 255))
    assert Superblock.decoded(bytes(raw)) is None


@given(st.binary(max_size=200))
def test_bytes_that_nobody_wrote_are_no_superblock(raw):
    assert Superblock.decoded(raw) is None


@given(superblocks, superblocks)
def test_the_later_copy_counts_and_a_torn_one_does_not(one, other):
    first, second = one.encoded(), other.encoded()
    assert newest_superblock(first + second).epoch == max(one.epoch, other.epoch)
    assert newest_superblock(first + second[:100].ljust(SUPERBLOCK_COPY_BYTES, b"\xff")) == one
    assert newest_superblock(b"\xff" * SUPERBLOCK_COPY_BYTES + second) == other


def test_an_empty_file_has_no_superblock():
    assert newest_superblock(bytes(SUPERBLOCK_BYTES)) is None


def test_another_version_is_not_read():
    text = Superblock("aa", 1, 1, 1, 1).encoded().split(b"\n")[0].replace(b'"version": 1', b'"version": 2')
    assert b'"version": 2' in text
    raw = b"%s\n%s\n" % (text, xxhash.xxh3_64_hexdigest(text).encode())
    assert Superblock.decoded(raw) is None
