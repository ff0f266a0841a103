"""Two gateways on one port, with keys and TLS, in front of real services whose engines take time only."""

import json
import re
import ssl
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from http.client import HTTPSConnection
from pathlib import Path
from urllib.request import urlopen

import pytest
from tests.support.certificates import Certificate, certificate
from tests.support.eventually import soon
from tests.support.loose_stack import LooseStack
from tests.support.timed_stack import timed_stack

from gateway.tenants.api_keys import hash_line
from moonpool.api import Api, ApiError
from moonpool.errors import CommandError
from moonpool.ports import hold_port

pytestmark = [pytest.mark.integration, pytest.mark.timeout(180)]

GATEWAYS = ("gateway-0", "gateway-1")
OTHERS = ("kvmeta-0", "conductor-0", "prefill-0", "decode-0")
KEYS = f"""
[tenants.acme]
keys = ["{hash_line("mp-acme")}"]
[tenants.beta]
keys = ["{hash_line("mp-beta")}"]
"""
PROMPT = list(range(300, 380))
SOON_S_MAX = 15.0
HTTP_S_MAX = 20.0


@dataclass(frozen=True)
class Edge:
    stack: LooseStack
    port: int
    keys: Path
    made: Certificate

    def api(self, tenant: str, name: str = "") -> Api:
        """Of the public port, or of one gateway's own."""
        url = self.stack.url(name) if name else f"https://127.0.0.1:{self.port}"
        return Api(url, timeout_s=HTTP_S_MAX, key=f"mp-{tenant}", ca_file=self.made.cert)

    @contextmanager
    def connection(self) -> Iterator[HTTPSConnection]:
        context = ssl.create_default_context(cafile=str(self.made.cert))
        made = HTTPSConnection("127.0.0.1", self.port, timeout=HTTP_S_MAX, context=context)
        try:
            yield made
        finally:
            made.close()


@pytest.fixture(scope="module")
def edge(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Edge]:
    folder = tmp_path_factory.mktemp("edge")
    made = certificate(folder, "gateway")
    keys = folder / "keys.toml"
    keys.write_text(KEYS)
    with timed_stack(folder) as stack, hold_port("127.0.0.1", 0) as held:
        port = held.getsockname()[1]
        flags = (
            *("--reuse-port", "--http-port", str(port), "--api-keys-file", str(keys)),
            *("--tls-cert-file", str(made.cert), "--tls-key-file", str(made.key)),
            *("--cors-origins", "https://app.example.com"),
        )
        for name in OTHERS:
            stack.launch(name)
        for name in GATEWAYS:
            stack.launch(name, *flags)
        for name in (*OTHERS, *GATEWAYS):
            stack.wait_ready(name)
        yield Edge(stack, port, keys, made)


def ask(api: Api, prompt: list[int], **parameters: object) -> int:
    """How many tokens of the prompt were cached."""
    body = {"model": "tiny", "prompt": prompt, "max_tokens": 4, "ignore_eos": True, **parameters}
    usage = api.post("/completions", body)["usage"]
    assert usage["completion_tokens"] == 4
    return int(usage["prompt_tokens_details"]["cached_tokens"])


def let_in(api: Api) -> bool:
    try:
        api.get("/models")
    except ApiError as error:
        if (error.status, error.code) != (401, "invalid_api_key"):
            raise
        return False
    return True


def test_no_tenant_finds_what_another_cached(edge: Edge) -> None:
    acme, beta = edge.api("acme"), edge.api("beta")
    assert ask(acme, PROMPT) == 0
    soon(lambda: ask(acme, PROMPT) >= 64, SOON_S_MAX)
    assert ask(beta, PROMPT) == 0
    assert ask(acme, PROMPT, cache_salt="mine") == 0
    soon(lambda: ask(beta, PROMPT) >= 64, SOON_S_MAX)
    soon(lambda: ask(acme, PROMPT, cache_salt="mine") >= 64, SOON_S_MAX)


def test_operation_is_open_and_the_api_is_not(edge: Edge) -> None:
    with edge.connection() as connection:
        for path in ("/live", "/livez", "/ready", "/readyz", "/health", "/healthz", "/metrics", "/version"):
            connection.request("GET", path, headers={"x-request-id": f"id{path}"})
            answer = connection.getresponse()
            answer.read()
            assert answer.status == 200, path
            assert answer.headers["x-request-id"] == f"id{path}"
        for path in ("/v1/models", "/v1/models/tiny"):
            connection.request("GET", path)
            answer = connection.getresponse()
            assert answer.status == 401
            assert json.loads(answer.read())["error"]["code"] == "invalid_api_key"


def test_malformed_http_has_the_apis_error_body(edge: Edge) -> None:
    with edge.connection() as connection:
        connection.putrequest("GET", "/live", skip_host=True, skip_accept_encoding=True)
        connection.putheader("Content-Length", "nonsense")
        connection.endheaders()
        answer = connection.getresponse()
        error = json.loads(answer.read())["error"]
        assert (answer.status, error["type"], error["code"]) == (
            400,
            "invalid_request_error",
            "malformed_http",
        )
        assert len(answer.headers["x-request-id"]) == 32


def test_a_page_may_ask(edge: Edge) -> None:
    origin = {"Origin": "https://app.example.com"}
    asked = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization"}
    with edge.connection() as connection:
        connection.request("OPTIONS", "/v1/chat/completions", headers=origin | asked)
        answer = connection.getresponse()
        answer.read()
        assert answer.status == 204
        assert answer.headers["Access-Control-Allow-Headers"] == "authorization"
        connection.request("GET", "/v1/models", headers=origin)
        answer = connection.getresponse()
        answer.read()
        assert answer.status == 401
        assert answer.headers["Access-Control-Allow-Origin"] == origin["Origin"]


def test_keys_that_change_hold_soon_and_broken_ones_never(edge: Edge) -> None:
    new = [edge.api("new", name) for name in GATEWAYS]
    acme = [edge.api("acme", name) for name in GATEWAYS]
    edge.keys.write_text(KEYS + f'[tenants.new]\nkeys = ["{hash_line("mp-new")}"]\n')
    soon(lambda: all(map(let_in, new)), SOON_S_MAX)
    edge.keys.write_text("[tenants.new]\nkeys = 5\n")

    def told() -> bool:
        lines = [line for name in GATEWAYS for line in edge.stack.log_lines(name)]
        return sum("not read again" in str(line["message"]) for line in lines) >= len(GATEWAYS)

    soon(told, SOON_S_MAX)
    assert all(map(let_in, [*new, *acme]))
    edge.keys.write_text(KEYS)
    soon(lambda: not any(map(let_in, new)), SOON_S_MAX)
    assert all(map(let_in, acme))
    logs = "".join(json.dumps(edge.stack.log_lines(name)) for name in GATEWAYS)
    assert "mp-acme" not in logs
    assert "mp-new" not in logs


def test_a_certificate_that_changes_is_shown_soon(edge: Edge, tmp_path: Path) -> None:
    other = certificate(tmp_path, "other")
    before = edge.made.cert.read_bytes(), edge.made.key.read_bytes()
    for path, content in ((edge.made.cert, other.cert), (edge.made.key, other.key)):
        path.write_bytes(content.read_bytes())

    def shown(pem: bytes) -> bool:
        seen = ssl.get_server_certificate(("127.0.0.1", edge.port), timeout=HTTP_S_MAX)
        return seen.strip() == pem.decode().strip()

    soon(lambda: all(shown(other.cert.read_bytes()) for _ in range(8)), SOON_S_MAX)
    edge.made.cert.write_bytes(before[0])
    edge.made.key.write_bytes(before[1])
    soon(lambda: all(shown(before[0]) for _ in range(8)), SOON_S_MAX)


def test_the_log_of_a_request_says_whose_it_was_by_both_ids(edge: Edge) -> None:
    with edge.connection() as connection:
        body = json.dumps({"model": "tiny", "prompt": [1, 2, 3], "max_tokens": 1})
        headers = {"Authorization": "Bearer mp-beta", "x-request-id": "theirs-1"}
        connection.request("POST", "/v1/completions", body, headers)
        answer = connection.getresponse()
        answer.read()
        assert answer.headers["x-request-id"] == "theirs-1"
    lines = [line for name in GATEWAYS for line in edge.stack.log_lines(name)]
    (line,) = [line for line in lines if line.get("client_request_id") == "theirs-1"]
    assert (line["tenant"], line["status"]) == ("beta", 200)
    decided = [
        one for one in edge.stack.log_lines("conductor-0") if one.get("request_id") == line["request_id"]
    ]
    assert {one["client_request_id"] for one in decided} == {"theirs-1"}


def test_where_one_gateway_is_killed_the_other_serves_on(edge: Edge) -> None:
    """Last: afterwards there is only one."""
    own = edge.api("acme", "gateway-1")
    soon(lambda: _limits_divided_by(edge, "gateway-1") == 2, SOON_S_MAX)
    body = {"model": "tiny", "prompt": PROMPT, "max_tokens": 60, "ignore_eos": True}
    with ThreadPoolExecutor(1) as pool:
        events = own.stream("/completions", body)
        next(events)
        rest = pool.submit(lambda: list(events))
        edge.stack.kill("gateway-0")
        # What the kernel had given to the dead one is lost; whoever asks from now on is answered.
        soon(lambda: _answered(edge), SOON_S_MAX)
        for _ in range(10):
            ask(edge.api("acme"), PROMPT)
        assert rest.result(SOON_S_MAX)
    # Its lease ends, and with it the part of every limit that it had.
    soon(lambda: _limits_divided_by(edge, "gateway-1") == 1, SOON_S_MAX)


def _limits_divided_by(edge: Edge, name: str) -> float:
    context = ssl.create_default_context(cafile=str(edge.made.cert))
    with urlopen(f"{edge.stack.url(name)}/metrics", timeout=HTTP_S_MAX, context=context) as answer:
        text = answer.read().decode()
    return float(re.findall(r"^moonpool_gateway_limits_divided_by (\S+)$", text, re.MULTILINE)[0])


def _answered(edge: Edge) -> bool:
    try:
        ask(edge.api("acme"), PROMPT)
    except ApiError:
        raise
    except CommandError:
        return False
    return True
