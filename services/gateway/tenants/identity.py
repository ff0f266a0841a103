"""Whom a request is from: the tenant of its API key.

Owns the table of keys that holds, and reads it again when its file changes. Without any keys configured the
gateway is open: everybody is the tenant "". A key is neither kept nor logged.
"""

import hashlib
import hmac
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from cluster.errors import ConfigError
from gateway.api.api_errors import UNAUTHORIZED, ApiError
from gateway.tenants.api_keys import KEY_CHARS_MAX, digest_of, key_in
from gateway.tenants.tenant_limits import NO_LIMITS, TenantLimits
from gateway.tenants.tenants import KeyTable, Tenant, read_table


@dataclass(frozen=True, slots=True)
class Caller:
    """`tenant` is "" where the gateway is open. `limits` None: there are none. Requests of one
    `cache_owner` find each other's cached prompts, no others do."""

    tenant: str = ""
    limits: TenantLimits | None = None
    cache_owner: str = ""

    def salt(self, cache_salt: str) -> str:
        """Of the request's block hashes, given the request's own `cache_salt`."""
        return salt_of(self.cache_owner, cache_salt)


OPEN = Caller()


@dataclass(frozen=True, slots=True)
class KeySettings:
    """Where keys come from: a file, and `tenant=sha256:…` entries. Neither: an open gateway."""

    file: Path | None = None
    entries: tuple[str, ...] = ()

    @property
    def open(self) -> bool:
        return self.file is None and not self.entries

    def read(self) -> KeyTable | None:
        """None where the gateway is open. Raises ConfigError."""
        return None if self.open else read_table(self.file, self.entries)


class Identity:
    def __init__(self, table: KeyTable | None, *, clock: Callable[[], float] = time.time) -> None:
        """`clock` is the wall clock: keys expire by it."""
        self._table = table
        self._clock = clock

    @property
    def open(self) -> bool:
        return self._table is None

    @property
    def tenants(self) -> Mapping[str, Tenant]:
        return {} if self._table is None else self._table.tenants

    def replace(self, table: KeyTable) -> None:
        """From now on these keys hold. A gateway that was opened with none stays open: keys that a running
        process was never told to ask for are not asked for."""
        if self._table is None:
            raise ConfigError("the gateway was started without API keys")
        self._table = table

    def caller_of(self, headers: Mapping[str, str]) -> Caller:
        """Raises ApiError 401."""
        if self._table is None:
            return OPEN
        key = key_in(headers)
        if key is None:
            raise _unauthorized("no API key: give one as Authorization: Bearer KEY")
        digest = digest_of(key[:KEY_CHARS_MAX])
        known = self._table.keys.get(digest)
        # Found by its hash, which nobody can steer byte by byte towards another: what the search takes says
        # nothing about the keys. The comparison that decides takes the same time always.
        if known is None or len(key) > KEY_CHARS_MAX or not hmac.compare_digest(known.digest, digest):
            raise _unauthorized("the API key is wrong")
        if known.expires_at_s is not None and self._clock() >= known.expires_at_s:
            raise _unauthorized("the API key has expired")
        return caller_of_tenant(known.tenant)


def caller_of_tenant(tenant: Tenant) -> Caller:
    # No tenant's name has a space: no tenant owns what a group does.
    owner = f"group {tenant.share_cache}" if tenant.share_cache else tenant.name
    return Caller(tenant.name, None if tenant.limits == NO_LIMITS else tenant.limits, owner)


def salt_of(tenant: str, cache_salt: str) -> str:
    """What keeps the block hashes of one tenant, and within it of one `cache_salt`, apart from all others.

    Empty where both are. Of a fixed length, and neither can be read from it: it travels with each request.
    """
    if not tenant and not cache_salt:
        return ""
    parts = [part.encode("utf-8", "surrogatepass") for part in (tenant, cache_salt)]
    framed = b"".join(len(part).to_bytes(4, "little") + part for part in parts)
    return hashlib.sha256(framed).hexdigest()


def _unauthorized(message: str) -> ApiError:
    return ApiError(UNAUTHORIZED, message)
