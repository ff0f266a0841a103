"""Which pages may call the API."""

import pytest

from cluster.errors import ConfigError
from gateway.cors import check_origins, is_preflight, preflight_headers, response_headers

pytestmark = pytest.mark.unit

APP = "https://app.example.com"


def test_off_where_no_origin_is_set() -> None:
    assert response_headers((), APP) == {}
    assert preflight_headers((), APP, "authorization") == {}


def test_one_of_the_origins_is_told_itself() -> None:
    headers = response_headers((APP, "http://localhost:3000"), APP)
    assert headers["Access-Control-Allow-Origin"] == APP
    assert headers["Vary"] == "Origin"
    assert "x-request-id" in headers["Access-Control-Expose-Headers"]
    assert "x-ratelimit-remaining-tokens" in headers["Access-Control-Expose-Headers"]
    asked = preflight_headers((APP,), APP, "authorization, content-type")
    assert asked["Access-Control-Allow-Headers"] == "authorization, content-type"
    assert "POST" in asked["Access-Control-Allow-Methods"]


@pytest.mark.parametrize(
    "origin", [None, "https://evil.example.com", "null", f"{APP}.evil.com", f"{APP}:444"]
)
def test_others_are_told_nothing(origin: str | None) -> None:
    assert response_headers((APP,), origin) == {"Vary": "Origin"}
    assert preflight_headers((APP,), origin, "authorization") == {}


def test_any_origin() -> None:
    headers = response_headers(("*",), APP)
    assert headers["Access-Control-Allow-Origin"] == "*"
    assert "Vary" not in headers
    assert "Access-Control-Allow-Credentials" not in headers


def test_a_preflight_is_a_browsers_question_only() -> None:
    asked = {"Origin": APP, "Access-Control-Request-Method": "POST"}
    assert is_preflight("OPTIONS", asked)
    assert not is_preflight("POST", asked)
    assert not is_preflight("OPTIONS", {"Origin": APP})


def test_headers_without_end_are_not_repeated() -> None:
    assert "Access-Control-Allow-Headers" not in preflight_headers(("*",), APP, "x" * 2000)


@pytest.mark.parametrize("origins", [("*", APP), ("app.example.com",), (f"{APP}/",), ("null",), ("",)])
def test_what_is_no_origin_is_named(origins: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError, match="cors_origins"):
        check_origins(origins)


def test_origins_pass() -> None:
    for origins in ((), ("*",), (APP, "http://localhost:3000")):
        assert check_origins(origins) == origins
