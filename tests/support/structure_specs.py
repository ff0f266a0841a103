"""Specs that every model can hold answers to, and specs that none can."""

import json

from policy.core import StructureKind

BAD = [
    (StructureKind.JSON_SCHEMA, "{", "not JSON"),
    (StructureKind.JSON_SCHEMA, "[]", "must be an object, not list"),
    (StructureKind.JSON_SCHEMA, '{"type": "objct"}', "objct"),
    (StructureKind.JSON_SCHEMA, '{"not": {"type": "null"}}', "not"),
    (StructureKind.JSON_SCHEMA, '{"type": "integer", "minimum": 5, "maximum": 4}', "minimum"),
    (StructureKind.JSON_SCHEMA, '{"$ref": "https://example.org/s.json"}', "example.org"),
    (StructureKind.JSON_SCHEMA, '{"type": "string", "pattern": "(?=a)"}', "look-around"),
    (StructureKind.JSON_SCHEMA, "[" * 20_000, "not JSON"),
    (StructureKind.REGEX, "(a", "unclosed group"),
    (StructureKind.REGEX, "(?=a)b", "look-around"),
    (StructureKind.REGEX, "(a{1000}){1000}", "too many expressions"),
    (StructureKind.REGEX, "a?" * 4096, "lexer"),
    (StructureKind.CHOICE, "yes", "not JSON"),
    (StructureKind.CHOICE, "[]", "list of at least one string"),
    (StructureKind.CHOICE, '["a", 1]', "list of at least one string"),
    (StructureKind.GRAMMAR, "start: foo", "foo"),
    (StructureKind.GRAMMAR, "no grammar at all", "neither Lark nor GBNF"),
    (StructureKind.GRAMMAR, "start: a\na: b\nb: a", "no text has this form"),
    (StructureKind.REGEX, r"[^\s\S]", "no text has this form"),
    (StructureKind.JSON_SCHEMA, '{"$ref": "#"}', "no text has this form"),
    (StructureKind.GRAMMAR, 'start: "xy" start', "Too many items"),
    (StructureKind.GRAMMAR, "start: " + "(" * 8_000 + '"a"' + ")" * 8_000, "nested"),
]
"""With a word of the reason."""

GOOD = [
    (StructureKind.JSON_OBJECT, ""),
    (StructureKind.JSON_SCHEMA, "{}"),
    (StructureKind.JSON_SCHEMA, '{"type": "object", "properties": {"a": {"type": "integer"}}}'),
    (StructureKind.JSON_SCHEMA, '{"type": "array", "items": {"$ref": "#"}}'),
    (StructureKind.JSON_SCHEMA, '{"enum": ["a", "é", "☃", 1, null]}'),
    (StructureKind.JSON_SCHEMA, '{"type": "string", "format": "date-time"}'),
    (StructureKind.JSON_SCHEMA, json.dumps({"anyOf": [{"const": f"{i}"} for i in range(500)]})),
    (StructureKind.REGEX, r"\d{3}-\d{4}"),
    (StructureKind.REGEX, r"(?s:.)*"),
    (StructureKind.REGEX, "[äöü]+|你好"),
    (StructureKind.CHOICE, json.dumps(["yes", "no", "\n", '"', ""])),
    (StructureKind.GRAMMAR, 'start: "a" start | "b"'),
    (StructureKind.GRAMMAR, 'root ::= [a-c]+ | "<" root ">"'),
]
