"""How urgent a request is: its priority and its targets, by fields of its body or by headers of the same
meaning. Owns their names and limits; pure.

A client that gives both has to say the same in both: where they differ the request is refused, as nobody
could tell which one is meant.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass

from gateway.api.api_errors import invalid
from gateway.api.parameter_limits import TBT_MS_MAX, TBT_MS_MIN, TTFT_MS_MAX, TTFT_MS_MIN
from gateway.api.ranges import check_range
from gateway.api.request_types import GenerationRequest
from policy.core import PRIORITY_MAX, PRIORITY_MIN

HEADER_CHARS_SHOWN_MAX = 64


@dataclass(frozen=True, slots=True)
class Urgency:
    """How the answer is to be served: a higher priority goes first under pressure; targets that the cluster
    cannot meet get the request refused. None: the cluster's own target."""

    priority: int = 0
    ttft_ms_max: float | None = None
    tbt_ms_max: float | None = None


@dataclass(frozen=True, slots=True)
class _Asked:
    """One thing that a client may ask for, in one of two places."""

    param: str
    header: str
    low: float
    high: float
    form: re.Pattern[str]
    form_name: str


_INTEGER = re.compile(r"[+-]?[0-9]{1,16}")
_DECIMAL = re.compile(r"[+-]?[0-9]{1,16}(\.[0-9]{1,16})?")
_PRIORITY = _Asked("priority", "x-priority", PRIORITY_MIN, PRIORITY_MAX, _INTEGER, "a whole number")
_TTFT_MS = _Asked("ttft_ms_max", "x-slo-ttft-ms", TTFT_MS_MIN, TTFT_MS_MAX, _DECIMAL, "a number")
_TBT_MS = _Asked("tbt_ms_max", "x-slo-tbt-ms", TBT_MS_MIN, TBT_MS_MAX, _DECIMAL, "a number")


def urgency_of(request: GenerationRequest, headers: Mapping[str, str]) -> Urgency:
    """Raises ApiError, which names the field or the header, and the limit."""
    priority = _value(_PRIORITY, request.priority, headers)
    return Urgency(
        0 if priority is None else int(priority),
        _value(_TTFT_MS, request.ttft_ms_max, headers),
        _value(_TBT_MS, request.tbt_ms_max, headers),
    )


def _value(asked: _Asked, of_body: float | None, headers: Mapping[str, str]) -> float | None:
    of_header = _header_value(asked, headers.get(asked.header))
    if of_body is not None and of_header is not None and of_body != of_header:
        message = f"{asked.param} is {of_body} and {asked.header} is {of_header}; give only one"
        raise invalid(asked.header, message)
    return of_header if of_body is None else of_body


def _header_value(asked: _Asked, text: str | None) -> float | None:
    if text is None:
        return None
    if asked.form.fullmatch(text) is None:
        shown = text[:HEADER_CHARS_SHOWN_MAX]
        message = f"{asked.header} is {shown!r}, must be {asked.form_name} from {asked.low} to {asked.high}"
        raise invalid(asked.header, message)
    value = int(text) if asked.form is _INTEGER else float(text)
    check_range(asked.header, value, asked.low, asked.high)
    return value
