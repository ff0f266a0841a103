"""Whether messages are as the AsyncAPI document says."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import orjson
from jsonschema import Draft7Validator
from referencing import Registry, Resource
from referencing.jsonschema import DRAFT7

FILE = Path(__file__).parents[2] / "docs" / "asyncapi.json"
_URI = "urn:asyncapi"


class BusDocument:
    def __init__(self) -> None:
        self.tree: Mapping[str, Any] = orjson.loads(FILE.read_bytes())
        resource = Resource.from_contents(self.tree, default_specification=DRAFT7)
        self._registry = Registry().with_resource(_URI, resource)
        self._payloads = {kind: self._validator(kind) for kind in self.tree["components"]["messages"]}
        self._channels = [
            (
                re.compile(re.sub(r"\\{\w+\\}", "[^.]+", re.escape(channel["address"]))),
                set(channel["messages"]),
            )
            for channel in self.tree["channels"].values()
            if channel["address"] is not None
        ]

    def check(self, data: bytes) -> str:
        """The kind of a message; ValidationError where it is not as its schema says."""
        message = orjson.loads(data)
        kind: str = message["kind"]
        self._payloads[kind].validate(message)
        return kind

    def kinds_on(self, subject: str) -> set[str]:
        """What may be told on a subject: nothing where the document does not have it."""
        return next((kinds for address, kinds in self._channels if address.fullmatch(subject)), set())

    def kinds_in_replies(self) -> set[str]:
        return set(self.tree["channels"]["reply"]["messages"])

    def lookup(self, reference: str) -> Any:
        """What a local reference stands for; KeyError where it is broken."""
        found: Any = self.tree
        for word in reference.removeprefix("#/").split("/"):
            found = found[word]
        return found

    def _validator(self, kind: str) -> Draft7Validator:
        schema = {"$ref": f"{_URI}#/components/messages/{kind}/payload"}
        return Draft7Validator(schema, registry=self._registry)


def _pattern(address: str) -> re.Pattern[str]:
    """Any one word stands for a parameter."""
    return re.compile(re.sub(r"\\{\w+\\}", "[^.]+", re.escape(address)))
