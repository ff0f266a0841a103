"""The HTTP API: routes, statuses, headers and streams.

Owns the client's connection. What a request means is `gateway.validate`'s, what becomes of it
`gateway.requests`'s.
"""

import asyncio
import secrets
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import msgspec
from aiohttp import web

from cluster.logs import Logger
from cluster.tracing import TraceContext
from gateway import request_body, validate
from gateway.answer_forms import DONE, AnswerForm, ChatForm, CompletionForm, Header, error_event
from gateway.answer_text import AnswerText
from gateway.api_errors import INTERNAL, METHOD_NOT_ALLOWED, NOT_FOUND, ApiError
from gateway.api_types import ModelList, ModelObject
from gateway.http_body import BodyLimits, BodyReader
from gateway.metrics import GatewayMetrics
from gateway.outbox import Ending
from gateway.placing import Order
from gateway.requests import Requests
from gateway.running import RunningRequest
from gateway.text import Prompt, TextModel
from gateway.validate import Generation
from policy.core import RequestId

REQUEST_ID_HEADER = "x-request-id"
REQUEST_ID_CHARS_MAX = 128
CLIENT_GONE_STATUS = 499
"""In logs and metrics only: nobody is there to read it."""
STREAM_HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",
}


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
    ending: Ending | None = None
    failure: ApiError | None = None


Handle = Callable[[web.Request, Call], Awaitable[web.StreamResponse]]


class Api:
    """The routes, for one model."""

    def __init__(
        self,
        model: TextModel,
        requests: Requests,
        metrics: GatewayMetrics,
        log: Logger,
        *,
        body_limits: BodyLimits,
        write_timeout_s: float,
    ) -> None:
        self._model = model
        self._requests = requests
        self._metrics = metrics
        self._log = log
        self._bodies = BodyReader(body_limits)
        self._write_timeout_s = write_timeout_s
        self._started_at = int(time.time())

    def routes(self) -> tuple[web.RouteDef, ...]:
        return (
            web.post("/v1/chat/completions", self._answered("chat_completions", self._chat)),
            web.post("/v1/completions", self._answered("completions", self._completion)),
            web.get("/v1/models", self._answered("models", self._models)),
            web.get("/v1/models/{model:.+}", self._answered("model", self._model_by_id)),
            web.route("*", "/{path:.*}", self._answered("none", _no_route)),
        )

    def _answered(self, route: str, handle: Handle) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
        """`handle` with everything around it: ids, error bodies, metrics and the log line."""

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

    async def _respond(self, handle: Handle, request: web.Request, call: Call) -> web.StreamResponse:
        try:
            response = await handle(request, call)
        except (ConnectionError, ClientGoneError):
            raise
        except Exception as error:
            call.failure = self._failure(call, error)
            response = _error_response(call.failure)
        if not response.prepared:
            response.headers[REQUEST_ID_HEADER] = call.client_id
        return response

    def _failure(self, call: Call, error: Exception) -> ApiError:
        """What the client is told of it; what nobody expected is logged."""
        if isinstance(error, ApiError):
            return error
        self._log.exception("request failed", error, request_id=call.request_id)
        return ApiError(INTERNAL, "the gateway failed; see its log by the request id")

    def _record(self, call: Call, status: int) -> None:
        self._metrics.requests.labels(call.route, str(status)).inc()
        failure, ending = call.failure, call.ending
        if failure is not None and failure.reason is not None:
            self._metrics.rejected.labels(failure.reason).inc()
        if ending is not None:
            self._metrics.prompt_tokens.inc(ending.prompt_tokens)
            self._metrics.cached_tokens.inc(ending.cached_tokens)
            self._metrics.completion_tokens.inc(ending.completion_tokens)
        fields = {
            "route": call.route,
            "status": status,
            "request_id": call.request_id,
            "client_request_id": call.client_id,
            "trace_id": call.trace.trace_id,
            "elapsed_s": round(asyncio.get_running_loop().time() - call.arrived_at_s, 6),
        }
        if ending is not None:
            fields |= {
                "prompt_tokens": ending.prompt_tokens,
                "cached_tokens": ending.cached_tokens,
                "completion_tokens": ending.completion_tokens,
                "finish_reason": ending.reason.value,
            }
        if failure is not None:
            fields |= {"error": failure.message, "param": failure.param}
        self._log.info("request", **fields)

    async def _chat(self, http: web.Request, call: Call) -> web.StreamResponse:
        with self._requests.admit():
            async with self._bodies.read(http) as body:
                request = request_body.decode_chat(body)
            validate.check_model(request.model, self._model.limits)
            generation = validate.check_chat(request, self._model.limits, _header_lists(http))
            prompt = await self._model.encode_chat(request.messages)
            form = ChatForm(self._header(call, "chatcmpl", generation))
            return await self._generate(http, call, generation, prompt, form)

    async def _completion(self, http: web.Request, call: Call) -> web.StreamResponse:
        with self._requests.admit():
            async with self._bodies.read(http) as body:
                request = request_body.decode_completion(body)
            validate.check_model(request.model, self._model.limits)
            generation = validate.check_completion(request, self._model.limits, _header_lists(http))
            if isinstance(request.prompt, str):
                prompt = await self._model.encode_text(request.prompt)
            else:
                prompt = await self._model.prompt_of(request.prompt)
            form = CompletionForm(self._header(call, "cmpl", generation))
            return await self._generate(http, call, generation, prompt, form)

    def _header(self, call: Call, prefix: str, generation: Generation) -> Header:
        return Header(
            id=f"{prefix}-{call.request_id}",
            created=int(time.time()),
            model=self._model.limits.name,
            include_usage=generation.include_usage,
            return_token_ids=generation.return_token_ids,
        )

    async def _generate(
        self, http: web.Request, call: Call, generation: Generation, prompt: Prompt, form: AnswerForm
    ) -> web.StreamResponse:
        sampling = validate.sampling(generation, prompt.tokens, self._model.limits, secrets.randbits(63))
        order = Order(
            request_id=call.request_id,
            model=self._model.limits.name,
            fingerprint=self._model.fingerprint,
            namespace=self._model.namespace,
            prompt=prompt,
            sampling=sampling,
            trace=call.trace,
            structure_param=generation.structure.param if generation.structure else None,
            urgency=generation.urgency,
        )
        text = AnswerText(
            self._model.token_bytes,
            stop=generation.stop,
            stop_token_ids=sampling.stop_token_ids,
            output_tokens_min=sampling.output_tokens_min,
        )
        with self._requests.run(order, text, arrived_at_s=call.arrived_at_s) as running:
            if generation.stream:
                return await self._stream(http, call, running, form)
            return await self._whole(call, running, form)

    async def _whole(self, call: Call, running: RunningRequest, form: AnswerForm) -> web.StreamResponse:
        texts: list[str] = []
        token_ids: list[int] = []
        while call.ending is None:
            piece = await running.outbox.take()
            texts.append(piece.text)
            token_ids += piece.token_ids
            call.ending = piece.ending
        return _json_response(200, form.whole("".join(texts), token_ids, call.ending))

    async def _stream(
        self, http: web.Request, call: Call, running: RunningRequest, form: AnswerForm
    ) -> web.StreamResponse:
        # Nothing is sent before there is something to say: a refusal can still have its own status.
        piece = await running.outbox.take()
        response = web.StreamResponse(headers=STREAM_HEADERS | {REQUEST_ID_HEADER: call.client_id})
        await response.prepare(http)
        try:
            await self._write(http, response.write(form.opening()))
            while piece.ending is None:
                delta = form.delta(piece.text, piece.token_ids)
                if delta:
                    await self._write(http, response.write(delta))
                piece = await running.outbox.take()
            call.ending = piece.ending
            last = form.delta(piece.text, piece.token_ids)
            await self._write(http, response.write(last + form.closing(piece.ending) + DONE))
        except (ConnectionError, ClientGoneError):
            raise
        except Exception as error:
            call.failure = self._failure(call, error)
            await self._write(http, response.write(error_event(call.failure)))
        await self._write(http, response.write_eof())
        return response

    async def _write(self, http: web.Request, writing: Awaitable[None]) -> None:
        """Waits for a client that reads slowly, but not for ever; meanwhile its outbox fills."""
        try:
            async with asyncio.timeout(self._write_timeout_s):
                await writing
        except TimeoutError:
            if http.transport is not None:
                http.transport.abort()
            raise ClientGoneError(f"the client read nothing for {self._write_timeout_s:g} s") from None

    async def _models(self, _http: web.Request, _call: Call) -> web.StreamResponse:
        return _json_response(200, msgspec.json.encode(ModelList([self._model_object()])))

    async def _model_by_id(self, http: web.Request, _call: Call) -> web.StreamResponse:
        validate.check_model(http.match_info["model"], self._model.limits)
        return _json_response(200, msgspec.json.encode(self._model_object()))

    def _model_object(self) -> ModelObject:
        limits = self._model.limits
        return ModelObject(
            id=limits.name,
            created=self._started_at,
            owned_by="moonpool",
            root=limits.name,
            max_model_len=limits.context_tokens_max,
        )


async def _no_route(http: web.Request, _call: Call) -> web.StreamResponse:
    """Everything that no other route takes: 405 where another method would do, else 404."""
    allowed: set[str] = set()
    for resource in http.app.router.resources():
        _, methods = await resource.resolve(http)
        allowed |= methods
    allowed.discard("*")
    if allowed:
        allow = ", ".join(sorted(allowed))
        message = f"{http.method[:32]} is not allowed on {http.path[:256]}; allowed: {allow}"
        raise ApiError(METHOD_NOT_ALLOWED, message, allow=allow)
    raise ApiError(NOT_FOUND, f"there is nothing at {http.path[:256]}")


def _call(route: str, http: web.Request) -> Call:
    request_id = RequestId(secrets.token_hex(16))
    client_id = http.headers.get(REQUEST_ID_HEADER, "")
    parent = TraceContext.parse(http.headers.get("traceparent", ""))
    return Call(
        route=route,
        request_id=request_id,
        client_id=client_id if _is_request_id(client_id) else request_id,
        trace=TraceContext.new() if parent is None else parent.child(),
        arrived_at_s=asyncio.get_running_loop().time(),
    )


def _is_request_id(text: str) -> bool:
    """What is safe to log and to send back in a header."""
    return 0 < len(text) <= REQUEST_ID_CHARS_MAX and text.isascii() and text.isprintable()


def _header_lists(http: web.Request) -> dict[str, str]:
    """By name in lower case; what is given more than once is a list, as HTTP has it, and no choice of one."""
    names = {name.lower() for name in http.headers}
    return {name: ", ".join(http.headers.getall(name)) for name in names}


def _json_response(status: int, body: bytes, headers: dict[str, str] | None = None) -> web.Response:
    return web.Response(status=status, body=body, content_type="application/json", headers=headers)


def _error_response(error: ApiError) -> web.Response:
    return _json_response(error.kind.status, msgspec.json.encode(error.body()), error.headers())
