import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from moonpool.api import Api, ApiError
from moonpool.errors import CommandError, UsageError

pytestmark = pytest.mark.unit


@dataclass
class ScriptedServer:
    """A gateway that answers every request with `status` and `body`."""

    url: str
    status: int = 200
    body: bytes = b"{}"
    asked: bytes = b""
    path: str = ""
    authorization: str | None = None


@pytest.fixture
def server() -> Iterator[ScriptedServer]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            script.asked = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            script.path = self.path
            script.authorization = self.headers.get("Authorization")
            self.send_response(script.status)
            self.end_headers()
            self.wfile.write(script.body)

        do_GET = do_POST

        def log_message(self, *_: object) -> None:
            pass

    http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    script = ScriptedServer(f"http://127.0.0.1:{http.server_port}/v1")
    thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield script
    http.shutdown()
    thread.join()
    http.server_close()


def event(value: object) -> bytes:
    return b"data: " + json.dumps(value).encode() + b"\n\n"


def test_a_key_goes_with_every_request_and_into_no_text(server: ScriptedServer) -> None:
    server.body = b'{"data": [{"id": "small"}]}'
    api = Api(server.url, key="mp-secret")
    api.model()
    assert server.authorization == "Bearer mp-secret"
    assert "mp-secret" not in repr(api)
    Api(server.url).model()
    assert server.authorization is None


def test_certificates_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    for content in (None, "no certificate"):
        file = tmp_path / "ca.pem"
        if content is not None:
            file.write_text(content)
        with pytest.raises(UsageError, match=r"--ca-file .*ca\.pem"):
            Api("https://127.0.0.1:1", ca_file=file).get("/models")


def test_the_first_served_model_is_the_model(server: ScriptedServer) -> None:
    server.body = json.dumps({"data": [{"id": "small"}, {"id": "large"}]}).encode()
    assert Api(server.url).model() == "small"
    assert server.path == "/v1/models"
    assert Api(server.url.removesuffix("/v1")).model() == "small"
    assert server.path == "/v1/models"
    server.body = b'{"data": []}'
    with pytest.raises(CommandError, match="no model"):
        Api(server.url).model()


def test_a_stream_is_its_events_up_to_done(server: ScriptedServer) -> None:
    server.body = b": comment\n\n" + event({"a": 1}) + event({"a": 2}) + b"data: [DONE]\n\n" + event({"a": 3})
    assert list(Api(server.url).stream("/completions", {"prompt": "x"})) == [{"a": 1}, {"a": 2}]
    assert json.loads(server.asked) == {"prompt": "x", "stream": True}


def test_a_stream_that_breaks_off_is_an_error(server: ScriptedServer) -> None:
    server.body = event({"a": 1})
    events = Api(server.url).stream("/completions", {})
    assert next(events) == {"a": 1}
    with pytest.raises(ApiError, match=r"without \[DONE\]"):
        next(events)


def test_an_error_event_ends_the_stream_with_its_message(server: ScriptedServer) -> None:
    server.body = event({"error": {"message": "lost it", "code": "instance_lost"}})
    with pytest.raises(ApiError, match="lost it") as caught:
        list(Api(server.url).stream("/completions", {}))
    assert caught.value.code == "instance_lost"


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b'{"error": {"message": "no such model", "code": "model_not_found"}}', "404: no such model"),
        (b'{"detail": "elsewhere"}', "404: .*elsewhere"),
        (b"<html>Not Found</html>", "404: .*<html>"),
    ],
)
def test_an_http_error_carries_status_and_message(server: ScriptedServer, body: bytes, message: str) -> None:
    server.status, server.body = 404, body
    with pytest.raises(ApiError, match=message) as caught:
        Api(server.url).post("/completions", {})
    assert caught.value.status == 404


def test_what_is_no_json_object_is_named(server: ScriptedServer) -> None:
    server.body = b"[1]"
    with pytest.raises(CommandError, match="not a JSON object"):
        Api(server.url).get("/models")


def test_nobody_there_is_one_clear_error() -> None:
    with pytest.raises(CommandError, match="cannot talk to"):
        Api("http://127.0.0.1:1/v1", timeout_s=2).model()


@pytest.mark.parametrize(
    "url",
    ["127.0.0.1:8000", "ftp://a/v1", "", "http://", "http://a:99999/v1", "http://a:x/v1", "http://[::1/v1"],
)
def test_a_url_of_another_form_is_refused(url: str) -> None:
    with pytest.raises(UsageError, match="--url"):
        Api(url).model()


@pytest.mark.parametrize("body", [b'{"data": [{}]}', b'{"data": {"a": 1}}', b'{"data": ["x"]}'])
def test_a_server_of_another_kind_is_named(server: ScriptedServer, body: bytes) -> None:
    server.body = body
    with pytest.raises(CommandError, match="no list of models"):
        Api(server.url).model()


def test_who_has_no_key_is_told_where_it_is_taken_from(server: ScriptedServer) -> None:
    server.status = 401
    server.body = b'{"error": {"message": "give one as Authorization", "code": "invalid_api_key"}}'
    with pytest.raises(ApiError, match="MOONPOOL_API_KEY") as refused:
        Api(server.url).model()
    assert (refused.value.status, refused.value.code) == (401, "invalid_api_key")
    with pytest.raises(ApiError, match="give one as Authorization"):
        Api(server.url, key="mp-wrong").model()
