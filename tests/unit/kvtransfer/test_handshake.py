"""Handshake messages and proofs, descriptors: what they accept and what they bind."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtransfer import AuthError, BusyError, DescriptorError, FrameError, PeerLostError, TransferError
from kvtransfer import descriptor as descriptors
from kvtransfer.descriptor import Descriptor
from kvtransfer.kinds import TransportKind
from kvtransfer.limits import DESCRIPTOR_CHARS_MAX
from kvtransfer.stream import handshake
from kvtransfer.stream.handshake import LINK_ID_BYTES, NONCE_BYTES, Hello, Refusal, Role, Step

pytestmark = pytest.mark.unit

SECRET = b"a secret of a cluster"
HELLO = Hello(b"c" * NONCE_BYTES, b"l" * LINK_ID_BYTES, "caller", "owner")
OWNER_NONCE = b"o" * NONCE_BYTES


def test_a_proof_binds_secret_role_names_and_nonces() -> None:
    proof = handshake.proof(SECRET, Role.CALLER, HELLO, OWNER_NONCE)
    handshake.check_proof(SECRET, Role.CALLER, HELLO, OWNER_NONCE, proof)
    others = [
        (b"another secret", Role.CALLER, HELLO, OWNER_NONCE),
        (SECRET, Role.OWNER, HELLO, OWNER_NONCE),
        (SECRET, Role.CALLER, dataclasses.replace(HELLO, caller="x"), OWNER_NONCE),
        (SECRET, Role.CALLER, dataclasses.replace(HELLO, owner="x"), OWNER_NONCE),
        (SECRET, Role.CALLER, dataclasses.replace(HELLO, caller="callero", owner="wner"), OWNER_NONCE),
        (SECRET, Role.CALLER, dataclasses.replace(HELLO, nonce=OWNER_NONCE), OWNER_NONCE),
        (SECRET, Role.CALLER, dataclasses.replace(HELLO, link_id=b"k" * LINK_ID_BYTES), OWNER_NONCE),
        (SECRET, Role.CALLER, HELLO, HELLO.nonce),
    ]
    for secret, role, hello, nonce in others:
        with pytest.raises(AuthError):
            handshake.check_proof(secret, role, hello, nonce, proof)


@given(
    st.binary(min_size=NONCE_BYTES, max_size=NONCE_BYTES),
    st.text("aé漢.-", min_size=1, max_size=80),
    st.text("aé漢.-", min_size=1, max_size=80),
)
def test_hello_round_trip(nonce: bytes, caller: str, owner: str) -> None:
    hello = Hello(nonce, nonce[:LINK_ID_BYTES], caller, owner)
    packed = handshake.pack_hello(hello)
    step, body_bytes = handshake.parse_prefix(packed[: handshake.PREFIX_BYTES])
    assert (step, body_bytes) == (Step.HELLO, len(packed) - handshake.PREFIX_BYTES)
    assert handshake.parse_hello(packed[handshake.PREFIX_BYTES :]) == hello


@given(st.binary(max_size=700))
def test_garbage_is_a_frame_error(garbage: bytes) -> None:
    try:
        handshake.parse_hello(garbage)
    except FrameError:
        pass
    else:
        assert len(garbage) > NONCE_BYTES + 2
    with pytest.raises(FrameError):
        handshake.parse_prefix((b"XPKV" + garbage + bytes(8))[: handshake.PREFIX_BYTES])


def test_another_version_is_named() -> None:
    prefix = bytearray(handshake.pack(Step.CHALLENGE, bytes(NONCE_BYTES))[: handshake.PREFIX_BYTES])
    prefix[4] = 9
    with pytest.raises(FrameError, match="version 9"):
        handshake.parse_prefix(bytes(prefix))


@pytest.mark.parametrize(
    ("reason", "error"),
    [
        (bytes((Refusal.VERSION,)), FrameError),
        (bytes((Refusal.NAME,)), PeerLostError),
        (bytes((Refusal.SECRET,)), AuthError),
        (bytes((Refusal.BUSY,)), BusyError),
        (b"\xff", FrameError),
        (b"", FrameError),
    ],
)
def test_refusals(reason: bytes, error: type[TransferError]) -> None:
    with pytest.raises(error):
        handshake.check_body(Step.REFUSED, Step.WELCOME, reason)


def test_steps_out_of_order_and_of_wrong_size() -> None:
    with pytest.raises(FrameError, match="CHALLENGE"):
        handshake.check_body(Step.WELCOME, Step.CHALLENGE, bytes(32))
    with pytest.raises(FrameError, match="31"):
        handshake.check_body(Step.PROOF, Step.PROOF, bytes(31))


def test_descriptor_round_trip() -> None:
    descriptor = Descriptor("name", ({"kind": "tcp", "host": "::1", "port": 5}, {"kind": "shm", "key": "k"}))
    assert descriptors.decode(descriptors.encode(descriptor)) == descriptor
    assert descriptor.address(TransportKind.SHM) == {"kind": "shm", "key": "k"}
    assert descriptor.address(TransportKind.RDMA) is None


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        '{"name": "x"}',
        '{"name": "", "transports": [], "v": 1}',
        '{"name": "x", "transports": [], "v": 2}',
        '{"name": "x", "transports": [{"kind": [1]}], "v": 1}',
        "x" * (DESCRIPTOR_CHARS_MAX + 1),
    ],
)
def test_malformed_descriptors(text: str) -> None:
    with pytest.raises(DescriptorError):
        descriptors.decode(text)
