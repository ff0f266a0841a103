"""What a tenant may use: requests and tokens a minute, and requests at once, as pure functions of time.

A rate is a token bucket that holds one minute's worth. Gateways share no state: each grants its part of a
limit, the limit divided by how many gateways there are. What costs more than a bucket ever holds waits until
it is full and leaves a debt, so that the rate holds in the long run, and a request that the whole limit has
room for is never refused for ever because there are many gateways.
"""

from dataclasses import dataclass, replace
from enum import StrEnum
from math import ceil, floor

MINUTE_S = 60.0
CONCURRENCY_RETRY_S = 1.0
"""When to come again where too much runs at once: nobody knows when something ends."""
TOLERANCE = 1e-6
"""Of a request or token: who waits as long as told is not refused for a rounding error."""


class Reason(StrEnum):
    """Why a request is refused; goes out as x-moonpool-rejected-reason."""

    REQUESTS = "tenant_requests"
    TOKENS = "tenant_tokens"
    CONCURRENCY = "tenant_concurrency"


@dataclass(frozen=True, slots=True)
class TenantLimits:
    """Of all gateways together; None: no limit. Tokens are those of prompt and answer."""

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    concurrent_requests_max: int | None = None


NO_LIMITS = TenantLimits()


@dataclass(frozen=True, slots=True)
class Share:
    """One gateway's part of a tenant's limits."""

    requests_per_minute: float | None
    tokens_per_minute: float | None
    concurrent_requests_max: int | None


@dataclass(frozen=True, slots=True)
class Bucket:
    """`level` of it was there at `at_s`; below 0 it is a debt."""

    level: float
    at_s: float


@dataclass(frozen=True, slots=True)
class Use:
    """What one tenant has left at one gateway. A bucket is None until the first request."""

    requests: Bucket | None = None
    tokens: Bucket | None = None
    concurrent: int = 0


@dataclass(frozen=True, slots=True)
class Refusal:
    reason: Reason
    retry_after_s: float


def share_of(limits: TenantLimits, gateways: int) -> Share:
    """What one of so many gateways grants; of requests at once at least one."""
    requests, tokens, concurrent = (
        limits.requests_per_minute,
        limits.tokens_per_minute,
        limits.concurrent_requests_max,
    )
    return Share(
        None if requests is None else requests / gateways,
        None if tokens is None else tokens / gateways,
        None if concurrent is None else ceil(concurrent / gateways),
    )


def refilled(bucket: Bucket | None, per_minute: float | None, now_s: float) -> Bucket | None:
    """The bucket now; full where there was none, None where there is no limit."""
    if per_minute is None:
        return None
    if bucket is None:
        return Bucket(per_minute, now_s)
    gained = max(0.0, now_s - bucket.at_s) * per_minute / MINUTE_S
    return Bucket(min(per_minute, bucket.level + gained), now_s)


def brought_up(use: Use, share: Share, now_s: float) -> Use:
    """`use` now, by the share that held since it was touched last."""
    return replace(
        use,
        requests=refilled(use.requests, share.requests_per_minute, now_s),
        tokens=refilled(use.tokens, share.tokens_per_minute, now_s),
    )


def entered(use: Use, share: Share, now_s: float) -> Use | Refusal:
    """One more request, or why not: then nothing is taken."""
    use = brought_up(use, share, now_s)
    if share.concurrent_requests_max is not None and use.concurrent >= share.concurrent_requests_max:
        return Refusal(Reason.CONCURRENCY, CONCURRENCY_RETRY_S)
    wait_s = _wait_s(use.requests, share.requests_per_minute, 1)
    if wait_s > 0:
        return Refusal(Reason.REQUESTS, wait_s)
    return replace(use, requests=_taken(use.requests, 1), concurrent=use.concurrent + 1)


def reserved(use: Use, share: Share, tokens: int, now_s: float) -> Use | Refusal:
    """`tokens` set aside for a request that has entered, or why not: then nothing is taken."""
    use = brought_up(use, share, now_s)
    wait_s = _wait_s(use.tokens, share.tokens_per_minute, tokens)
    if wait_s > 0:
        return Refusal(Reason.TOKENS, wait_s)
    return replace(use, tokens=_taken(use.tokens, tokens))


def left(use: Use, share: Share, reserved_tokens: int, used_tokens: int, now_s: float) -> Use:
    """The request has ended: what it used of what was set aside is known."""
    use = settled(use, share, reserved_tokens, used_tokens, now_s)
    return replace(use, concurrent=max(0, use.concurrent - 1))


def settled(use: Use, share: Share, reserved_tokens: int, used_tokens: int, now_s: float) -> Use:
    """What was used is counted in place of what was set aside."""
    use = brought_up(use, share, now_s)
    tokens = _taken(use.tokens, used_tokens - reserved_tokens)
    if tokens is not None and share.tokens_per_minute is not None:
        tokens = replace(tokens, level=min(share.tokens_per_minute, tokens.level))
    return replace(use, tokens=tokens)


def header_lines(use: Use, limits: TenantLimits, share: Share, gateways: int) -> dict[str, str]:
    """OpenAI's x-ratelimit-* of the limits that there are, by a use that is brought up.

    What remains is told for all gateways, from what remains at this one: exact where there is one.
    """
    lines: dict[str, str] = {}
    for name, limit, bucket, per_minute in (
        ("requests", limits.requests_per_minute, use.requests, share.requests_per_minute),
        ("tokens", limits.tokens_per_minute, use.tokens, share.tokens_per_minute),
    ):
        if limit is None or bucket is None or per_minute is None:
            continue
        remaining = min(limit, max(0, floor(bucket.level * gateways + TOLERANCE)))
        reset_s = max(0.0, per_minute - bucket.level) * MINUTE_S / per_minute
        lines[f"x-ratelimit-limit-{name}"] = str(limit)
        lines[f"x-ratelimit-remaining-{name}"] = str(remaining)
        lines[f"x-ratelimit-reset-{name}"] = duration_text(reset_s)
    return lines


def duration_text(seconds: float) -> str:
    """As OpenAI writes times, which is Go's way: `120ms`, `6s`, `1m30s`, `1h0m0s`."""
    milliseconds = ceil(seconds * 1e3)
    if milliseconds < 1000:
        return f"{milliseconds}ms"
    minutes, rest_s = divmod(ceil(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h{minutes}m{rest_s}s" if hours else f"{minutes}m{rest_s}s" if minutes else f"{rest_s}s"


def _wait_s(bucket: Bucket | None, per_minute: float | None, cost: float) -> float:
    """How long until the bucket has enough: 0 where it does."""
    if bucket is None or per_minute is None:
        return 0.0
    missing = min(cost, per_minute) - bucket.level
    return 0.0 if missing <= TOLERANCE else missing * MINUTE_S / per_minute


def _taken(bucket: Bucket | None, cost: float) -> Bucket | None:
    return None if bucket is None else replace(bucket, level=bucket.level - cost)
