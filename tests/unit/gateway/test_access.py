"""What settings say of who may come in, and what HTTP is told of it."""

import json
import resource
from dataclasses import replace
from pathlib import Path

import pytest
from tests.support.certificates import certificate

from cluster.config import load_config
from cluster.errors import ConfigError
from gateway.access import FILES_BESIDE, read_access
from gateway.config import GatewayConfig
from gateway.edge import error_form
from gateway.tenants.api_keys import hash_line

pytestmark = pytest.mark.unit

CONFIG = GatewayConfig(model_folder="/m")


def test_nothing_set_is_an_open_gateway_without_tls() -> None:
    access = read_access(CONFIG)
    http = access.http_options(CONFIG)
    assert access.identity.open
    assert (http.tls, http.reuse_port, http.answer_first) == (None, False, None)
    assert http.request_bytes_max == CONFIG.body_bytes_max == 64 * 1024 * 1024


def test_keys_of_the_environment_are_read_and_not_shown() -> None:
    environment = {"MOONPOOL_API_KEYS": f"acme={hash_line('mp-a')}, beta={hash_line('mp-b')}"}
    config = load_config(GatewayConfig, ["--model-folder", "/m"], environment, role="gateway")
    assert set(read_access(config).identity.tenants) == {"acme", "beta"}
    assert "sha256" not in repr(config)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"api_keys_file": "/absent.toml"}, r"/absent\.toml: No such file"),
        ({"api_keys": ("acme",)}, "api_keys entry 1"),
        ({"cors_origins": ("app.example.com",)}, "cors_origins"),
        ({"tls_cert_file": "/c.pem"}, "tls_key_file must be"),
        ({"tls_cert_file": "/c.pem", "tls_key_file": "/k.pem"}, r"tls_cert_file /c\.pem: No such file"),
    ],
)
def test_a_wrong_setting_is_named(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_access(replace(CONFIG, **changes))


def test_what_is_set_reaches_http(tmp_path: Path) -> None:
    made = certificate(tmp_path, "gateway")
    config = replace(
        CONFIG,
        cors_origins=("*",),
        tls_cert_file=str(made.cert),
        tls_key_file=str(made.key),
        reuse_port=True,
        header_timeout_s=3.0,
        idle_timeout_s=4.0,
    )
    access = read_access(config)
    http = access.http_options(config)
    assert access.tls is not None
    assert http.tls is access.tls.context
    assert (http.reuse_port, http.header_timeout_s, http.idle_timeout_s) == (True, 3.0, 4.0)
    assert http.answer_first is not None


@pytest.mark.parametrize(
    ("soft", "hard", "wanted", "asked", "connections"),
    [
        (1024, 1 << 20, 8192, (8192 + FILES_BESIDE, 1 << 20), 8192),
        (1024, 4096, 8192, (4096, 4096), 4096 - FILES_BESIDE),
        (1024, resource.RLIM_INFINITY, 8192, (8192 + FILES_BESIDE, resource.RLIM_INFINITY), 8192),
        (1 << 20, 1 << 20, 8192, None, 8192),
        (resource.RLIM_INFINITY, resource.RLIM_INFINITY, 8192, None, 8192),
        (64, 64, 8192, (64, 64), 1),
    ],
)
def test_as_many_connections_as_there_may_be_files(
    soft: int,
    hard: int,
    wanted: int,
    asked: tuple[int, int] | None,
    connections: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    set_to: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "getrlimit", lambda _: (soft, hard))
    monkeypatch.setattr(resource, "setrlimit", lambda _, limits: set_to.append(limits))
    config = replace(CONFIG, connections_max=wanted)
    assert read_access(config).http_options(config).connections_max == connections
    assert set_to == ([] if asked is None else [asked])


@pytest.mark.parametrize(
    ("status", "kind", "code"),
    [
        (400, "invalid_request_error", "malformed_http"),
        (404, "invalid_request_error", "not_found"),
        (408, "invalid_request_error", "headers_timeout"),
        (413, "invalid_request_error", "request_too_large"),
        (417, "invalid_request_error", "expectation_failed"),
        (431, "invalid_request_error", "headers_too_large"),
        (500, "server_error", "internal_error"),
        (503, "service_unavailable_error", "connections_full"),
    ],
)
def test_what_the_server_refuses_has_openais_form(status: int, kind: str, code: str) -> None:
    body, content_type = error_form(status, "why")
    assert content_type == "application/json"
    assert json.loads(body) == {"error": {"message": "why", "type": kind, "param": None, "code": code}}
