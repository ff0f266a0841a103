"""aiohttp's server with bounds: connections, time for a request's head, and one form of error for all that
the server itself refuses.

aiohttp answers what it cannot parse with text of its own, logs a traceback for it, lets a client take any
time for its headers, and lets a handler wait for a body whose end can never be found. The subclasses here
change no more than that; compressed bodies are left to handlers. They reach into `RequestHandler` where it
says what it waits for; the version is pinned, and tests hold what is promised.
"""

import asyncio
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any

from aiohttp import hdrs, web
from aiohttp.http_exceptions import LineTooLong
from aiohttp.web_protocol import RequestHandler, _ErrInfo

from cluster.http_options import HttpOptions
from cluster.logs import Logger

HEADER_LINE_BYTES_MAX = 16 * 1024
"""Of the request line and of each header: tokens of identity providers are long."""
HEADERS_MAX = 128
ERROR_CHARS_MAX = 200
SERVER_NAME = "moonpool"
"""As the header Server has it: aiohttp would tell its version and Python's to everybody."""
RETRY_AFTER_S = 1


class _Connection(RequestHandler):
    __slots__ = ("_head_timer", "_log", "_options")

    def __init__(self, manager: "_Server", options: HttpOptions, log: Logger, **arguments: Any) -> None:
        super().__init__(manager, **arguments)
        self._options = options
        self._log = log
        self._head_timer: asyncio.TimerHandle | None = None

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._current_request is not None and self._messages:
            self._end_body(self._current_request)
        if self._waiter is None or self._waiter.done():
            self._stop_head_timer()
        elif self._head_timer is None and data:
            # A part of a head came, and nothing else is going on here.
            loop = asyncio.get_running_loop()
            self._head_timer = loop.call_later(self._options.header_timeout_s, self._head_late)

    def connection_lost(self, exc: BaseException | None) -> None:
        self._stop_head_timer()
        super().connection_lost(exc)

    def _end_body(self, request: web.BaseRequest) -> None:
        """Where the parser gave up within the body that a handler reads, tell the handler."""
        last, _ = self._messages[-1]
        payload = request.content
        if isinstance(last, _ErrInfo) and not payload.is_eof():
            self._messages.pop()
            payload.set_exception(web.RequestPayloadError(_malformed(last.exc, last.message)[1]))
            payload.feed_eof()
            self._close = True

    def refuse(self, status: HTTPStatus, message: str) -> None:
        """Say so and close, where no request was read."""
        if self.transport is not None:
            body, content_type = self._options.error_form(status, message)
            self.transport.write(_raw_answer(status, body, content_type))
        self.force_close()

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """What is answered where no handler did: to malformed HTTP, and to a bug."""
        if isinstance(exc, web.RequestPayloadError):
            status, told = HTTPStatus.BAD_REQUEST, str(exc)
        elif status < HTTPStatus.INTERNAL_SERVER_ERROR:
            status, told = _malformed(exc, message)
        else:
            told = HTTPStatus(status).description
            self._log.exception("http request failed", exc)
        if request.writer.output_size > 0:
            raise ConnectionError("a part of an answer is sent already")
        response = self._error(request, status, told, {})
        response.force_close()
        return response

    async def finish_response(
        self, request: web.BaseRequest, resp: web.StreamResponse, start_time: float | None
    ) -> tuple[web.StreamResponse, bool]:
        if isinstance(resp, web.HTTPException) and resp.status >= HTTPStatus.BAD_REQUEST:
            told = resp.text or resp.reason
            headers = {name: resp.headers[name] for name in ("Allow",) if name in resp.headers}
            resp = self._error(request, resp.status, told, headers)
        try:
            async with asyncio.timeout(self._options.write_timeout_s):
                return await super().finish_response(request, resp, start_time)
        except TimeoutError:
            self._log.info("http client does not read", remote=request.remote)
            if self.transport is not None:
                self.transport.abort()
            raise ConnectionError("the client reads nothing") from None

    def _error(
        self, request: web.BaseRequest, status: int, told: str, headers: Mapping[str, str]
    ) -> web.Response:
        body, content_type = self._options.error_form(status, told)
        headers = {**self._options.answer_headers(request), hdrs.SERVER: SERVER_NAME, **headers}
        self._log.info(
            "http request refused", status=status, error=told, remote=request.remote, **_ids(headers)
        )
        return web.Response(status=status, body=body, content_type=content_type, headers=headers)

    def _head_late(self) -> None:
        self._head_timer = None
        told = f"the request's headers did not come within {self._options.header_timeout_s:g} s"
        self.refuse(HTTPStatus.REQUEST_TIMEOUT, told)

    def _stop_head_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None


class _Server(web.Server):
    def __init__(self, options: HttpOptions, log: Logger, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._options = options
        self._log = log

    def __call__(self) -> RequestHandler:
        return _Connection(self, self._options, self._log, loop=self._loop, **self._kwargs)

    def connection_made(self, handler: RequestHandler, transport: asyncio.Transport) -> None:
        super().connection_made(handler, transport)
        if len(self._connections) > self._options.connections_max and isinstance(handler, _Connection):
            told = f"{self._options.connections_max} connections are open, which is this process's limit"
            handler.refuse(HTTPStatus.SERVICE_UNAVAILABLE, told)


class BoundedRunner(web.AppRunner):
    """An application on a server within the bounds of `options`."""

    def __init__(self, app: web.Application, options: HttpOptions, log: Logger, *, shutdown_s: float) -> None:
        super().__init__(
            app,
            handle_signals=False,
            access_log=None,
            shutdown_timeout=shutdown_s,
            handler_cancellation=True,
        )
        self._options = options
        self._log = log

    async def _make_server(self) -> web.Server:
        plain = await super()._make_server()
        return _Server(
            self._options,
            self._log,
            plain.request_handler,
            request_factory=plain.request_factory,
            handler_cancellation=plain.handler_cancellation,
            loop=asyncio.get_running_loop(),
            access_log=None,
            auto_decompress=False,
            keepalive_timeout=self._options.idle_timeout_s,
            max_line_size=HEADER_LINE_BYTES_MAX,
            max_field_size=HEADER_LINE_BYTES_MAX,
            max_headers=HEADERS_MAX,
        )


def _malformed(error: BaseException | None, message: str | None) -> tuple[int, str]:
    """Status and words for a request that cannot be parsed: one line, without the bytes that it quotes."""
    if isinstance(error, LineTooLong):
        told = f"a line of the request's head is longer than {HEADER_LINE_BYTES_MAX} bytes"
        return HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, told
    line = (message or "").strip().partition("\n")[0].rstrip(":")
    readable = "".join(character for character in line if character.isprintable())[:ERROR_CHARS_MAX]
    return HTTPStatus.BAD_REQUEST, f"malformed HTTP: {readable or 'the request cannot be parsed'}"


def _raw_answer(status: HTTPStatus, body: bytes, content_type: str) -> bytes:
    head = (
        f"HTTP/1.1 {status.value} {status.phrase}\r\nContent-Type: {content_type}\r\n"
        f"Content-Length: {len(body)}\r\nRetry-After: {RETRY_AFTER_S}\r\nConnection: close\r\n\r\n"
    )
    return head.encode() + body


def _ids(headers: Mapping[str, str]) -> dict[str, str]:
    """What a log line about an answer with these headers is found by."""
    request_id = headers.get("x-request-id")
    return {} if request_id is None else {"client_request_id": request_id}
