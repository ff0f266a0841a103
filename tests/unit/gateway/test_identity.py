"""Whose request it is: keys, their file, what is refused, and what two tenants never share."""

import re
from datetime import UTC, datetime
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from multidict import CIMultiDict

from cluster.errors import ConfigError
from gateway.api.api_errors import ApiError
from gateway.tenants.api_keys import KEY_CHARS_MAX, digest_of, hash_line, key_in, new_key
from gateway.tenants.identity import OPEN, Identity, KeySettings, caller_of_tenant, salt_of
from gateway.tenants.tenant_limits import TenantLimits
from gateway.tenants.tenants import FILE_BYTES_MAX, Tenant, keys_in, read_table, table_of

pytestmark = pytest.mark.unit

KEY = "mp-first"
OTHER_KEY = "mp-other"
FILE = f"""
[tenants.acme]
keys = ["{hash_line(KEY)}", {{ hash = "{hash_line("mp-old")}", expires = 2026-01-02T00:00:00Z }}]
requests_per_minute = 600
tokens_per_minute = 200_000
concurrent_requests_max = 32

[tenants.beta]
keys = ["{hash_line(OTHER_KEY)}"]
"""


def _identity(text: str = FILE, now_s: float = 0.0) -> Identity:
    return Identity(table_of(keys_in(text, "keys.toml")), clock=lambda: now_s)


def _bearer(key: str) -> CIMultiDict[str]:
    return CIMultiDict({"Authorization": f"Bearer {key}"})


def test_a_key_is_its_tenants_with_the_limits_of_the_file() -> None:
    caller = _identity().caller_of(_bearer(KEY))
    assert caller.tenant == "acme"
    assert caller.limits == TenantLimits(600, 200_000, 32)
    assert _identity().caller_of(_bearer(OTHER_KEY)).tenant == "beta"


@pytest.mark.parametrize(
    "headers",
    [
        {"Authorization": f"bearer {KEY}"},
        {"AUTHORIZATION": f"BEARER  {KEY} "},
        {"api-key": KEY},
        {"X-API-Key": KEY},
        {"api-key": KEY, "x-api-key": OTHER_KEY},
        {"Authorization": f"Bearer {KEY}", "api-key": OTHER_KEY},
    ],
)
def test_where_a_key_may_stand(headers: dict[str, str]) -> None:
    assert _identity().caller_of(CIMultiDict(headers)).tenant == "acme"


@pytest.mark.parametrize(
    ("headers", "message"),
    [
        ({}, "no API key"),
        ({"Authorization": "Bearer"}, "no API key"),
        ({"Authorization": "Bearer   "}, "no API key"),
        ({"Authorization": KEY}, "no API key"),
        ({"Authorization": f"Basic {KEY}", "api-key": KEY}, "no API key"),
        ({"Authorization": f"Bearer {KEY}x"}, "wrong"),
        ({"Authorization": f"Bearer {hash_line(KEY)}"}, "wrong"),
        ({"Authorization": "Bearer \udc80\udcff"}, "wrong"),
        ({"api-key": "x" * (KEY_CHARS_MAX + 1)}, "wrong"),
    ],
)
def test_who_is_refused_and_as_what(headers: dict[str, str], message: str) -> None:
    with pytest.raises(ApiError, match=message) as refused:
        _identity().caller_of(CIMultiDict(headers))
    assert refused.value.kind.status == 401
    assert refused.value.code == "invalid_api_key"
    assert refused.value.headers()["WWW-Authenticate"] == "Bearer"
    assert KEY not in refused.value.message


def test_a_key_holds_until_it_expires() -> None:
    expires_s = datetime(2026, 1, 2, tzinfo=UTC).timestamp()
    assert _identity(now_s=expires_s - 1).caller_of(_bearer("mp-old")).tenant == "acme"
    with pytest.raises(ApiError, match="expired"):
        _identity(now_s=expires_s).caller_of(_bearer("mp-old"))


def test_without_keys_everybody_is_the_one_tenant_without_a_name() -> None:
    identity = Identity(KeySettings().read())
    assert identity.open
    assert identity.caller_of(_bearer("whatever")) == identity.caller_of({}) == OPEN
    with pytest.raises(ConfigError, match="without API keys"):
        identity.replace(table_of(()))


def test_a_file_without_tenants_lets_nobody_in(tmp_path: Path) -> None:
    path = tmp_path / "keys.toml"
    path.write_text("")
    identity = Identity(KeySettings(path).read())
    assert not identity.open
    with pytest.raises(ApiError):
        identity.caller_of(_bearer(KEY))


def test_other_keys_hold_at_once() -> None:
    identity = _identity()
    identity.replace(table_of(keys_in(f'[tenants.new]\nkeys = ["{hash_line("mp-new")}"]', "keys.toml")))
    assert identity.caller_of(_bearer("mp-new")).tenant == "new"
    with pytest.raises(ApiError, match="wrong"):
        identity.caller_of(_bearer(KEY))


def test_keys_of_the_environment_join_those_of_the_file(tmp_path: Path) -> None:
    path = tmp_path / "keys.toml"
    path.write_text(FILE)
    table = read_table(path, [f"acme={hash_line('mp-env')}", f"gamma={hash_line('mp-g')}"])
    identity = Identity(table)
    assert identity.caller_of(_bearer("mp-env")).limits == TenantLimits(600, 200_000, 32)
    assert identity.caller_of(_bearer("mp-g")).limits is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("keys = 1", r"'keys' is unknown, only tables \[tenants.NAME\]"),
        ("tenants = 1", "must be tables"),
        ("[tenants.a]", r"\[tenants.a\] keys must be a list of 1 to"),
        ("[tenants.a]\nkeys = []", "keys must be a list of 1 to"),
        ('[tenants.a]\nkeys = ["mp-plain"]', r"keys\[0\] must be sha256: and 64"),
        ("[tenants.a]\nkeys = [1]", r"keys\[0\] must be a hash"),
        (f'[tenants."a b"]\nkeys = ["{hash_line("k")}"]', "letters, digits"),
        (f'[tenants.a]\nkey = 1\nkeys = ["{hash_line("k")}"]', "key is unknown: did you mean keys"),
        (f'[tenants.a]\nrequests_per_minute = 0\nkeys = ["{hash_line("k")}"]', "from 1 to"),
        (f'[tenants.a]\ntokens_per_minute = true\nkeys = ["{hash_line("k")}"]', "from 1 to"),
        (f'[tenants.a]\nshare_cache = "a b"\nkeys = ["{hash_line("k")}"]', "share_cache"),
        (f'[tenants.a]\nkeys = [{{hash = "{hash_line("k")}", expires = 2026-01-02}}]', "with its zone"),
        (f'[tenants.a]\nkeys = [{{hash = "{hash_line("k")}", expires = 2026-01-02T00:00:00}}]', "zone"),
        (f'[tenants.a]\nkeys = [{{hash = "{hash_line("k")}", until = 1}}]', "until is unknown"),
        (
            f'[tenants.a]\nkeys = ["{hash_line("k")}"]\n[tenants.b]\nkeys = ["{hash_line("k")}"]',
            "two tenants",
        ),
        ("[tenants", "keys.toml"),
    ],
)
def test_a_wrong_file_is_named_with_the_place(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as refused:
        table_of(keys_in(text, "keys.toml"))
    assert "mp-plain" not in str(refused.value)


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^api_keys_file .*absent\.toml: No such file"):
        read_table(tmp_path / "absent.toml", ())
    long = tmp_path / "long.toml"
    long.write_bytes(b"#" * (FILE_BYTES_MAX + 1))
    with pytest.raises(ConfigError, match="longer than"):
        read_table(long, ())
    long.write_bytes(b"\xff")
    with pytest.raises(ConfigError, match="utf-8"):
        read_table(long, ())


@pytest.mark.parametrize("entry", ["acme", "=sha256:" + "0" * 64, "acme=mp-plain", "a b=sha256:" + "0" * 64])
def test_a_wrong_entry_of_the_environment_is_named_by_its_number(entry: str) -> None:
    with pytest.raises(ConfigError, match="api_keys entry 2") as refused:
        read_table(None, [f"acme={hash_line(KEY)}", entry])
    assert "mp-plain" not in str(refused.value)


def test_new_keys_differ_and_go_into_a_header() -> None:
    keys = {new_key() for _ in range(100)}
    assert len(keys) == 100
    for key in keys:
        assert re.fullmatch(r"mp-[A-Za-z0-9_-]{43}", key)
        assert key_in(_bearer(key)) == key


@given(st.text(), st.text(), st.text(), st.text())
def test_salts_are_equal_only_where_tenant_and_salt_are(a: str, b: str, c: str, d: str) -> None:
    assert (salt_of(a, b) == salt_of(c, d)) == ((a, b) == (c, d))
    assert (salt_of(a, b) == "") == (not a and not b)
    assert salt_of(a, b).isascii()


def test_a_group_shares_its_cache_and_is_no_tenant() -> None:
    first, second = (caller_of_tenant(Tenant(name, share_cache="research")) for name in ("a", "b"))
    alone = caller_of_tenant(Tenant("research"))
    assert first.salt("") == second.salt("")
    assert first.salt("x") != second.salt("")
    assert len({first.salt(""), alone.salt(""), caller_of_tenant(Tenant("a")).salt(""), OPEN.salt("")}) == 4


@given(st.text(st.characters(exclude_categories=())))
def test_everything_that_a_header_may_hold_has_a_digest(text: str) -> None:
    assert len(digest_of(text)) == 32
