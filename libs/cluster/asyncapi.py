"""The bus as an AsyncAPI 3.0 document: what `docs/asyncapi.json` must be.

    python -m cluster.asyncapi docs/asyncapi.json

Made of `cluster.exchanges` and the message classes, so that it says what the code says. Operations are told
from the side of the one whom a subject belongs to.
"""

import sys
from collections.abc import Iterable, Mapping

import orjson

from cluster.delivery import CLIENT_ID_HEADER, TRACE_HEADER
from cluster.document_file import write_document
from cluster.exchanges import ANY_INSTANCE, CHANNELS, INSTANCE_PARAMETER, Channel, Exchange
from cluster.message_schemas import SCHEMAS, UNIT, Schema, schemas_of
from cluster.messages import MESSAGE_KINDS, InstanceRecord
from cluster.tracing import CLIENT_REQUEST_ID_CHARS_MAX
from cluster.wire import SENDER_CHARS_MAX, VERSION, kind_of

REPLY_CHANNEL = "reply"
NATS_BINDING = "0.1.0"

ABOUT = """\
Every message that goes over NATS between the processes of a Moonpool cluster.

A message is one JSON object: an envelope with the message's kind and body. Fields are only ever added:
ignore those you do not know. Bodies hold no wall-clock times: deadlines and ages are seconds left or passed.
Arrays of hashes and of token ids are packed bytes in base64. Requests are NATS requests: the answer goes to
the reply subject of the question. What could not be read or handled is answered with `handler_failed`.
"""


def document() -> Schema:
    """The whole document, of plain JSON values."""
    replies = {reply for channel in CHANNELS for exchange in channel.exchanges for reply in exchange.replies}
    return {
        "asyncapi": "3.0.0",
        "info": {"title": "Moonpool", "version": f"{VERSION}.0.0", "description": ABOUT},
        "defaultContentType": "application/json",
        "servers": {"nats": {"host": "127.0.0.1:4222", "protocol": "nats"}},
        "channels": {
            **{channel.name: _channel(channel) for channel in CHANNELS},
            REPLY_CHANNEL: {
                "address": None,
                "description": "The reply subject of a request, which the asker's NATS client makes up.",
                "messages": _message_refs(replies),
            },
        },
        "operations": {
            _operation_name(channel, exchange): _operation(channel, exchange)
            for channel in CHANNELS
            for exchange in channel.exchanges
        },
        "components": {
            "messages": {kind: _message(kind, cls) for kind, cls in MESSAGE_KINDS.items()},
            "schemas": {**schemas_of((*MESSAGE_KINDS.values(), InstanceRecord)), "Headers": _headers()},
        },
    }


def document_bytes() -> bytes:
    """As it is kept in the repository."""
    return orjson.dumps(document(), option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE)


def _channel(channel: Channel) -> Schema:
    followed = f" Follow all instances on `{channel.everyone}`." if channel.everyone else ""
    described: Schema = {
        "address": channel.subject,
        "description": channel.summary + followed,
        "messages": _message_refs(exchange.message for exchange in channel.exchanges),
    }
    if ANY_INSTANCE in channel.subject:
        described["parameters"] = {INSTANCE_PARAMETER: {"description": "The name of an instance."}}
    return described


def _operation_name(channel: Channel, exchange: Exchange) -> str:
    return f"{channel.name}.{kind_of(exchange.message)}"


def _operation(channel: Channel, exchange: Exchange) -> Schema:
    reference = f"#/channels/{channel.name}"
    operation: Schema = {
        "action": channel.action,
        "channel": {"$ref": reference},
        "messages": [{"$ref": f"{reference}/messages/{kind_of(exchange.message)}"}],
    }
    if channel.queue:
        operation["bindings"] = {"nats": {"queue": channel.queue, "bindingVersion": NATS_BINDING}}
    if exchange.replies:
        operation["reply"] = {
            "channel": {"$ref": f"#/channels/{REPLY_CHANNEL}"},
            "messages": [
                {"$ref": f"#/channels/{REPLY_CHANNEL}/messages/{kind_of(reply)}"}
                for reply in exchange.replies
            ],
        }
    if exchange.replies_many:
        operation["description"] = "Answered by as many messages as it takes, in order, on one reply subject."
    return operation


def _message_refs(classes: Iterable[type]) -> Mapping[str, Schema]:
    return {kind: {"$ref": f"#/components/messages/{kind}"} for kind in sorted(map(kind_of, classes))}


def _message(kind: str, cls: type) -> Schema:
    return {
        "name": kind,
        "title": cls.__name__,
        "headers": {"$ref": f"{SCHEMAS}Headers"},
        "payload": _enveloped(kind, {"$ref": f"{SCHEMAS}{cls.__name__}"}),
    }


def _enveloped(kind: str, body: Schema) -> Schema:
    properties: dict[str, Schema] = {
        "v": {"type": "integer", "description": f"Version of the envelope: {VERSION}."},
        "kind": {"const": kind},
        "sender": {
            "type": "string",
            "maxLength": SENDER_CHARS_MAX,
            "description": "Name of the instance that sent it.",
        },
        "incarnation": {
            "type": "integer",
            "description": "Changes only with the sender's process: the larger is the later one.",
        },
        "seq": {"type": "integer", "description": "Counts per sender and subject, from 1."},
        "sent_at_s": {
            "type": "number",
            "description": "The sender's clock, since the Unix epoch. For people: nothing is decided on it.",
            UNIT: "seconds",
        },
        "body": body,
    }
    return {"type": "object", "properties": properties, "required": list(properties)}


def _headers() -> Schema:
    return {
        "type": "object",
        "properties": {
            TRACE_HEADER: {
                "type": "string",
                "pattern": "^00-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}$",
                "description": "W3C trace context, where the message belongs to a client's request.",
            },
            CLIENT_ID_HEADER: {
                "type": "string",
                "maxLength": CLIENT_REQUEST_ID_CHARS_MAX,
                "description": "The client's own id of that request, for logs, where it gave one.",
            },
        },
    }


def main(arguments: list[str]) -> int:
    return write_document("cluster.asyncapi", "docs/asyncapi.json", document_bytes, arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
