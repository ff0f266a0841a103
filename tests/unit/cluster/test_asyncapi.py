"""The AsyncAPI document says what the code says now, all of it, and real messages are as it says."""

import ast
import inspect
from base64 import b64decode
from collections.abc import Iterator
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any, get_type_hints

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jsonschema import Draft7Validator, ValidationError
from tests.support.bus_document import FILE, BusDocument
from tests.support.message_values import values_of

from cluster import subjects
from cluster.asyncapi import document_bytes, main
from cluster.exchanges import ANY_INSTANCE, CHANNELS
from cluster.message_schemas import PACKED, schemas_of, unit_of
from cluster.messages import MESSAGE_KINDS, HandlerFailed, InstanceRecord
from cluster.wire import encode
from kvindex.core import InstanceId

pytestmark = pytest.mark.unit

DOCUMENT = BusDocument()
SENDER = InstanceId("conductor-1")
WORKER = Path(__file__).parents[3] / "libs" / "worker"


def references(tree: Any) -> Iterator[str]:
    if isinstance(tree, dict):
        if isinstance(tree.get("$ref"), str):
            yield tree["$ref"]
        tree = list(tree.values())
    if isinstance(tree, list):
        for part in tree:
            yield from references(part)


def handled_by_workers() -> set[str]:
    """Names of the classes that a worker's `handlers` methods have an entry for."""
    found: set[str] = set()
    for path in WORKER.glob("*.py"):
        for function in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(function, ast.FunctionDef) and function.name == "handlers":
                for node in ast.walk(function):
                    keys = node.keys if isinstance(node, ast.Dict) else []
                    keys = [node.slice] if isinstance(node, ast.Subscript) else keys
                    found |= {key.id for key in keys if isinstance(key, ast.Name)}
    return found - {"type", "Handler"}


def all_subjects() -> set[str]:
    """What `cluster.subjects` spells, patterns aside."""
    found = {
        value
        for value in vars(subjects).values()
        if isinstance(value, str) and value.startswith(f"{subjects.PREFIX}.") and not value.endswith("*")
    }
    for value in vars(subjects).values():
        if inspect.isfunction(value) and InstanceId in get_type_hints(value).values():
            found.add(value(ANY_INSTANCE))
    return found


def test_the_file_says_what_the_code_says() -> None:
    assert FILE.read_bytes() == document_bytes(), "python -m cluster.asyncapi docs/asyncapi.json"


def test_every_subject_is_a_channel() -> None:
    addresses = [channel.subject for channel in CHANNELS]
    assert sorted(addresses) == sorted(all_subjects())
    assert len(addresses) > 9
    followed = {channel.everyone for channel in CHANNELS if channel.everyone}
    patterns = {value for value in vars(subjects).values() if isinstance(value, str) and value.endswith(".*")}
    assert followed == patterns
    for channel in CHANNELS:
        if channel.everyone:
            assert channel.subject.replace(ANY_INSTANCE, "*") == channel.everyone


def test_every_kind_is_told_or_answered() -> None:
    exchanges = [exchange for channel in CHANNELS for exchange in channel.exchanges]
    used = {exchange.message for exchange in exchanges}
    used |= {reply for exchange in exchanges for reply in exchange.replies}
    assert used == set(MESSAGE_KINDS.values())
    assert DOCUMENT.tree["components"]["messages"].keys() == MESSAGE_KINDS.keys()
    assert all(HandlerFailed in exchange.replies for exchange in exchanges if exchange.replies)


def test_an_instance_is_asked_what_its_handlers_take() -> None:
    (instance,) = (channel for channel in CHANNELS if channel.name == "instance")
    told = {exchange.message.__name__ for exchange in instance.exchanges}
    assert told == {"Describe", *handled_by_workers()}


def test_no_reference_is_broken() -> None:
    found = set(references(DOCUMENT.tree))
    assert len(found) > 60
    for reference in found:
        DOCUMENT.lookup(reference)


def test_an_operation_names_messages_of_its_channels() -> None:
    for name, operation in DOCUMENT.tree["operations"].items():
        sides = [operation, *filter(None, [operation.get("reply")])]
        for side in sides:
            prefix = f"{side['channel']['$ref']}/messages/"
            assert side["messages"], name
            assert all(message["$ref"].startswith(prefix) for message in side["messages"]), name


@pytest.mark.parametrize("kind", MESSAGE_KINDS)
@settings(max_examples=15, deadline=None)
@given(data=st.data())
def test_real_messages_are_as_their_schemas_say(kind: str, data: st.DataObject) -> None:
    body = data.draw(values_of(MESSAGE_KINDS[kind]))
    assert DOCUMENT.check(encode(body, SENDER, 1, 7, 1.5)) == kind


def test_other_messages_are_not() -> None:
    good = orjson.loads(encode(HandlerFailed("why"), SENDER, 1, 7, 1.5))
    for bad in (
        {**good, "body": {}},
        {**good, "body": {"detail": 3}},
        {**good, "seq": "7"},
        {name: value for name, value in good.items() if name != "incarnation"},
    ):
        with pytest.raises(ValidationError):
            DOCUMENT.check(orjson.dumps(bad))


def test_schemas_are_schemas() -> None:
    for schema in DOCUMENT.tree["components"]["schemas"].values():
        Draft7Validator.check_schema(schema)
        assert "prefixItems" not in str(schema)


def test_a_field_says_what_is_in_it_and_in_which_unit() -> None:
    schemas = schemas_of((*MESSAGE_KINDS.values(), InstanceRecord))
    schedule = schemas["ScheduleRequest"]["properties"]
    assert schedule["deadline_s"]["x-unit"] == "seconds"
    assert schedule["ttft_ms_max"]["x-unit"] == "milliseconds"
    assert schedule["block_hashes"]["description"] == (
        f"{PACKED['block_hashes']} Hashes of the full blocks of prompt + output so far, first to last."
    )
    assert "x-unit" not in schedule["attempt"]
    assert schemas["InstanceRecord"]["properties"]["transfer"]["description"].startswith("Descriptor of")
    assert (unit_of("transfer_bytes_per_s"), unit_of("silence_s_max")) == ("bytes per second", "seconds")


def test_of_all_bytes_it_is_told_what_they_are() -> None:
    packed = {
        name
        for schema in DOCUMENT.tree["components"]["schemas"].values()
        for name, field in schema.get("properties", {}).items()
        if "base64" in str(field)
    }
    assert packed
    assert packed <= PACKED.keys()


def test_every_class_is_described_where_the_code_describes_it() -> None:
    schemas = DOCUMENT.tree["components"]["schemas"]
    for cls in MESSAGE_KINDS.values():
        assert is_dataclass(cls)
        if not str(cls.__doc__).startswith(f"{cls.__name__}("):
            assert schemas[cls.__name__]["description"] == inspect.getdoc(cls)


def test_packed_bytes_are_base64_as_other_languages_read_it() -> None:
    kind = MESSAGE_KINDS["match"]
    body = orjson.loads(encode(kind(bytes(range(250, 256)) * 8), SENDER, 1, 1, 0.0))["body"]
    assert b64decode(body["block_hashes"], validate=True) == bytes(range(250, 256)) * 8


def test_the_command_writes_the_file_or_says_why_not(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(tmp_path / "asyncapi.json")]) == 0
    assert (tmp_path / "asyncapi.json").read_bytes() == document_bytes()
    assert main([str(tmp_path / "none" / "asyncapi.json")]) == 1
    assert capsys.readouterr().err.count("\n") == 1
