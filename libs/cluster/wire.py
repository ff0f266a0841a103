"""Messages to bytes and back: a JSON object with an envelope, validated on receipt.

    {"v": 1, "kind": "submit", "sender": "...", "incarnation": 1, "seq": 7, "sent_at_s": 1.5, "body": {...}}

Knows no subjects and no transport.
"""

from dataclasses import dataclass
from typing import Annotated, Any, TypeVar

import msgspec
import orjson

from cluster.errors import ProtocolError
from cluster.messages import MESSAGE_KINDS, Decision, MatchReply
from kvindex.core import InstanceId
from policy.core import LoadSnapshot

VERSION = 1

SENDER_CHARS_MAX = 255
"""Receivers remember senders by name; instances have much shorter ones."""

RecordT = TypeVar("RecordT")
Int64 = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]

_KIND_OF = {cls: kind for kind, cls in MESSAGE_KINDS.items()}
_ENCODER = msgspec.json.Encoder()


@dataclass(frozen=True, slots=True)
class Envelope:
    """Who sent a message and in which order. `seq` counts per sender and subject, from 1."""

    v: int
    kind: str
    sender: InstanceId
    incarnation: int
    seq: int
    sent_at_s: float


class _Outgoing(msgspec.Struct, frozen=True):
    v: int
    kind: str
    sender: str
    incarnation: int
    seq: int
    sent_at_s: float
    body: object


class _Incoming(msgspec.Struct, frozen=True):
    v: Int64
    kind: str
    sender: Annotated[str, msgspec.Meta(max_length=SENDER_CHARS_MAX)]
    incarnation: Int64
    seq: Int64
    sent_at_s: float
    body: msgspec.Raw


_ADDED_UP = frozenset({LoadSnapshot, MatchReply, Decision})
"""Messages whose numbers conductors add up in columns of 64 bits as they came. A larger one is malformed, as
orjson reads it; of other messages who receives them checks what counts."""
_DECODER = msgspec.json.Decoder(_Incoming)
_BODY_DECODERS: dict[str, msgspec.json.Decoder[Any]] = {
    kind: msgspec.json.Decoder(cls) for kind, cls in MESSAGE_KINDS.items()
}


def kind_of(message_class: type) -> str:
    """What messages of this class, one of MESSAGE_KINDS, are called on the wire."""
    return _KIND_OF[message_class]


def encode(body: object, sender: InstanceId, incarnation: int, seq: int, sent_at_s: float) -> bytes:
    """The wire form of `body`, whose class must be one of MESSAGE_KINDS.

    ProtocolError where a value has no JSON form, such as text with a lone surrogate.
    """
    kind = kind_of(type(body))
    try:
        return _ENCODER.encode(_Outgoing(VERSION, kind, sender, incarnation, seq, sent_at_s, body))
    except (UnicodeEncodeError, TypeError) as error:
        raise ProtocolError(f"{kind} cannot be encoded: {error}") from error


def decode(data: bytes) -> tuple[Envelope, object]:
    """Envelope and body; ProtocolError names what is wrong with `data`."""
    try:
        wire = _DECODER.decode(data)
        kind = wire.kind
        decoder = _BODY_DECODERS.get(kind)
        if decoder is None:
            raise ProtocolError(f"unknown message kind {kind[:64]!r}")
        body: object
        if decoder.type in _ADDED_UP:
            body = msgspec.convert(orjson.loads(memoryview(wire.body)), decoder.type)
        else:
            body = decoder.decode(wire.body)
    except (msgspec.DecodeError, orjson.JSONDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ProtocolError(f"malformed message: {error}") from error
    sender = InstanceId(wire.sender)
    return Envelope(wire.v, kind, sender, wire.incarnation, wire.seq, wire.sent_at_s), body


def encode_record(record: object) -> bytes:
    """JSON of one control-plane record (a frozen dataclass)."""
    return _ENCODER.encode(record)


def decode_record(data: bytes, record_class: type[RecordT]) -> RecordT:
    """A control-plane record; ProtocolError names what is wrong with `data`."""
    try:
        return msgspec.convert(orjson.loads(data), record_class)
    except (orjson.JSONDecodeError, msgspec.ValidationError) as error:
        raise ProtocolError(f"malformed {record_class.__name__}: {error}") from error
