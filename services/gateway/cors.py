"""CORS: which pages in a browser may call this API, and read what of its answers.

Off where no origin is set. Keys travel in a header and no cookie is used, so credentials are never allowed
and `*` is safe to say. Pure; `libs/cluster/admin` carries it out.
"""

from collections.abc import Mapping
from urllib.parse import urlsplit

from cluster.config import shown
from cluster.errors import ConfigError

ANY_ORIGIN = "*"
PREFLIGHT_S_MAX = 600
"""How long a browser may remember what a preflight said."""
ALLOWED_METHODS = "GET, POST, OPTIONS"
REQUESTED_HEADERS_CHARS_MAX = 1024
EXPOSED_HEADERS = ", ".join(
    (
        "x-request-id",
        "retry-after",
        "retry-after-ms",
        "x-should-retry",
        "x-moonpool-rejected-reason",
        *(
            f"x-ratelimit-{what}-{of}"
            for of in ("requests", "tokens")
            for what in ("limit", "remaining", "reset")
        ),
    )
)


def check_origins(origins: tuple[str, ...]) -> tuple[str, ...]:
    """`*` alone, or origins as browsers send them. Raises ConfigError."""
    for origin in origins:
        if origin == ANY_ORIGIN and len(origins) == 1:
            continue
        parts = urlsplit(origin)
        if not parts.scheme or not parts.netloc or f"{parts.scheme}://{parts.netloc}" != origin:
            raise ConfigError(
                f"cors_origins: {shown(origin)} is no origin; give * alone, or origins such as "
                "https://app.example.com, without a path"
            )
    return origins


def response_headers(origins: tuple[str, ...], origin: str | None) -> Mapping[str, str]:
    """What is added to an answer to a request of `origin`, of whatever status."""
    allowed = _allowed(origins, origin)
    if allowed is None:
        # Caches must not give an answer without them to those who are allowed.
        return {"Vary": "Origin"} if origins and ANY_ORIGIN not in origins else {}
    headers = {
        "Access-Control-Allow-Origin": allowed,
        "Access-Control-Expose-Headers": EXPOSED_HEADERS,
    }
    return headers if allowed == ANY_ORIGIN else headers | {"Vary": "Origin"}


def is_preflight(method: str, headers: Mapping[str, str]) -> bool:
    """A question of a browser, which is not the client's request itself and carries no key."""
    return method == "OPTIONS" and "Origin" in headers and "Access-Control-Request-Method" in headers


def preflight_headers(
    origins: tuple[str, ...], origin: str | None, requested_headers: str
) -> Mapping[str, str]:
    """What is added, beside `response_headers`, to the answer to a preflight; nothing for other origins."""
    if _allowed(origins, origin) is None:
        return {}
    headers = {
        "Access-Control-Allow-Methods": ALLOWED_METHODS,
        "Access-Control-Max-Age": str(PREFLIGHT_S_MAX),
    }
    if requested_headers and len(requested_headers) <= REQUESTED_HEADERS_CHARS_MAX:
        # All that a client may send is harmless: what is not known is passed over.
        headers["Access-Control-Allow-Headers"] = requested_headers
    return headers


def _allowed(origins: tuple[str, ...], origin: str | None) -> str | None:
    if ANY_ORIGIN in origins:
        return ANY_ORIGIN
    return origin if origin is not None and origin in origins else None
