"""A small blocking client of the gateway's OpenAI-compatible API, for chat and benchmarks."""

import json
import ssl
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection
from pathlib import Path
from typing import Any
from urllib.parse import SplitResult, urlsplit

from moonpool.errors import CommandError, UsageError

Json = dict[str, Any]

ERROR_TEXT_MAX = 500
"""How much of an answer that is no JSON is repeated in the error."""
EVENT_BYTES_MAX = 4 * 1024 * 1024
"""One line of an event stream; longer means that the other side does not speak the protocol."""
DONE = b"[DONE]"
API_KEY_VARIABLE = "MOONPOOL_API_KEY"
UNAUTHORIZED_STATUS = 401
API_ROOT = "/v1"
"""Where the API is under a URL that names only a host."""


class ApiError(CommandError):
    """The gateway answered with an HTTP error, or ended a stream with one. `status` is 0 for the latter."""

    def __init__(self, status: int, message: str, code: str = "") -> None:
        super().__init__(f"the gateway answered {status}: {message}" if status else message)
        self.status = status
        self.code = code


@dataclass(frozen=True, slots=True)
class Api:
    """`url` is the base as `moonpool up` prints it, such as `http://127.0.0.1:8000/v1`, or without /v1."""

    url: str
    timeout_s: float = 120.0
    """Longest silence of the gateway, not the length of an answer."""
    key: str = field(default="", repr=False)
    """The API key; empty: none is sent."""
    ca_file: Path | None = None
    """Certificates that an https gateway is trusted by, beside those of the machine."""

    def model(self) -> str:
        """Name of the model that is served."""
        models = self.get("/models").get("data")
        if models == []:
            raise CommandError(f"{self.url} serves no model yet")
        match models:
            case [{"id": str(model)}, *_]:
                return model
            case _:
                raise CommandError(f"{self.url}/models is no list of models; is this a Moonpool gateway?")

    def address(self, path: str) -> str:
        """The whole URL of a path of the API, for another client. UsageError where `url` is malformed."""
        parts, base = _split(self.url)
        return f"{parts.scheme}://{parts.netloc}{base}{path}"

    def headers(self) -> dict[str, str]:
        """What every request carries."""
        return {"Authorization": f"Bearer {self.key}"} if self.key else {}

    def tls(self) -> ssl.SSLContext:
        """For https. UsageError where the file of certificates cannot be used."""
        context = ssl.create_default_context()
        if self.ca_file is not None:
            try:
                context.load_verify_locations(self.ca_file)
            except OSError as error:
                # An SSLError is one, too.
                raise UsageError(f"--ca-file {self.ca_file}: {error.strerror or error}") from None
        return context

    def get(self, path: str) -> Json:
        with self._send("GET", path, None) as response:
            return _json_object(response.read())

    def post(self, path: str, body: Mapping[str, object]) -> Json:
        with self._send("POST", path, body) as response:
            return _json_object(response.read())

    def stream(self, path: str, body: Mapping[str, object]) -> Iterator[Json]:
        """The events of one streamed answer; raises ApiError where an error event ends it."""
        with self._send("POST", path, {**body, "stream": True}) as response:
            yield from _events(response)

    @contextmanager
    def _send(self, method: str, path: str, body: Mapping[str, object] | None) -> Iterator[HTTPResponse]:
        connection, base = self._connection()
        payload = None if body is None else json.dumps(body).encode()
        try:
            connection.request(
                method, base + path, payload, {"Content-Type": "application/json", **self.headers()}
            )
            response = connection.getresponse()
            if response.status >= 400:
                error = _api_error(response.status, response.read())
                raise _no_key_given(error) if error.status == UNAUTHORIZED_STATUS and not self.key else error
            yield response
        except (OSError, HTTPException) as error:
            raise CommandError(f"cannot talk to {self.url}: {error or type(error).__name__}") from error
        finally:
            connection.close()

    def _connection(self) -> tuple[HTTPConnection, str]:
        parts, base = _split(self.url)
        host, port = parts.hostname or "", parts.port
        if parts.scheme == "https":
            return HTTPSConnection(host, port, timeout=self.timeout_s, context=self.tls()), base
        return HTTPConnection(host, port, timeout=self.timeout_s), base


def _split(url: str) -> tuple[SplitResult, str]:
    """The parts of a URL that is well formed, and the path that the API's paths follow."""
    try:
        parts = urlsplit(url)
        _ = parts.port
    except ValueError:
        raise _malformed(url) from None
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise _malformed(url)
    return parts, parts.path.rstrip("/") or API_ROOT


def _malformed(url: str) -> UsageError:
    return UsageError(f"--url must look like http://127.0.0.1:8000/v1, not {url!r}")


def _events(response: HTTPResponse) -> Iterator[Json]:
    while line := response.readline(EVENT_BYTES_MAX):
        field, _, value = line.partition(b":")
        if field != b"data":
            continue
        if value.strip() == DONE:
            return
        event = _json_object(value)
        if "error" in event:
            raise _error_of(0, event)
        yield event
    raise ApiError(0, "the stream ended without [DONE]")


def _json_object(text: bytes) -> Json:
    try:
        value = json.loads(text)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise CommandError(f"not a JSON object: {text[:ERROR_TEXT_MAX].decode('utf-8', 'replace')}")
    return value


def _api_error(status: int, body: bytes) -> ApiError:
    try:
        return _error_of(status, _json_object(body))
    except CommandError as error:
        return ApiError(status, str(error))


def _no_key_given(error: ApiError) -> ApiError:
    """The gateway speaks of a header; what asks here takes a key from the environment."""
    return ApiError(error.status, f"this gateway asks for an API key; set {API_KEY_VARIABLE}", error.code)


def _error_of(status: int, body: Json) -> ApiError:
    error = body.get("error")
    if not isinstance(error, dict):
        return ApiError(status, json.dumps(body)[:ERROR_TEXT_MAX])
    return ApiError(status, str(error.get("message", error)), str(error.get("code") or ""))
