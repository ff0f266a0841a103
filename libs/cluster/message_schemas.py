"""JSON schemas (draft 7) of message classes: shapes from their types, words from their docstrings.

What a reader in another language has to know beside the types: `bytes` are base64 of packed arrays, whose
items PACKED names; numbers have the unit that their names end in.
"""

import ast
import inspect
from collections.abc import Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import NewType, get_args, get_type_hints

import msgspec

Schema = dict[str, object]

SCHEMAS = "#/components/schemas/"
UNIT = "x-unit"

_HASHES = "Packed block hashes, 16 bytes each, first to last."
_HASH = "One block hash of 16 bytes, or nothing."
_TOKEN_IDS = "Packed token ids, a little-endian int32 each."
_BLOCK_IDS = "Packed block ids, a little-endian int32 each."

PACKED: Mapping[str, str] = MappingProxyType(
    {
        "block_hashes": _HASHES,
        "parents": _HASHES,
        "parent": _HASH,
        "last_block_hash": _HASH,
        "family": _HASH,
        "token_ids": _TOKEN_IDS,
        "prompt_token_ids": _TOKEN_IDS,
        "output_token_ids": _TOKEN_IDS,
        "block_ids": _BLOCK_IDS,
    }
)
"""What is in a field of type `bytes`, by its name."""

_BOUNDS = ("_max", "_min", "_total")
_UNITS = (
    ("_bytes_per_s", "bytes per second"),
    ("_ms", "milliseconds"),
    ("_s", "seconds"),
    ("_bytes", "bytes"),
    ("_tokens", "tokens"),
    ("_blocks", "blocks"),
)


def schemas_of(classes: Iterable[type]) -> dict[str, Schema]:
    """By class name: `classes` and all classes in their fields, with references into SCHEMAS."""
    reached: dict[str, type] = {}
    for cls in classes:
        _reach(cls, reached)
    _, components = msgspec.json.schema_components(tuple(reached.values()), ref_template=f"{SCHEMAS}{{name}}")
    docs = _field_docs(reached.values())
    return {name: _told(components[name], docs.get(name, {})) for name in sorted(components)}


def unit_of(field_name: str) -> str | None:
    """What a number of this name counts, where the name says it."""
    for bound in _BOUNDS:
        field_name = field_name.removesuffix(bound)
    return next((unit for suffix, unit in _UNITS if field_name.endswith(suffix)), None)


def _reach(kind: object, reached: dict[str, type]) -> None:
    """Add the classes that a type is made of, and theirs."""
    if isinstance(kind, NewType):
        return
    for part in get_args(kind):
        _reach(part, reached)
    if isinstance(kind, type) and kind.__module__ != "builtins" and kind.__name__ not in reached:
        reached[kind.__name__] = kind
        for part in get_type_hints(kind).values():
            _reach(part, reached)


def _field_docs(classes: Iterable[type]) -> Mapping[str, Mapping[str, str]]:
    """By class and field: the docstring under the field."""
    docs: dict[str, Mapping[str, str]] = {}
    for module in {inspect.getmodule(cls) for cls in classes}:
        assert module is not None
        for node in ast.parse(inspect.getsource(module)).body:
            if isinstance(node, ast.ClassDef):
                docs[node.name] = dict(_docs_in(node))
    return docs


def _docs_in(node: ast.ClassDef) -> Iterator[tuple[str, str]]:
    for statement, following in zip(node.body, node.body[1:], strict=False):
        match statement, following:
            case (ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text)))):
                yield name, inspect.cleandoc(text)


def _told(schema: Schema, docs: Mapping[str, str]) -> Schema:
    """The schema of a class with what its fields mean."""
    schema = _as_draft_7(schema)
    properties = schema.get("properties")
    if isinstance(properties, dict):
        schema["properties"] = {name: _field(name, one, docs.get(name)) for name, one in properties.items()}
    return schema


def _field(name: str, schema: Schema, doc: str | None) -> Schema:
    packed = PACKED.get(name) if schema.get("contentEncoding") == "base64" else None
    unit = unit_of(name) if _is_number(schema) else None
    description = " ".join(text for text in (packed, doc) if text)
    told = {
        **schema,
        **({"description": description} if description else {}),
        **({UNIT: unit} if unit else {}),
    }
    if "$ref" in told and len(told) > 1:
        # In draft 7 nothing counts beside a $ref.
        told["allOf"] = [{"$ref": told.pop("$ref")}]
    return told


def _is_number(schema: Schema) -> bool:
    alternatives = schema.get("anyOf")
    kinds = alternatives if isinstance(alternatives, list) else [schema]
    return any(kind.get("type") in ("integer", "number") for kind in kinds)


def _as_draft_7(schema: Schema) -> Schema:
    """msgspec speaks draft 2020-12, AsyncAPI draft 7: they differ in how a tuple is told."""
    changed = {key: _part_as_draft_7(value) for key, value in schema.items()}
    if "prefixItems" in changed:
        changed["items"] = changed.pop("prefixItems")
        changed["additionalItems"] = False
    return changed


def _part_as_draft_7(value: object) -> object:
    match value:
        case dict():
            return _as_draft_7(value)
        case list():
            return [_part_as_draft_7(one) for one in value]
    return value
