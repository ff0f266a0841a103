"""The gateway's HTTP before and around its operations: OpenAI's error body also where the server itself
refuses, a request id on every answer, CORS.

Knows no operation. What a request's id is, is decided here and nowhere else.
"""

from collections.abc import Mapping
from http import HTTPStatus

import msgspec
from aiohttp import web

from cluster.tracing import is_client_request_id, random_hex
from gateway import cors
from gateway.api.answer_types import ErrorBody, ErrorObject

REQUEST_ID_HEADER = "x-request-id"
JSON_TYPE = "application/json"
_TYPES = {
    HTTPStatus.TOO_MANY_REQUESTS: "rate_limit_error",
    HTTPStatus.SERVICE_UNAVAILABLE: "service_unavailable_error",
    HTTPStatus.GATEWAY_TIMEOUT: "timeout_error",
}
_CODES = {
    HTTPStatus.NOT_FOUND: "not_found",
    HTTPStatus.METHOD_NOT_ALLOWED: "method_not_allowed",
    HTTPStatus.REQUEST_TIMEOUT: "headers_timeout",
    HTTPStatus.REQUEST_ENTITY_TOO_LARGE: "request_too_large",
    HTTPStatus.EXPECTATION_FAILED: "expectation_failed",
    HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE: "headers_too_large",
    HTTPStatus.SERVICE_UNAVAILABLE: "connections_full",
    HTTPStatus.INTERNAL_SERVER_ERROR: "internal_error",
}
"""Of what the server refuses by itself; else malformed_http."""


def client_request_id(headers: Mapping[str, str]) -> str | None:
    """The client's own id, where it is one that is safe to log and to send back in a header."""
    text = headers.get(REQUEST_ID_HEADER, "")
    return text if is_client_request_id(text) else None


def error_form(status: int, message: str) -> tuple[bytes, str]:
    """OpenAI's error body."""
    kind = "server_error" if status >= HTTPStatus.INTERNAL_SERVER_ERROR else "invalid_request_error"
    error = ErrorObject(
        message,
        _TYPES.get(HTTPStatus(status), kind),
        None,
        _CODES.get(HTTPStatus(status), "malformed_http"),
    )
    return msgspec.json.encode(ErrorBody(error)), JSON_TYPE


class Edge:
    def __init__(self, origins: tuple[str, ...]) -> None:
        """`origins` as `cors.check_origins` lets pass."""
        self._origins = origins

    def answer_headers(self, request: web.BaseRequest) -> Mapping[str, str]:
        """What every answer has."""
        headers = {REQUEST_ID_HEADER: client_request_id(request.headers) or random_hex(32)}
        if self._origins:
            headers |= cors.response_headers(self._origins, request.headers.get("Origin"))
        return headers

    def answer_first(self, request: web.Request) -> web.Response | None:
        """Preflights are answered without a key: browsers send none."""
        if not cors.is_preflight(request.method, request.headers):
            return None
        asked = request.headers.get("Access-Control-Request-Headers", "")
        headers = cors.preflight_headers(self._origins, request.headers.get("Origin"), asked)
        return web.Response(status=HTTPStatus.NO_CONTENT, headers=dict(headers))
