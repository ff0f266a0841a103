"""Who the tenants are: the file of API keys and the keys in the environment, read into one table.

    [tenants.acme]
    keys = ["sha256:…", { hash = "sha256:…", expires = 2027-01-01T00:00:00Z }]
    requests_per_minute = 600
    tokens_per_minute = 200_000
    concurrent_requests_max = 32
    share_cache = "research"

Everything but `keys` may be left out. Pure but for `read_table`; errors name the place and never a key.
"""

import re
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path

from cluster.config import hint, shown
from cluster.errors import ConfigError
from gateway.tenants.api_keys import digest_in
from gateway.tenants.tenant_limits import TenantLimits

FILE_BYTES_MAX = 4 * 1024 * 1024
TENANTS_MAX = 4096
"""Each is a label of metrics."""
KEYS_OF_TENANT_MAX = 64
LIMIT_MAX = 1_000_000_000
TENANT_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")
NAME_RULE = "must be 1 to 64 letters, digits, -, _ and ., the first a letter or digit"
HASH_RULE = "must be sha256: and 64 hexadecimal digits, as `moonpool keys hash` prints"
_LIMIT_FIELDS = ("requests_per_minute", "tokens_per_minute", "concurrent_requests_max")
_FIELDS = ("keys", *_LIMIT_FIELDS, "share_cache")
_KEY_FIELDS = ("hash", "expires")


@dataclass(frozen=True, slots=True)
class Tenant:
    """`share_cache` names a group whose tenants find each other's cached prompts; empty: nobody else's."""

    name: str
    limits: TenantLimits = field(default_factory=TenantLimits)
    share_cache: str = ""


@dataclass(frozen=True, slots=True)
class KnownKey:
    """`expires_at_s` by the wall clock, seconds since 1970; None: never."""

    tenant: Tenant
    digest: bytes
    expires_at_s: float | None = None


@dataclass(frozen=True, slots=True)
class KeyTable:
    """All keys by their digests, and all tenants by name."""

    keys: Mapping[bytes, KnownKey]
    tenants: Mapping[str, Tenant]


def read_table(path: Path | None, from_environment: Iterable[str]) -> KeyTable:
    """The table of a file and of `tenant=sha256:…` entries. Raises ConfigError."""
    keys = () if path is None else keys_in(_read(path), f"api_keys_file {path}")
    by_name = {key.tenant.name: key.tenant for key in keys}
    more = [_entry(number, text, by_name) for number, text in enumerate(from_environment, 1)]
    return table_of((*keys, *more))


def table_of(keys: Iterable[KnownKey]) -> KeyTable:
    """Raises ConfigError where one key is two tenants' or there are too many tenants."""
    by_digest: dict[bytes, KnownKey] = {}
    for key in keys:
        other = by_digest.setdefault(key.digest, key)
        if other.tenant.name != key.tenant.name:
            raise ConfigError(
                f"one API key is given to two tenants, {other.tenant.name} and {key.tenant.name}"
            )
    tenants = {key.tenant.name: key.tenant for key in by_digest.values()}
    if len(tenants) > TENANTS_MAX:
        raise ConfigError(f"{len(tenants)} tenants, at most {TENANTS_MAX}")
    return KeyTable(by_digest, tenants)


def keys_in(text: str, where: str) -> tuple[KnownKey, ...]:
    """The keys of a file's text; `where` is what errors call it."""
    try:
        document = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{where}: {error}") from error
    for name in document:
        if name != "tenants":
            raise ConfigError(f"{where}: {shown(name)} is unknown, only tables [tenants.NAME] are allowed")
    tenants = document.get("tenants", {})
    if not isinstance(tenants, dict):
        raise ConfigError(f"{where}: tenants must be tables [tenants.NAME]")
    found: list[KnownKey] = []
    for name, fields in tenants.items():
        found += _keys_of(name, fields, f"{where}: [tenants.{name[:64]}]")
    return tuple(found)


def _keys_of(name: str, fields: object, where: str) -> list[KnownKey]:
    _check_name(name, where)
    if not isinstance(fields, dict):
        raise ConfigError(f"{where} must be a table")
    for known in fields:
        if known not in _FIELDS:
            raise ConfigError(f"{where} {known[:64]} is unknown{hint(known, _FIELDS)}")
    limits = TenantLimits(
        **{field: _limit(fields[field], f"{where} {field}") for field in _LIMIT_FIELDS if field in fields}
    )
    tenant = Tenant(name, limits, _group(fields.get("share_cache", ""), f"{where} share_cache"))
    keys = fields.get("keys")
    if not isinstance(keys, list) or not 1 <= len(keys) <= KEYS_OF_TENANT_MAX:
        raise ConfigError(f"{where} keys must be a list of 1 to {KEYS_OF_TENANT_MAX} hashes")
    return [_key(tenant, key, f"{where} keys[{number}]") for number, key in enumerate(keys)]


def _key(tenant: Tenant, entry: object, where: str) -> KnownKey:
    if isinstance(entry, str):
        return KnownKey(tenant, _digest(entry, where))
    if not isinstance(entry, dict) or not isinstance(entry.get("hash"), str):
        raise ConfigError(f'{where} must be a hash or {{ hash = "sha256:…", expires = TIME }}')
    for name in entry:
        if name not in _KEY_FIELDS:
            raise ConfigError(f"{where} {name[:64]} is unknown{hint(name, _KEY_FIELDS)}")
    key = KnownKey(tenant, _digest(entry["hash"], where))
    if "expires" not in entry:
        return key
    expires = entry["expires"]
    if not isinstance(expires, datetime) or expires.tzinfo is None:
        raise ConfigError(f"{where} expires must be a time with its zone, such as 2027-01-01T00:00:00Z")
    return replace(key, expires_at_s=expires.timestamp())


def _entry(number: int, text: str, tenants: Mapping[str, Tenant]) -> KnownKey:
    """`tenant=sha256:…`; limits are the file's, where it knows the tenant."""
    where = f"api_keys entry {number}"
    name, equals, hashed = text.partition("=")
    if not equals:
        raise ConfigError(f"{where} must be TENANT=sha256:…")
    _check_name(name, where)
    return KnownKey(tenants.get(name, Tenant(name)), _digest(hashed, where))


def _check_name(name: str, where: str) -> None:
    if not TENANT_NAME.fullmatch(name):
        # What stands there may be a key that was put in the wrong place.
        raise ConfigError(f"{where}: the tenant's name {NAME_RULE}")


def _digest(text: str, where: str) -> bytes:
    digest = digest_in(text)
    if digest is None:
        raise ConfigError(f"{where} {HASH_RULE}")
    return digest


def _limit(value: object, where: str) -> int:
    if type(value) is not int or not 1 <= value <= LIMIT_MAX:
        raise ConfigError(f"{where} is {shown(value)}, must be from 1 to {LIMIT_MAX}")
    return value


def _group(value: object, where: str) -> str:
    if value == "":
        return ""
    if not isinstance(value, str) or not TENANT_NAME.fullmatch(value):
        raise ConfigError(f"{where} is {shown(value)}: the name of a group {NAME_RULE}")
    return value


def _read(path: Path) -> str:
    try:
        with path.open("rb") as file:
            content = file.read(FILE_BYTES_MAX + 1)
        if len(content) > FILE_BYTES_MAX:
            raise ConfigError(f"api_keys_file {path}: longer than {FILE_BYTES_MAX} bytes")
        return content.decode("utf-8")
    except OSError as error:
        raise ConfigError(f"api_keys_file {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"api_keys_file {path}: {error}") from error
