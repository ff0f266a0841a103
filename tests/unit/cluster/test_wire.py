"""Messages to bytes and back, for every class; and what is malformed is refused, never believed."""

from base64 import b64decode

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.message_values import values_of

from cluster.errors import ProtocolError
from cluster.messages import (
    MESSAGE_KINDS,
    BlockEvents,
    Cancel,
    Describe,
    InstanceRecord,
    InventoryRequest,
    MatchRequest,
    StreamBatch,
)
from cluster.wire import SENDER_CHARS_MAX, Envelope, decode, decode_record, encode, encode_record
from kvindex.core import BlockAction, BlockEvent, InstanceId, Tier
from policy.core import InstanceState, LoadSnapshot, RequestId, Role, TokenLogprobs

pytestmark = pytest.mark.unit


@pytest.mark.parametrize("message_class", MESSAGE_KINDS.values(), ids=lambda cls: cls.__name__)
@given(st.data())
@settings(max_examples=20, deadline=None)
def test_every_message_survives_the_wire(message_class: type, data: st.DataObject) -> None:
    body = data.draw(values_of(message_class))
    envelope, decoded = decode(encode(body, InstanceId("me"), 7, 3, 1.25))
    assert decoded == body
    assert type(decoded) is message_class
    assert envelope == Envelope(1, envelope.kind, InstanceId("me"), 7, 3, 1.25)
    assert MESSAGE_KINDS[envelope.kind] is message_class


@given(values_of(InstanceRecord))
def test_records_survive_the_control_plane(record: InstanceRecord) -> None:
    assert decode_record(encode_record(record), InstanceRecord) == record


def test_the_wire_form_is_as_documented() -> None:
    event = BlockEvent(BlockAction.STORED, b"\x00" * 16, Tier.DRAM)
    wire = orjson.loads(encode(BlockEvents(5, (event,)), InstanceId("d1"), 9, 2, 1.5))
    assert wire == {
        "v": 1,
        "kind": "block_events",
        "sender": "d1",
        "incarnation": 9,
        "seq": 2,
        "sent_at_s": 1.5,
        "body": {
            "first_number": 5,
            "events": [
                {"action": "stored", "block_hashes": "A" * 22 + "==", "tier": "dram", "parent": ""},
            ],
        },
    }
    assert b64decode(wire["body"]["events"][0]["block_hashes"]) == b"\x00" * 16


def test_kinds_are_unique() -> None:
    assert len(set(MESSAGE_KINDS.values())) == len(MESSAGE_KINDS)


def test_unknown_fields_are_ignored_and_defaults_filled_in() -> None:
    data = orjson.dumps(
        {
            "v": 9,
            "kind": "cancel",
            "sender": "x",
            "incarnation": 1,
            "seq": 1,
            "sent_at_s": 0,
            "later": [],
            "body": {"request_id": "r", "attempt": 2, "why": "later"},
        }
    )
    assert decode(data)[1] == Cancel(RequestId("r"), 2)


def _wire(**changes: object) -> bytes:
    whole = {
        "v": 1,
        "kind": "describe",
        "sender": "x",
        "incarnation": 1,
        "seq": 1,
        "sent_at_s": 0,
        "body": {},
    }
    return orjson.dumps(whole | changes)


TOKENS_BODY = {"request_id": "r", "attempt": 0, "sample": 0, "output_index": 0, "token_ids": "BQAAAA=="}


def test_tokens_travel_with_their_logprobs_or_with_none() -> None:
    told = {"token_logprob": -0.5, "top": [[5, -0.5], [9, -1.25]]}
    for logprobs, read in (
        ([], ()),
        ([None], (None,)),
        ([told], (TokenLogprobs(-0.5, ((5, -0.5), (9, -1.25))),)),
    ):
        batch = decode(_wire(kind="stream", body={"tokens": [TOKENS_BODY | {"logprobs": logprobs}]}))[1]
        assert isinstance(batch, StreamBatch)
        assert batch.tokens[0].logprobs == read


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{",
        b"null",
        b"1",
        b'"text"',
        b"[]",
        b"\xff\xff",
        b"[" * 10_000,
        _wire(kind="nothing"),
        _wire(kind=1),
        _wire(kind="cancel"),
        _wire(kind="cancel", body={"request_id": "r", "attempt": "1"}),
        _wire(kind="cancel", body={"request_id": "r", "attempt": True}),
        _wire(kind="cancel", body=[]),
        _wire(kind="match", body={"block_hashes": "not base64!"}),
        _wire(kind="match", body={"block_hashes": 5}),
        _wire(kind="block_events", body={"first_number": 1, "events": [{"action": "exploded"}]}),
        _wire(kind="stream", body={"tokens": [TOKENS_BODY | {"logprobs": [None, None]}]}),
        _wire(kind="stream", body={"tokens": [TOKENS_BODY | {"logprobs": [{"token_logprob": None}]}]}),
        _wire(sender=None),
        _wire(sender="s" * (SENDER_CHARS_MAX + 1)),
        _wire(seq="1"),
        _wire(incarnation=1.5),
    ],
)
def test_what_is_malformed_is_refused(data: bytes) -> None:
    with pytest.raises(ProtocolError):
        decode(data)


@given(st.binary(max_size=200))
def test_any_bytes_decode_or_are_refused(data: bytes) -> None:
    with pytest.raises(ProtocolError):
        decode(data)


@given(st.data())
@settings(max_examples=200, deadline=None)
def test_a_damaged_message_is_refused_or_still_a_message(data: st.DataObject) -> None:
    whole = bytearray(encode(MatchRequest(b"\x01" * 32), InstanceId("me"), 1, 1, 1.0))
    at = data.draw(st.integers(0, len(whole) - 1))
    whole[at] = data.draw(st.integers(0, 255))
    kinds: tuple[type, ...] = ()
    try:
        kinds = (type(decode(bytes(whole))[1]),)
    except ProtocolError:
        return
    assert kinds[0] in MESSAGE_KINDS.values()


def test_what_json_cannot_carry_is_refused_by_the_sender() -> None:
    with pytest.raises(ProtocolError, match="cancel"):
        encode(Cancel(RequestId("\ud800"), 1), InstanceId("me"), 1, 1, 1.0)


def test_numbers_of_a_load_and_of_an_envelope_have_64_bits() -> None:
    load = LoadSnapshot(InstanceId("d"), (Role.DECODE,), InstanceState.SERVING, blocks=2**63 - 1)
    whole = orjson.loads(encode(load, InstanceId("d"), 1, 1, 1.0))
    assert decode(orjson.dumps(whole))[1] == load
    written = orjson.dumps(whole)
    for field in (b'"blocks":', b'"seq":', b'"incarnation":'):
        at = written.index(field) + len(field)
        with pytest.raises(ProtocolError):
            decode(written[:at] + b"9" * 20 + written[at:].lstrip(b"0123456789"))


def test_empty_messages_have_empty_bodies() -> None:
    assert orjson.loads(encode(Describe(), InstanceId("me"), 1, 1, 1.0))["body"] == {}


def test_a_request_without_a_window_is_for_the_whole_inventory() -> None:
    """As it was before there were windows: fields are only added."""
    whole = orjson.loads(encode(InventoryRequest(), InstanceId("me"), 1, 1, 1.0))
    assert decode(orjson.dumps({**whole, "body": {}}))[1] == InventoryRequest(0, 0, 0)
