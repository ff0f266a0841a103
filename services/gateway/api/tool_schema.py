"""JSON schemas of calls: what an answer is held to that must call a tool. Pure.

Knows of JSON schemas only how their references point.
"""

from collections.abc import Sequence

FORCED_CALLS_MAX = 16
"""Calls in one answer that must call: a small model would go on listing them for ever."""
SCHEMA_DEPTH_MAX = 100


class SchemaTooDeepError(ValueError):
    pass


def calls_schema(functions: Sequence[tuple[str, dict[str, object]]], *, parallel: bool) -> dict[str, object]:
    """A list of one or more calls of `functions` (name, schema of the parameters).

    Raises SchemaTooDeepError.
    """
    return {
        "type": "array",
        "minItems": 1,
        "maxItems": FORCED_CALLS_MAX if parallel else 1,
        "items": call_schema(functions, pointer="/items"),
    }


def call_schema(
    functions: Sequence[tuple[str, dict[str, object]]], *, pointer: str = "", arguments_key: str = "arguments"
) -> dict[str, object]:
    """One call of any of `functions`. It stands at `pointer` of the whole schema. Raises
    SchemaTooDeepError."""
    return {
        "anyOf": [
            {
                "type": "object",
                "properties": {
                    "name": {"const": name},
                    arguments_key: moved(parameters, f"{pointer}/anyOf/{index}/properties/{arguments_key}"),
                },
                "required": ["name", arguments_key],
                "additionalProperties": False,
            }
            for index, (name, parameters) in enumerate(functions)
        ]
    }


def moved(schema: dict[str, object], pointer: str) -> dict[str, object]:
    """`schema` as it must read where it stands at `pointer` of another one: its references are from the
    root. Raises SchemaTooDeepError."""
    return {key: _moved(key, value, pointer, 1) for key, value in schema.items()}


def _moved(key: str, value: object, pointer: str, depth: int) -> object:
    if depth > SCHEMA_DEPTH_MAX:
        raise SchemaTooDeepError(f"is nested more than {SCHEMA_DEPTH_MAX} deep")
    match value:
        case str() if key == "$ref" and (value == "#" or value.startswith("#/")):
            return f"#{pointer}{value[1:]}"
        case dict():
            return {inner: _moved(inner, each, pointer, depth + 1) for inner, each in value.items()}
        case list():
            return [_moved("", each, pointer, depth + 1) for each in value]
        case _:
            return value
