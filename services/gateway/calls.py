"""What is around every call: its ids, error bodies, metrics and the log line.

Knows no operation: what a call asks for and what it is answered is its handler's.
"""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

import msgspec
from aiohttp import web

from cluster.logs import Logger
from cluster.tracing import TraceContext, random_hex
from gateway.answers.outbox import TokenUsage
from gateway.api.api_errors import INTERNAL, OVERLOADED, UNAVAILABLE, ApiError
from gateway.edge import REQUEST_ID_HEADER, client_request_id
from gateway.metrics import GatewayMetrics
from gateway.tenants.identity import OPEN, Caller, Identity
from gateway.tenants.tenant_use import Entry, TenantUse
from policy.core import RequestId

CLIENT_GONE_STATUS = 499
"""In logs and metrics only: nobody is there to read it."""


class ClientGoneError(Exception):
    """The client closed its connection, or reads so slowly that we closed it."""


@dataclass(slots=True)
class Call:
    """One HTTP request as it is logged. `request_id` is ours, `client_id` what the client is given back."""

    route: str
    request_id: RequestId
    client_id: str
    trace: TraceContext
    arrived_at_s: float
    caller: Caller = OPEN
    entry: Entry | None = None
    """What it takes of the tenant's limits; None where nothing is counted."""
    first_token_at_s: float | None = None
    answered_tokens: int = 0
    """That were taken for the client so far."""
    usage: TokenUsage | None = None
    """None until all its answers have ended."""
    finish_reasons: list[str] = field(default_factory=list)
    """Of its answers, in the order in which they ended."""
    failure: ApiError | None = None

    def reserve(self, prompt_tokens: int, output_tokens_max: int, output_param: str | None) -> None:
        """Set the tokens of all its answers aside; `Entry.reserve` says what is raised."""
        if self.entry is not None:
            self.entry.reserve(prompt_tokens, output_tokens_max, output_param=output_param)

    def answered(self, output_tokens: int) -> None:
        """So many more tokens came."""
        self.answered_tokens += output_tokens
        if output_tokens and self.first_token_at_s is None:
            self.first_token_at_s = asyncio.get_running_loop().time()
        if self.entry is not None:
            self.entry.answered(output_tokens)

    def settle(self) -> None:
        """All its answers have ended."""
        if self.entry is not None:
            self.entry.settle()

    def headers(self) -> dict[str, str]:
        """Of its answer, beside what kind of answer it is."""
        limits = {} if self.entry is None else self.entry.headers
        return {REQUEST_ID_HEADER: self.client_id, **limits}


Handle = Callable[[web.Request, Call], Awaitable[web.StreamResponse]]


class Calls:
    def __init__(self, metrics: GatewayMetrics, log: Logger, identity: Identity, tenants: TenantUse) -> None:
        self._metrics = metrics
        self._log = log
        self._identity = identity
        self._tenants = tenants

    def answered(
        self, route: str, handle: Handle, *, needs_key: bool
    ) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
        """`handle` with everything around it. `needs_key`: only for callers with a key."""
        if needs_key:
            handle = self._identified(handle)

        async def answer(request: web.Request) -> web.StreamResponse:
            call = _call(route, request)
            status = CLIENT_GONE_STATUS
            try:
                response = await self._respond(handle, request, call)
                status = response.status if call.failure is None else call.failure.kind.status
                return response
            except (ConnectionError, ClientGoneError):
                # Nobody reads it; the server takes it as the end of the connection.
                return web.Response(status=CLIENT_GONE_STATUS)
            finally:
                self._record(call, status)

        return answer

    def _identified(self, handle: Handle) -> Handle:
        """`handle` for callers that are known; what asks for work counts against the tenant's limits."""

        async def identified(request: web.Request, call: Call) -> web.StreamResponse:
            call.caller = self._identity.caller_of(request.headers)
            if call.caller.tenant:
                self._metrics.tenant_requests.labels(call.caller.tenant).inc()
            if request.method != "POST":
                return await handle(request, call)
            with self._tenants.entered(call.caller) as entry:
                call.entry = entry
                try:
                    return await handle(request, call)
                except ApiError as error:
                    if error.kind in (OVERLOADED, UNAVAILABLE):
                        entry.refused()
                    raise

        return identified

    async def _respond(self, handle: Handle, request: web.Request, call: Call) -> web.StreamResponse:
        try:
            response = await handle(request, call)
        except (ConnectionError, ClientGoneError):
            raise
        except Exception as error:
            call.failure = self.failure(call, error)
            response = error_response(call.failure)
        if not response.prepared:
            response.headers.update(call.headers())
        return response

    def failure(self, call: Call, error: Exception) -> ApiError:
        """What the client is told of it; what nobody expected is logged."""
        if isinstance(error, ApiError):
            return error
        self._log.exception("request failed", error, request_id=call.request_id, **call.trace.log_fields())
        return ApiError(INTERNAL, "the gateway failed; see its log by the request id")

    def _record(self, call: Call, status: int) -> None:
        elapsed_s = asyncio.get_running_loop().time() - call.arrived_at_s
        self._metrics.requests.labels(call.route, str(status)).inc()
        self._metrics.request_s.labels(call.route).observe(elapsed_s)
        failure, usage = call.failure, call.usage
        if failure is not None and failure.reason is not None:
            self._metrics.rejected.labels(failure.reason).inc()
        if usage is not None:
            self._metrics.prompt_tokens.inc(usage.prompt_tokens)
            self._metrics.cached_tokens.inc(usage.cached_tokens)
            self._metrics.completion_tokens.inc(usage.completion_tokens)
        fields: dict[str, object] = {
            "route": call.route,
            "status": status,
            "request_id": call.request_id,
            "client_request_id": call.client_id,
            "trace_id": call.trace.trace_id,
            "tenant": call.caller.tenant,
            "elapsed_s": round(elapsed_s, 6),
        }
        if call.first_token_at_s is not None:
            fields["ttft_s"] = round(call.first_token_at_s - call.arrived_at_s, 6)
        if usage is None and call.answered_tokens:
            fields["answered_tokens"] = call.answered_tokens
        if usage is not None:
            fields |= {
                "prompt_tokens": usage.prompt_tokens,
                "cached_tokens": usage.cached_tokens,
                "completion_tokens": usage.completion_tokens,
                "answers": len(call.finish_reasons),
                "finish_reason": ",".join(sorted(set(call.finish_reasons))),
            }
        if failure is not None:
            fields |= _told(failure)
        self._log.info("request", **fields)


def _told(failure: ApiError) -> dict[str, object]:
    """What may be logged of it. What is wrong with a request is said in the client's own words: those are
    for the client alone."""
    told: dict[str, object] = {"error_code": failure.code or failure.kind.type, "param": failure.param}
    if failure.kind.status >= OVERLOADED.status:
        told["error"] = failure.message
    return told if failure.reason is None else told | {"reason": failure.reason}


def _call(route: str, http: web.Request) -> Call:
    request_id = RequestId(random_hex(32))
    client_id = client_request_id(http.headers)
    parent = TraceContext.parse(http.headers.get("traceparent", ""))
    told_id = client_id or ""
    return Call(
        route=route,
        request_id=request_id,
        client_id=client_id or request_id,
        trace=TraceContext.new(told_id) if parent is None else parent.child(told_id),
        arrived_at_s=asyncio.get_running_loop().time(),
    )


def json_response(status: int, body: bytes, headers: dict[str, str] | None = None) -> web.Response:
    return web.Response(status=status, body=body, content_type="application/json", headers=headers)


def error_response(error: ApiError) -> web.Response:
    return json_response(error.kind.status, msgspec.json.encode(error.body()), error.headers())
