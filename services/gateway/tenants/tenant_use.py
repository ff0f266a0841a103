"""What tenants use at this gateway: `tenant_limits` with a clock, the number of gateways, and metrics.

A request enters before its body is read and leaves with its last byte; in between it sets tokens aside.
Keeps one small state per tenant that has come, and knows no HTTP but the names of headers.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from gateway.api.api_errors import OVERLOADED, ApiError, invalid
from gateway.metrics import GatewayMetrics
from gateway.tenants.identity import Caller
from gateway.tenants.tenant_limits import (
    Reason,
    Refusal,
    Share,
    TenantLimits,
    Use,
    brought_up,
    entered,
    header_lines,
    left,
    reserved,
    settled,
    share_of,
)

OUTPUT_TOKENS_RESERVED_DEFAULT = 1024
"""Set aside for an answer whose length the client does not bound; what it really takes is counted."""
_TOLD = {
    Reason.REQUESTS: "{requests_per_minute} requests a minute, the limit of the key's tenant, are used up",
    Reason.TOKENS: "{tokens_per_minute} tokens a minute, the limit of the key's tenant, are used up",
    Reason.CONCURRENCY: "{concurrent_requests_max} requests at once, which is the limit of this API key's "
    "tenant, are in progress",
}


class Entry:
    """One request that has entered. `headers` tell the client what is left."""

    def __init__(self, use: "TenantUse", caller: Caller) -> None:
        self._use = use
        self._caller = caller
        self._prompt_tokens = 0
        self._output_tokens = 0
        self.reserved_tokens = 0

    @property
    def used_tokens(self) -> int:
        return self._prompt_tokens + self._output_tokens

    @property
    def headers(self) -> Mapping[str, str]:
        return self._use.headers(self._caller)

    def reserve(self, prompt_tokens: int, output_tokens_max: int, *, output_param: str | None = None) -> None:
        """Set tokens aside for all answers to the request; once, when its prompt is known. `output_param` is
        what the client called the answer's bound, None where it gave none.

        Raises ApiError: 400 where the whole limit is too small, 429 where what is left of it is.
        """
        self.reserved_tokens = self._use.reserve(self._caller, prompt_tokens, output_tokens_max, output_param)
        self._prompt_tokens = prompt_tokens

    def answered(self, output_tokens: int) -> None:
        """So many more tokens of answers were generated."""
        self._output_tokens += output_tokens

    def settle(self) -> None:
        """All answers have ended: from here on what they took is counted, not what was set aside."""
        self._use.settle(self._caller, self.reserved_tokens, self.used_tokens)
        self.reserved_tokens = self.used_tokens

    def refused(self) -> None:
        """Nothing was computed: the cluster had no room, and the prompt costs nothing."""
        self._prompt_tokens = 0


class TenantUse:
    def __init__(self, metrics: GatewayMetrics, clock: Callable[[], float]) -> None:
        """`clock` is one that only runs forward."""
        self._metrics = metrics
        self._clock = clock
        self._gateways = 1
        self._uses: dict[str, Use] = {}
        self._limits: dict[str, TenantLimits] = {}

    @property
    def gateways(self) -> int:
        return self._gateways

    def share_among(self, gateways: int) -> None:
        """From now on limits are divided among so many gateways; what was gained before stays."""
        now_s = self._clock()
        for tenant, use in self._uses.items():
            self._uses[tenant] = brought_up(use, self._share(self._limits[tenant]), now_s)
        self._gateways = max(1, gateways)
        self._metrics.limits_divided_by.set(self._gateways)

    def keep_only(self, tenants: Mapping[str, object]) -> None:
        """Forget those that are no tenants any more and have nothing in progress."""
        for tenant in [
            name for name, use in self._uses.items() if name not in tenants and not use.concurrent
        ]:
            del self._uses[tenant], self._limits[tenant]

    @contextmanager
    def entered(self, caller: Caller) -> Iterator[Entry]:
        """A place among the tenant's requests. Raises ApiError 429 where it has none left."""
        entry = Entry(self, caller)
        if caller.limits is not None:
            self._enter(caller, caller.limits)
        try:
            yield entry
        finally:
            if caller.limits is not None:
                self._leave(caller, caller.limits, entry)
            if caller.tenant:
                self._metrics.tenant_tokens.labels(caller.tenant).inc(entry.used_tokens)

    def reserve(
        self, caller: Caller, prompt_tokens: int, output_tokens_max: int, output_param: str | None
    ) -> int:
        """How many tokens were set aside; see `Entry.reserve`."""
        limits = caller.limits
        if limits is None or limits.tokens_per_minute is None:
            return 0
        limit = limits.tokens_per_minute
        if output_param is None:
            room = max(1, limit - prompt_tokens)
            output_tokens_max = min(output_tokens_max, OUTPUT_TOKENS_RESERVED_DEFAULT, room)
        tokens = prompt_tokens + output_tokens_max
        if tokens > limit:
            raise invalid(
                output_param or "prompt",
                f"prompt ({prompt_tokens} tokens) and {output_param or 'answer'} ({output_tokens_max}) are "
                f"more than {limit} tokens a minute, the limit of this API key's tenant: no wait helps",
                "tokens_per_minute_exceeded",
            )
        outcome = reserved(self._use_of(caller), self._share(limits), tokens, self._clock())
        if isinstance(outcome, Refusal):
            raise self._refused(outcome, caller, limits)
        self._uses[caller.tenant] = outcome
        return tokens

    def settle(self, caller: Caller, reserved_tokens: int, used_tokens: int) -> None:
        """See `Entry.settle`."""
        limits = caller.limits
        if limits is not None and limits.tokens_per_minute is not None:
            use, share = self._use_of(caller), self._share(limits)
            self._uses[caller.tenant] = settled(use, share, reserved_tokens, used_tokens, self._clock())

    def headers(self, caller: Caller) -> Mapping[str, str]:
        """x-ratelimit-* as of now; none where there are no limits."""
        if caller.limits is None:
            return {}
        share = self._share(caller.limits)
        use = brought_up(self._use_of(caller), share, self._clock())
        return header_lines(use, caller.limits, share, self._gateways)

    def _enter(self, caller: Caller, limits: TenantLimits) -> None:
        self._limits[caller.tenant] = limits
        outcome = entered(self._use_of(caller), self._share(limits), self._clock())
        if isinstance(outcome, Refusal):
            raise self._refused(outcome, caller, limits)
        self._uses[caller.tenant] = outcome

    def _leave(self, caller: Caller, limits: TenantLimits, entry: Entry) -> None:
        """By the limits that the request came with, also where others hold by now."""
        self._uses[caller.tenant] = left(
            self._use_of(caller),
            self._share(limits),
            entry.reserved_tokens,
            entry.used_tokens,
            self._clock(),
        )

    def _use_of(self, caller: Caller) -> Use:
        return self._uses.get(caller.tenant) or Use()

    def _share(self, limits: TenantLimits) -> Share:
        return share_of(limits, self._gateways)

    def _refused(self, refusal: Refusal, caller: Caller, limits: TenantLimits) -> ApiError:
        self._metrics.tenant_rejected.labels(caller.tenant, refusal.reason.value).inc()
        message = _TOLD[refusal.reason].format(
            requests_per_minute=limits.requests_per_minute,
            tokens_per_minute=limits.tokens_per_minute,
            concurrent_requests_max=limits.concurrent_requests_max,
        )
        if self._gateways > 1:
            message += f" at this gateway, whose part is one of {self._gateways}"
        return ApiError(
            OVERLOADED,
            message,
            reason=refusal.reason,
            retry_after_s=refusal.retry_after_s,
            extra_headers=self.headers(caller),
        )
