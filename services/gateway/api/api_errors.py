"""What a client is told when something is wrong: a status and OpenAI's error body.

The one place that pairs an HTTP status with an error type. Knows no route.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from msgspec import UNSET

from cluster.errors import MoonpoolError
from gateway.api.answer_types import ErrorBody, ErrorObject
from policy.core import STRUCTURE_FIELD
from protocol.answer import Fail, FailureKind

REJECTED_REASON_HEADER = "x-moonpool-rejected-reason"
SHOULD_RETRY_HEADER = "x-should-retry"
"""OpenAI's clients obey it; else they send every 408, 409, 429 and 5xx again."""
RETRY_AFTER_S_DEFAULT = 1.0
RETRY_AFTER_S_MAX = 600.0
NO_HEADERS: Mapping[str, str] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class ErrorKind:
    """`type` is the word of the error body, `code` its default code."""

    status: int
    type: str
    code: str | None = None


INVALID = ErrorKind(400, "invalid_request_error")
UNAUTHORIZED = ErrorKind(401, "invalid_request_error", "invalid_api_key")
NOT_FOUND = ErrorKind(404, "invalid_request_error", "not_found")
MODEL_NOT_FOUND = ErrorKind(404, "invalid_request_error", "model_not_found")
METHOD_NOT_ALLOWED = ErrorKind(405, "invalid_request_error", "method_not_allowed")
BODY_TIMEOUT = ErrorKind(408, "invalid_request_error", "body_timeout")
TOO_LARGE = ErrorKind(413, "invalid_request_error", "request_too_large")
OVERLOADED = ErrorKind(429, "rate_limit_error", "rate_limit_exceeded")
CLIENT_TOO_SLOW = ErrorKind(429, "rate_limit_error", "client_too_slow")
INTERNAL = ErrorKind(500, "server_error", "internal_error")
UNAVAILABLE = ErrorKind(503, "service_unavailable_error", "service_unavailable")
DEADLINE = ErrorKind(504, "timeout_error", "deadline_exceeded")

_KIND_OF_FAILURE = {
    FailureKind.REJECTED: OVERLOADED,
    FailureKind.UNAVAILABLE: UNAVAILABLE,
    FailureKind.DEADLINE: DEADLINE,
    FailureKind.BAD_REQUEST: INVALID,
    FailureKind.INTERNAL: INTERNAL,
}
_RETRY_STATUSES = frozenset({OVERLOADED.status, UNAVAILABLE.status})


class ApiError(MoonpoolError):
    """A request that ends with an error body. `param` names the parameter at fault, `reason` why the
    cluster refused (for the header and the metrics)."""

    def __init__(
        self,
        kind: ErrorKind,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        reason: str | None = None,
        retry_after_s: float | None = None,
        allow: str | None = None,
        extra_headers: Mapping[str, str] = NO_HEADERS,
    ) -> None:
        super().__init__(message)
        self.kind = kind
        self.message = message
        self.param = param
        self.code = code if code is not None else kind.code
        self.reason = reason
        self.retry_after_s = retry_after_s
        self.allow = allow
        self.extra_headers = extra_headers

    def body(self) -> ErrorBody:
        reason = UNSET if self.reason is None else self.reason
        return ErrorBody(ErrorObject(self.message, self.kind.type, self.param, self.code, reason))

    def headers(self) -> dict[str, str]:
        headers = dict(self.extra_headers)
        if self.kind is UNAUTHORIZED:
            headers["WWW-Authenticate"] = "Bearer"
        if self.kind.status in _RETRY_STATUSES:
            retry_after_s = min(self.retry_after_s or RETRY_AFTER_S_DEFAULT, RETRY_AFTER_S_MAX)
            # Whole seconds by HTTP's rule; OpenAI's clients prefer the other, which says it exactly.
            headers["Retry-After"] = str(math.ceil(retry_after_s))
            headers["retry-after-ms"] = str(math.ceil(retry_after_s * 1e3))
        if self.kind is DEADLINE:
            # All of it was computed in vain once: the same again takes as long.
            headers[SHOULD_RETRY_HEADER] = "false"
        if self.reason is not None:
            headers[REJECTED_REASON_HEADER] = self.reason
        if self.allow is not None:
            headers["Allow"] = self.allow
        return headers


def invalid(param: str | None, message: str, code: str | None = None) -> ApiError:
    """A 400: `message` names the parameter and the limit."""
    return ApiError(INVALID, message, param=param, code=code)


def of_failure(failure: Fail, structure_param: str | None) -> ApiError:
    """What the client is told of an answer that failed in the cluster. `structure_param` is what it called
    the form that the answer is held to."""
    kind = _KIND_OF_FAILURE[failure.kind]
    if structure_param is not None and kind is INVALID and failure.detail.startswith(STRUCTURE_FIELD):
        message = structure_param + failure.detail.removeprefix(STRUCTURE_FIELD)
        return ApiError(kind, message, param=structure_param, reason=failure.reason)
    return ApiError(kind, failure.detail, reason=failure.reason, retry_after_s=failure.retry_after_s)
