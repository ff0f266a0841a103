"""What msgspec says of a body, in the words of the API: a 400 that names the parameter, what it is, and
the limit that it breaks. Pure.
"""

import re
from collections.abc import Callable, Mapping

import msgspec
from msgspec import Raw

from gateway.api.api_errors import ApiError, invalid
from gateway.api.ranges import shown

VALUE_CHARS_SHOWN_MAX = 64
NAME_CHARS_SHOWN_MAX = 128
MESSAGE_CHARS_KEPT = 1024
"""Of msgspec's complaint, at its beginning and at its end."""
PROMPT_PARAMS = frozenset({"messages", "prompt", "tokens"})
"""They may be as long as a body: nothing of them is shown."""

_ERROR_PATH = re.compile(r"^(?P<what>.*) - at `\$\.?(?P<path>[^`]*)`$", re.DOTALL)
_MISSING_FIELD = re.compile(r"missing required field `(?P<field>[^`]*)`")
_UNKNOWN_FIELD = re.compile(r"unknown field `(?P<field>[^`]*)`")
_NUMBER_LIMIT = re.compile(r"^Expected `(?:int|float)` (?P<relation>[<>]=?) (?P<limit>\S+)$")
_LENGTH_LIMIT = re.compile(
    r"^Expected `(?P<kind>str|array|object)` of length (?P<relation>[<>]=?) (?P<limit>\d+)$"
)
_PATTERN = re.compile(r"^Expected `str` matching regex (?P<pattern>.*)$", re.DOTALL)
_UNSUPPORTED_IN_MESSAGE = re.compile(r"^messages\[[^]]*\]\.(annotations|audio|function_call|refusal)(?=$|\W)")
_OTHER_PART = re.compile(
    r"^(?P<part>messages\[[^]]*\]\.content\[[^]]*\])\."
    r"(?:type\.Invalid enum value|.*unknown field `(?:image_url|input_audio|video_url|file)`)"
)
"""By what is wrong with its type, or with what came before that."""
_LONE_SURROGATE = re.compile(
    rb"\\u[dD][89abAB][0-9a-fA-F]{2}(?!\\u[dD][c-fC-F])"
    rb"|(?<!\\u[dD][89abAB][0-9a-fA-F]{2})\\u[dD][c-fC-F][0-9a-fA-F]{2}"
)
_STEP = re.compile(r"\[(?P<index>\d+)\]|(?P<name>[^.\[\]]+)")
_WORDS = {">=": "at least", "<=": "at most", ">": "greater than", "<": "less than"}


def explained(error: msgspec.ValidationError, values: Mapping[str, Raw], root: str = "") -> ApiError:
    """msgspec's complaint with the parameter it is about. `values` has the parameters as the JSON that came;
    `root` is the parameter that was decoded where it was not the whole body."""
    path, what = _located(str(error), root)
    if not path and what.startswith("Expected `object`"):
        return not_json("it must be an object")
    if unsupported := _UNSUPPORTED_IN_MESSAGE.match(path):
        param = unsupported[0]
        return invalid(param, f"{param} is not supported (only as null or empty)", "unsupported_parameter")
    if other_part := _OTHER_PART.match(f"{path}.{what}"):
        param = other_part["part"]
        return invalid(param, f"{param} is no text: other parts are not supported", "unsupported_parameter")
    if unknown := _UNKNOWN_FIELD.search(what):
        return unknown_parameter(f"{path}.{unknown['field']}" if path else unknown["field"])
    if missing := _MISSING_FIELD.search(what):
        param = f"{path}.{missing['field']}" if path else missing["field"]
        return invalid(param, f"{param} is missing", "missing_required_parameter")
    if broken := _broken_limit(path, what, values):
        return invalid(path, broken)
    code = "invalid_value" if what.startswith("Invalid ") else "invalid_type"
    return invalid(path or None, f"{path}: {what}" if path else what, code)


def unknown_parameter(name: str) -> ApiError:
    param = name[:NAME_CHARS_SHOWN_MAX]
    return invalid(param, f"unknown parameter: {param}", "unknown_parameter")


def unreadable(error: Exception, body: bytes) -> ApiError:
    """For what is no JSON. msgspec says of half a character that the body was cut."""
    if _LONE_SURROGATE.search(body):
        return not_json(r"a string has half of a character, one of \ud800 to \udfff without the other half")
    return not_json(str(error))


def not_json(reason: str) -> ApiError:
    return invalid(None, f"the body is not valid JSON: {reason}", "invalid_json")


def _located(message: str, root: str) -> tuple[str, str]:
    if len(message) > 2 * MESSAGE_CHARS_KEPT:
        # It holds what the client wrote, a name as long as a body for instance.
        message = f"{message[:MESSAGE_CHARS_KEPT]}…{message[-MESSAGE_CHARS_KEPT:]}"
    located = _ERROR_PATH.match(message)
    if located is None:
        return root, message
    path = located["path"]
    return (root + path if path.startswith("[") or not root else f"{root}.{path}"), located["what"]


def _broken_limit(path: str, what: str, values: Mapping[str, Raw]) -> str | None:
    """What is out of range, its value where that is known, and the limit; None for any other complaint."""
    if number := _NUMBER_LIMIT.match(what):
        must = f"must be {_WORDS[number['relation']]} {number['limit']}"
        return _told(path, values, lambda value: f"is {_shown(value)}", must)
    if length := _LENGTH_LIMIT.match(what):
        unit = "characters" if length["kind"] == "str" else "entries"
        must = f"must have {_WORDS[length['relation']]} {length['limit']} {unit}"
        return _told(path, values, lambda value: _size(value, unit), must)
    if pattern := _PATTERN.match(what):
        return _told(path, values, lambda value: f"is {_shown(value)}", f"must match {pattern['pattern']}")
    return None


def _told(path: str, values: Mapping[str, Raw], told: Callable[[object], str], must: str) -> str:
    found, value = _value_at(path, values)
    said = told(value) if found else ""
    return f"{path} {said}, {must}" if said else f"{path} {must}"


def _value_at(path: str, values: Mapping[str, Raw]) -> tuple[bool, object]:
    """Whether there is something to show at `path`, and what."""
    first, *rest = _STEP.finditer(path) if path else (None,)
    param = first["name"] if first is not None else None
    if param is None or param in PROMPT_PARAMS or param not in values or "[...]" in path:
        return False, None
    value = msgspec.json.decode(values[param])
    for step in rest:
        if isinstance(value, list) and step["index"] is not None and int(step["index"]) < len(value):
            value = value[int(step["index"])]
        elif isinstance(value, dict) and step["name"] in value:
            value = value[step["name"]]
        else:
            return False, None
    return True, value


def _size(value: object, unit: str) -> str:
    return f"has {len(value)} {unit}" if isinstance(value, str | list | dict) else ""


def _shown(value: object) -> str:
    if isinstance(value, int | float) and not isinstance(value, bool):
        return shown(value)
    text = msgspec.json.encode(value).decode()
    return text if len(text) <= VALUE_CHARS_SHOWN_MAX else text[:VALUE_CHARS_SHOWN_MAX] + "…"
