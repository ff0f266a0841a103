"""How a service serves HTTP: bounds, TLS, ports, and what of its answers has the service's own form.

Data only; `http_server` and `admin` carry it out. The defaults are those of services that only machines of
the cluster ask.
"""

import ssl
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from http import HTTPStatus
from typing import TypeAlias

from aiohttp import web

REQUEST_BYTES_MAX = 1024 * 1024

ErrorForm: TypeAlias = Callable[[int, str], tuple[bytes, str]]
"""From status and message to an error's body and its content type."""
AnswerHeaders: TypeAlias = Callable[[web.BaseRequest], Mapping[str, str]]
AnswerFirst: TypeAlias = Callable[[web.Request], web.Response | None]


def plain_error(status: int, message: str) -> tuple[bytes, str]:
    return f"{status} {HTTPStatus(status).phrase}: {message}\n".encode(), "text/plain"


def no_headers(_: web.BaseRequest) -> Mapping[str, str]:
    return {}


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpOptions:
    request_bytes_max: int = REQUEST_BYTES_MAX
    """Of a body, where a handler reads it as a whole."""
    connections_max: int = 1024
    """Open connections; the next one is told 503 and closed."""
    header_timeout_s: float = 30.0
    """From the first byte of a request's head to its last."""
    idle_timeout_s: float = 75.0
    """Of a connection on which nothing is asked; balancers keep theirs shorter, so that they close first."""
    write_timeout_s: float = 60.0
    """To send an answer, or what of it a handler has left to be sent; who does not read for so long is cut
    off."""
    tls: ssl.SSLContext | None = None
    reuse_port: bool = False
    """Other processes may listen on the port, too. Each then has another port for itself alone, which is the
    one that it registers."""
    error_form: ErrorForm = plain_error
    """For what the server refuses before any handler: malformed HTTP, an unknown `Expect`, and so on."""
    answer_headers: AnswerHeaders = no_headers
    """Added to every answer that does not have them yet, whoever gives it."""
    answer_first: AnswerFirst | None = None
    """Asked before the routes; None leaves the request to them."""
