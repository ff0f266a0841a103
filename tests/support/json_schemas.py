"""Fifty JSON schemas of all kinds, whose documents are all of a bounded size: whoever keeps to one ends."""

from dataclasses import dataclass
from typing import Any

Schema = dict[str, Any]

SHORT: Schema = {"type": "string", "maxLength": 12}
DIGIT: Schema = {"type": "integer", "minimum": 0, "maximum": 9}
FLAG: Schema = {"type": "boolean"}


@dataclass(frozen=True, slots=True)
class Asked:
    """What is asked for in words, and the form of the answer."""

    what: str
    schema: Schema


def closed(*optional: str, **properties: Schema) -> Schema:
    """An object with these properties and no others; all but the `optional` ones must be there."""
    return {
        "type": "object",
        "properties": properties,
        "required": [name for name in properties if name not in optional],
        "additionalProperties": False,
    }


def listed(items: Schema, low: int, high: int) -> Schema:
    return {"type": "array", "items": items, "minItems": low, "maxItems": high}


def whole(low: int, high: int) -> Schema:
    return {"type": "integer", "minimum": low, "maximum": high}


def matching(pattern: str) -> Schema:
    return {"type": "string", "pattern": pattern}


def written(form: str) -> Schema:
    return {"type": "string", "format": form}


ADDRESS = closed(street=SHORT, number=whole(1, 300), city=SHORT)
NODE: Schema = {
    "$defs": {
        "leaf": closed(name=SHORT),
        "branch": closed(name=SHORT, left={"$ref": "#/$defs/leaf"}, right={"$ref": "#/$defs/leaf"}),
    },
    "$ref": "#/$defs/branch",
}
SHARED: Schema = {
    "$defs": {"point": closed(x=DIGIT, y=DIGIT)},
    **closed(start={"$ref": "#/$defs/point"}, end={"$ref": "#/$defs/point"}),
}
NESTED_REFERENCES: Schema = {
    "$defs": {
        "unit": {"enum": ["m", "km", "mile"]},
        "length": closed(value=whole(1, 500), unit={"$ref": "#/$defs/unit"}),
    },
    **listed({"$ref": "#/$defs/length"}, 1, 2),
}
DEFINITIONS: Schema = {
    "definitions": {"size": {"enum": ["S", "M", "L"]}},
    **closed(shirt={"$ref": "#/definitions/size"}, trousers={"$ref": "#/definitions/size"}),
}
CIRCLE = closed(shape={"const": "circle"}, radius=whole(1, 99))
SQUARE = closed(shape={"const": "square"}, side=whole(1, 99))

SCHEMAS = (
    Asked("a yes or no", FLAG),
    Asked("nothing at all", {"type": "null"}),
    Asked("quarters of a litre", {"type": "number", "minimum": 0, "maximum": 2, "multipleOf": 0.25}),
    Asked("a year of the last century", whole(1900, 1999)),
    Asked("a temperature below zero", whole(-40, -1)),
    Asked("a large number", whole(100_000, 999_999_999)),
    Asked("a number above 3 and below 7", {"type": "integer", "exclusiveMinimum": 3, "exclusiveMaximum": 7}),
    Asked("a multiple of five", {"type": "integer", "minimum": 0, "maximum": 100, "multipleOf": 5}),
    Asked("a short word", {"type": "string", "minLength": 3, "maxLength": 10}),
    Asked("the word yes", {"const": "yes"}),
    Asked(
        "a price",
        closed(price={"type": "number", "exclusiveMinimum": 0.5, "maximum": 99.5, "multipleOf": 0.5}),
    ),
    Asked("a fixed object", {"const": {"a": [1, 2, None], "b": "x"}}),
    Asked("a season", {"enum": ["spring", "summer", "autumn", "winter"]}),
    Asked("one of several kinds of values", {"enum": [1, "one", None, True, [1]]}),
    Asked("a word with an accent", {"enum": ["café", "naïve", "東京", "👍"]}),
    Asked("a postal code", matching("^[0-9]{5}$")),
    Asked("a number plate", matching("^[A-Z]{2}-[0-9]{3}-[A-Z]{2}$")),
    Asked("a version", matching("^v[0-9]{1,2}[.][0-9]{1,2}$")),
    Asked("a colour", matching("^#[0-9a-f]{6}$")),
    Asked("an answer to a question", matching("^(yes|no|perhaps)$")),
    Asked("today's date", written("date")),
    Asked("a moment", written("date-time")),
    Asked("an identifier", written("uuid")),
    Asked("an IPv4 address", written("ipv4")),
    Asked("a few digits", listed(DIGIT, 1, 4)),
    Asked("two names", listed(SHORT, 2, 2)),
    Asked("an empty list", listed(DIGIT, 0, 0)),
    Asked("a small matrix", listed(listed(DIGIT, 2, 2), 2, 2)),
    Asked("colours", listed({"enum": ["red", "green", "blue"]}, 1, 3)),
    Asked(
        "a name, a digit and a flag",
        {"type": "array", "prefixItems": [SHORT, DIGIT, FLAG], "items": False, "minItems": 3},
    ),
    Asked("a person", closed(name=SHORT, age=whole(0, 120))),
    Asked("a city and its country", closed(city=SHORT, country={"enum": ["France", "Italy", "Spain"]})),
    Asked("a person who may have a nickname", closed("nickname", name=SHORT, nickname=SHORT)),
    Asked("settings", closed("debug", "level", debug=FLAG, level={"enum": ["low", "high"]})),
    Asked("a customer with an address", closed(name=SHORT, address=ADDRESS)),
    Asked("something deep", closed(a=closed(b=closed(c=closed(d=DIGIT))))),
    Asked("a team", closed(team=SHORT, members=listed(closed(name=SHORT, number=DIGIT), 1, 2))),
    Asked("an empty object", closed()),
    Asked(
        "a value that may be null", closed(value={"type": ["integer", "null"], "minimum": 0, "maximum": 9})
    ),
    Asked("a number or a word", {"anyOf": [whole(0, 999), SHORT]}),
    Asked("a circle or a square", {"anyOf": [CIRCLE, SQUARE]}),
    Asked("a shape in an object", closed(name=SHORT, shape={"anyOf": [CIRCLE, SQUARE, {"type": "null"}]})),
    Asked("a word or a list of words", {"anyOf": [SHORT, listed(SHORT, 1, 2)]}),
    Asked("a name of two parts", {"allOf": [{"type": "string"}, {"maxLength": 9}, {"minLength": 2}]}),
    Asked("a tree", NODE),
    Asked("a line between two points", SHARED),
    Asked("distances", NESTED_REFERENCES),
    Asked("sizes of clothes", DEFINITIONS),
    Asked("a coded event", closed(code=matching("^[A-Z]{3}[0-9]{2}$"), at=written("date"), ok=FLAG)),
    Asked(
        "a booking",
        closed(
            "note",
            guest=closed(name=SHORT, adults=whole(1, 4)),
            nights=whole(1, 14),
            room={"enum": ["single", "double"]},
            breakfast=FLAG,
            note={"anyOf": [SHORT, {"type": "null"}]},
        ),
    ),
)
