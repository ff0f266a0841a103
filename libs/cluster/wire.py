"""Messages to bytes and back: a JSON object with an envelope, validated on receipt.

    {"v": 1, "kind": "submit", "sender": "...", "incarnation": 1, "seq": 7, "sent_at_s": 1.5, "body": {...}}

Knows no subjects and no transport.
"""

from base64 import b64encode
from dataclasses import dataclass
from typing import Annotated, TypeVar

import msgspec
import orjson

from cluster.errors import ProtocolError
from cluster.messages import MESSAGE_KINDS
from kvindex.core import InstanceId

VERSION = 1

SENDER_CHARS_MAX = 255
"""Receivers remember senders by name; instances have much shorter ones."""

RecordT = TypeVar("RecordT")

_KIND_OF = {cls: kind for kind, cls in MESSAGE_KINDS.items()}


@dataclass(frozen=True, slots=True)
class Envelope:
    """Who sent a message and in which order. `seq` counts per sender and subject, from 1."""

    v: int
    kind: str
    sender: InstanceId
    incarnation: int
    seq: int
    sent_at_s: float


@dataclass(frozen=True, slots=True)
class _Wire:
    v: int
    kind: str
    sender: Annotated[str, msgspec.Meta(max_length=SENDER_CHARS_MAX)]
    incarnation: int
    seq: int
    sent_at_s: float
    body: object


def kind_of(message_class: type) -> str:
    """What messages of this class, one of MESSAGE_KINDS, are called on the wire."""
    return _KIND_OF[message_class]


def encode(body: object, sender: InstanceId, incarnation: int, seq: int, sent_at_s: float) -> bytes:
    """The wire form of `body`, whose class must be one of MESSAGE_KINDS.

    ProtocolError where a value has no JSON form: text with a lone surrogate, an integer over 64 bits.
    """
    kind = kind_of(type(body))
    wire = _Wire(VERSION, kind, sender, incarnation, seq, sent_at_s, body)
    try:
        return orjson.dumps(wire, default=_encode_bytes)
    except orjson.JSONEncodeError as error:
        raise ProtocolError(f"{wire.kind} cannot be encoded: {error}") from error


def decode(data: bytes) -> tuple[Envelope, object]:
    """Envelope and body; ProtocolError names what is wrong with `data`."""
    try:
        wire = msgspec.convert(orjson.loads(data), _Wire)
        message_class = MESSAGE_KINDS.get(wire.kind)
        if message_class is None:
            raise ProtocolError(f"unknown message kind {wire.kind[:64]!r}")
        body: object = msgspec.convert(wire.body, message_class)
    except (orjson.JSONDecodeError, msgspec.ValidationError, RecursionError) as error:
        raise ProtocolError(f"malformed message: {error}") from error
    envelope = Envelope(
        wire.v, wire.kind, InstanceId(wire.sender), wire.incarnation, wire.seq, wire.sent_at_s
    )
    return envelope, body


def encode_record(record: object) -> bytes:
    """JSON of one control-plane record (a frozen dataclass)."""
    return orjson.dumps(record, default=_encode_bytes)


def decode_record(data: bytes, record_class: type[RecordT]) -> RecordT:
    """A control-plane record; ProtocolError names what is wrong with `data`."""
    try:
        return msgspec.convert(orjson.loads(data), record_class)
    except (orjson.JSONDecodeError, msgspec.ValidationError) as error:
        raise ProtocolError(f"malformed {record_class.__name__}: {error}") from error


def _encode_bytes(value: object) -> str:
    if isinstance(value, bytes | bytearray | memoryview):
        return b64encode(value).decode("ascii")
    raise TypeError(f"cannot encode {type(value).__name__}")
