"""The headers of the API for its OpenAPI document: what requests may have, what answers have."""

from http import HTTPStatus

from cluster.tracing import CLIENT_REQUEST_ID_CHARS_MAX
from gateway.api.api_errors import REJECTED_REASON_HEADER, SHOULD_RETRY_HEADER
from gateway.api.parameter_limits import TBT_MS_MAX, TBT_MS_MIN, TTFT_MS_MAX, TTFT_MS_MIN
from gateway.edge import REQUEST_ID_HEADER
from policy.core import PRIORITY_MAX, PRIORITY_MIN

_REQUEST_HEADERS: tuple[tuple[str, str, dict[str, object]], ...] = (
    (
        REQUEST_ID_HEADER,
        f"Comes back with the answer, where it is printable ASCII of at most {CLIENT_REQUEST_ID_CHARS_MAX} "
        "characters; else the gateway makes one.",
        {"type": "string"},
    ),
    (
        "traceparent",
        "W3C trace context, which the request's messages in the cluster carry on.",
        {"type": "string"},
    ),
    (
        "x-priority",
        "As the parameter priority.",
        {"type": "integer", "minimum": PRIORITY_MIN, "maximum": PRIORITY_MAX},
    ),
    (
        "x-slo-ttft-ms",
        "As the parameter ttft_ms_max.",
        {"type": "number", "minimum": TTFT_MS_MIN, "maximum": TTFT_MS_MAX},
    ),
    (
        "x-slo-tbt-ms",
        "As the parameter tbt_ms_max.",
        {"type": "number", "minimum": TBT_MS_MIN, "maximum": TBT_MS_MAX},
    ),
)
HEADER_PARAMETERS: tuple[dict[str, object], ...] = tuple(
    {"name": name, "in": "header", "required": False, "description": text, "schema": schema}
    for name, text, schema in _REQUEST_HEADERS
)
_RETRY_AFTER, _RETRY_AFTER_MS = "Retry-After", "retry-after-ms"
_LIMIT_TEXTS = {
    "limit": "The tenant's limit of {of} a minute, where it has one.",
    "remaining": "How many {of} are left.",
    "reset": "How long until all {of} of the limit are there again, such as 1m30s.",
}
_LIMIT_HEADERS: dict[str, dict[str, object]] = {
    f"x-ratelimit-{what}-{of}": {
        "description": text.format(of=of),
        "schema": {"type": "string" if what == "reset" else "integer"},
    }
    for of in ("requests", "tokens")
    for what, text in _LIMIT_TEXTS.items()
}
_WAITING_STATUSES = (HTTPStatus.TOO_MANY_REQUESTS, HTTPStatus.SERVICE_UNAVAILABLE)

RESPONSE_HEADERS: dict[str, dict[str, object]] = {
    REQUEST_ID_HEADER: {
        "description": "The request's id: the client's own, or one that the gateway made.",
        "required": True,
        "schema": {"type": "string"},
    },
    _RETRY_AFTER: {
        "description": "Come again after so many seconds.",
        "required": True,
        "schema": {"type": "integer", "minimum": 1},
    },
    _RETRY_AFTER_MS: {
        "description": "The same, exactly, in milliseconds.",
        "required": True,
        "schema": {"type": "integer", "minimum": 1},
    },
    REJECTED_REASON_HEADER: {
        "description": "Which limit or target stood against it, in one word.",
        "schema": {"type": "string"},
    },
    SHOULD_RETRY_HEADER: {
        "description": "That the same request again would do no better: OpenAI's clients then send none.",
        "schema": {"type": "string", "enum": ["false"]},
    },
    **_LIMIT_HEADERS,
}


def headers_of(status: int, *, limited: bool, waiting: bool = True) -> dict[str, dict[str, str]]:
    """References to the headers of answers with that status. `limited`: the operation counts against a
    tenant's limits; not `waiting`: none of its answers says when to come again."""
    names = [REQUEST_ID_HEADER, *(_LIMIT_HEADERS if limited else ())]
    if waiting and status in _WAITING_STATUSES:
        names += [_RETRY_AFTER, _RETRY_AFTER_MS, REJECTED_REASON_HEADER]
    if status == HTTPStatus.GATEWAY_TIMEOUT:
        names.append(SHOULD_RETRY_HEADER)
    return {name: {"$ref": f"#/components/headers/{name}"} for name in names}
