"""The hash chain: golden vectors, one result for every form of the same tokens, clear refusals."""

import os
import struct
import subprocess
import sys

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from kvhash import (
    BLOCK_TOKENS,
    HASH_BYTES,
    BlockHash,
    HashInputError,
    block_hashes,
    extend,
    namespace,
    pack,
    unpack,
)

pytestmark = pytest.mark.unit

SPACE = namespace(b"seed", "f00d")
GOLDEN = [
    (
        namespace(b"\x00\x01seed", "f00d"),
        list(range(48)),
        "49e0a5292d9f4b796e12396a393787aa7cc2a4e54868e36dad19a7482b354d60aa3685b50fbcf6be9a15a42279bcee01",
    ),
    (
        namespace(b"", "0123456789abcdef", tenant_salt="acme", adapter="lora-1"),
        [2**31 - 1, -1] + [7] * 30,
        "2e30085abc4cf9afff911901bea5ea8c07ddd57a30e64997aebfbc56dc9b1af0",
    ),
]
token_lists = st.lists(st.integers(-(2**31), 2**31 - 1), max_size=100)


@pytest.mark.parametrize(("space", "token_ids", "expected"), GOLDEN)
def test_golden_vectors(space, token_ids, expected):
    assert block_hashes(space, token_ids).hex() == expected


def test_the_encoding_of_a_namespace_is_fixed():
    assert (
        namespace(b"\x00\x01seed", "f00d", "salt", "ü")
        == b"moonpool.namespace.v1\x06\x00\x00\x01seed\x04\x00f00d\x04\x00salt\x02\x00\xc3\xbc"
    )


@pytest.mark.parametrize("seed", ["0", "1", "4242"])
def test_another_process_computes_the_same_whatever_its_hash_seed(seed):
    program = (
        "from kvhash import block_hashes, namespace;"
        "print(block_hashes(namespace(b'\\x00\\x01seed', 'f00d'), list(range(48))).hex())"
    )
    result = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONHASHSEED": seed},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert result.stdout.strip() == GOLDEN[0][2]


@given(token_lists)
def test_the_chain_is_the_one_of_the_design(token_ids):
    expected, previous = b"", xxhash.xxh3_128_digest(SPACE)
    for start in range(0, len(token_ids) - BLOCK_TOKENS + 1, BLOCK_TOKENS):
        block = token_ids[start : start + BLOCK_TOKENS]
        previous = xxhash.xxh3_128_digest(previous + struct.pack("<16i", *block))
        expected += previous
    assert block_hashes(SPACE, token_ids) == expected


@given(token_lists)
def test_every_form_of_the_same_tokens_has_the_same_hashes(token_ids):
    array = np.array(token_ids, dtype=np.int32)
    strided = np.repeat(array, 2)[::2]
    forms = [
        tuple(token_ids),
        array,
        strided,
        array.astype(np.int64),
        array.astype(">i4"),
        array.tobytes(),
        bytearray(array.tobytes()),
        memoryview(array.tobytes()),
    ]
    expected = block_hashes(SPACE, token_ids)
    assert [block_hashes(SPACE, form) for form in forms] == [expected] * len(forms)


def test_long_lists_are_packed_like_arrays():
    array = np.arange(5 * 1024 + 17, dtype=np.int32) * 31
    assert block_hashes(SPACE, array.tolist()) == block_hashes(SPACE, array)


@given(token_lists, st.integers(0, 100))
def test_a_chain_can_be_continued_at_any_block(token_ids, cut):
    cut = min(cut * BLOCK_TOKENS, len(token_ids) // BLOCK_TOKENS * BLOCK_TOKENS)
    head = block_hashes(SPACE, token_ids[:cut])
    parent = BlockHash(head[-HASH_BYTES:]) if head else None
    assert head + extend(parent, SPACE, token_ids[cut:]) == block_hashes(SPACE, token_ids)


def test_a_partial_block_has_no_hash():
    assert block_hashes(SPACE, range(15)) == b""
    assert block_hashes(SPACE, range(31)) == block_hashes(SPACE, range(16))


def test_a_changed_token_changes_its_block_and_all_after_it():
    changed = [*range(16), 99, *range(17, 48)]
    before, after = unpack(block_hashes(SPACE, range(48))), unpack(block_hashes(SPACE, changed))
    assert [one == other for one, other in zip(before, after, strict=True)] == [True, False, False]


@given(*[st.lists(st.text(max_size=4), min_size=3, max_size=3)] * 2, *[st.binary(max_size=4)] * 2)
def test_different_fields_make_different_namespaces(one, other, seed, other_seed):
    assert (namespace(seed, *one) == namespace(other_seed, *other)) == ((seed, one) == (other_seed, other))


def test_fields_do_not_run_into_each_other():
    assert namespace(b"ab", "c") != namespace(b"a", "bc")
    assert namespace(b"", "f", tenant_salt="x") != namespace(b"", "f", adapter="x")


@pytest.mark.parametrize(
    ("token_ids", "message"),
    [
        ([2**31] * 16, "token_ids.*int32"),
        ([-(2**31) - 1], "token_ids.*int32"),
        (["1"] * 16, "token_ids"),
        (b"12345", "token_ids: 5 bytes, not a multiple of 4"),
        (np.zeros((2, 16), np.int32), "token_ids: 2-dimensional"),
        (np.zeros(16, np.float32), "token_ids.*float32"),
        (np.full(16, 2**31, np.int64), "token_ids: .*beyond int32"),
    ],
)
def test_token_ids_that_are_none_are_refused(token_ids, message):
    with pytest.raises(HashInputError, match=message):
        block_hashes(SPACE, token_ids)


def test_a_parent_that_is_no_hash_is_refused():
    with pytest.raises(HashInputError, match="parent: 15 bytes"):
        extend(BlockHash(b"x" * 15), SPACE, [])


def test_an_overlong_namespace_field_is_refused():
    with pytest.raises(HashInputError, match="tenant_salt: 65536 bytes, at most 65535"):
        namespace(b"", "f", tenant_salt="x" * 65536)


@given(st.lists(st.binary(min_size=16, max_size=16), max_size=5))
def test_unpack_inverts_pack(hashes):
    assert unpack(pack(hashes)) == hashes
    assert all(type(item) is bytes for item in unpack(pack(hashes)))


def test_packed_hashes_of_a_wrong_length_are_refused():
    with pytest.raises(HashInputError, match="17 bytes"):
        unpack(b"x" * 17)
    with pytest.raises(HashInputError, match="2 bytes"):
        pack([BlockHash(b"xx")])
