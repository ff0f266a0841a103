"""A spec as the text of a grammar, its size checked. Pure; whether a grammar can be met is for compiling."""

import json
from collections.abc import Callable

import orjson
from llguidance import LLMatcher, regex_to_lark
from llguidance.gbnf_to_lark import any_to_lark

from policy.core import STRUCTURE_BYTES_MAX, StructureKind, StructureSpec
from structures.errors import StructureError
from structures.explanation import shortened

REGEX_BYTES_MAX = 8 * 1024
GRAMMAR_BYTES_MAX = 16 * 1024
"""The time to compile a regular expression may grow with the square of its length: 1.5 s at 16 KiB."""
WHITESPACE = r" |\n {0,32}|\n\t{0,16}"
"""Between the parts of JSON: what people write, but not without end, for some models never stop."""
ANY_OBJECT: dict[str, object] = {"type": "object"}
FORMATS = frozenset(
    {
        *("date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"),
        "unknown",
    }
)
"""Strings that are held to their `format`. By JSON Schema any other format is a remark."""
_VALUES = frozenset({"const", "default", "enum", "examples"})
"""Keywords behind which stands no schema but JSON of any kind."""
_SCHEMAS_BY_NAME = frozenset({"properties", "patternProperties", "$defs", "definitions"})
"""Keywords behind which stand schemas by names that somebody chose: none of these names is a keyword."""


def check_size(spec: StructureSpec) -> None:
    """Raises StructureError where the text is longer than its kind allows."""
    size_bytes = len(spec.text.encode(errors="replace"))
    size_bytes_max = _BYTES_MAX_OF.get(spec.kind, STRUCTURE_BYTES_MAX)
    if size_bytes > size_bytes_max:
        raise StructureError(f"the text has {size_bytes} bytes, must have at most {size_bytes_max}")


def grammar_of(spec: StructureSpec) -> str:
    """llguidance's own form of it. Raises StructureError where the text is none of its kind; what else is
    wrong with it may raise anything."""
    return _GRAMMAR_OF[spec.kind](spec.text)


def _of_schema(schema: dict[str, object]) -> str:
    return LLMatcher.grammar_from_json_schema(schema, overrides={"whitespace_pattern": WHITESPACE})


def _of_any_object(text: str) -> str:
    return _of_schema(ANY_OBJECT)


def _of_json_schema(text: str) -> str:
    schema = _json(text)
    if not isinstance(schema, dict):
        raise StructureError(f"a JSON schema must be an object, not {type(schema).__name__}")
    return _of_schema(without_unknown_formats(schema))


def without_unknown_formats(schema: dict[str, object]) -> dict[str, object]:
    """A schema that allows the same, without the remarks. However deep it is: what is too deep is for
    compiling to say."""
    kept = dict(schema)
    unread: list[tuple[dict[str, object] | list[object], bool]] = [(kept, False)]
    while unread:
        node, names = unread.pop()
        if isinstance(node, list):
            for index, value in enumerate(node):
                if isinstance(value, dict | list):
                    node[index] = copied = value.copy()
                    unread.append((copied, False))
            continue
        if not names and _is_remark(node.get("format")):
            del node["format"]
        for key, value in node.items():
            if isinstance(value, dict | list) and (names or key not in _VALUES):
                node[key] = copied = value.copy()
                unread.append((copied, not names and key in _SCHEMAS_BY_NAME))
    return kept


def _is_remark(form: object) -> bool:
    return isinstance(form, str) and form not in FORMATS


def _of_regex(text: str) -> str:
    # \d is an ASCII digit: Unicode's are in nobody's mind who writes it, but in a random model's.
    return LLMatcher.grammar_from_regex(regex_to_lark(text, use_ascii="d"))


def _of_choice(text: str) -> str:
    choices = _json(text)
    if not isinstance(choices, list) or not choices or not all(isinstance(choice, str) for choice in choices):
        raise StructureError("a choice must be a JSON list of at least one string")
    # One terminal, for a rule's alternatives are bounded; its strings are written as JSON's are.
    return LLMatcher.grammar_from_lark("start: CHOICE\nCHOICE: " + " | ".join(map(json.dumps, choices)))


def _of_grammar(text: str) -> str:
    try:
        return LLMatcher.grammar_from_lark(any_to_lark(text))
    except Exception as error:  # from GBNF, by a parser that does not say what it raises
        raise StructureError(f"neither Lark nor GBNF: {shortened(str(error))}") from error


def _json(text: str) -> object:
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError as error:
        raise StructureError(f"not JSON: {error}") from error


_GRAMMAR_OF: dict[StructureKind, Callable[[str], str]] = {
    StructureKind.JSON_OBJECT: _of_any_object,
    StructureKind.JSON_SCHEMA: _of_json_schema,
    StructureKind.REGEX: _of_regex,
    StructureKind.CHOICE: _of_choice,
    StructureKind.GRAMMAR: _of_grammar,
}
_BYTES_MAX_OF = {StructureKind.REGEX: REGEX_BYTES_MAX, StructureKind.GRAMMAR: GRAMMAR_BYTES_MAX}
