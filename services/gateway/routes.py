"""The handlers of the API's operations: from a client's request to its answer.

What a request means is `gateway.validate`'s, what becomes of it `gateway.requests`'s, how the answer is
written `gateway.answering`'s.
"""

import secrets
import time
from collections.abc import Callable

import msgspec
from aiohttp import web

from cluster.logs import Logger
from gateway import request_body, validate
from gateway.answer_forms import AnswerForm, ChatForm, CompletionForm, Header
from gateway.answer_text import AnswerText
from gateway.answer_types import ModelList, ModelObject
from gateway.answering import Answering
from gateway.api_errors import METHOD_NOT_ALLOWED, NOT_FOUND, ApiError
from gateway.calls import Call, Calls, Handle, json_response
from gateway.capacity import Capacity, limits_within
from gateway.http_body import BodyLimits, BodyReader
from gateway.identity import Identity
from gateway.metrics import GatewayMetrics
from gateway.operations import OPERATIONS, OperationName
from gateway.placing import Order
from gateway.prompts import prompts_of
from gateway.requests import Requests
from gateway.tenant_use import TenantUse
from gateway.text import Prompt, TextModel
from gateway.validate import Generation

NO_ROUTE = "none"
"""The route of metrics and log lines for what no operation takes."""


class Api:
    """The routes, for one model."""

    def __init__(
        self,
        model: TextModel,
        requests: Requests,
        metrics: GatewayMetrics,
        log: Logger,
        *,
        capacity: Callable[[], Capacity | None],
        identity: Identity,
        tenants: TenantUse,
        body_limits: BodyLimits,
        write_timeout_s: float,
    ) -> None:
        self._model = model
        self._requests = requests
        self._capacity = capacity
        self._bodies = BodyReader(body_limits)
        self._calls = Calls(metrics, log, identity, tenants)
        self._answering = Answering(self._calls, write_timeout_s=write_timeout_s)
        self._started_at = int(time.time())

    def routes(self) -> tuple[web.RouteDef, ...]:
        handles: dict[OperationName, Handle] = {
            OperationName.CHAT_COMPLETIONS: self._chat,
            OperationName.COMPLETIONS: self._completion,
            OperationName.MODELS: self._models,
            OperationName.MODEL: self._model_by_id,
        }
        return (
            *(
                web.route(
                    each.method,
                    each.path,
                    self._calls.answered(each.name, handles[each.name], needs_key=each.needs_key),
                )
                for each in OPERATIONS
            ),
            web.route("*", "/{path:.*}", self._calls.answered(NO_ROUTE, _no_route, needs_key=False)),
        )

    async def _chat(self, http: web.Request, call: Call) -> web.StreamResponse:
        with self._requests.admit():
            async with self._bodies.read(http) as body:
                request = request_body.decode_chat(body)
            validate.check_model(request.model, self._model.limits)
            generation = validate.check_chat(request, self._model.limits, _header_lists(http))
            await self._model.structures.check(generation.structure)
            prompt = await self._model.encode_chat(request.messages)
            form = ChatForm(self._header(call, "chatcmpl", generation))
            return await self._generate(http, call, generation, prompt, form)

    async def _completion(self, http: web.Request, call: Call) -> web.StreamResponse:
        with self._requests.admit():
            async with self._bodies.read(http) as body:
                request = request_body.decode_completion(body)
            validate.check_model(request.model, self._model.limits)
            generation = validate.check_completion(request, self._model.limits, _header_lists(http))
            await self._model.structures.check(generation.structure)
            given = prompts_of(request, self._model.limits)[0]
            if isinstance(given, str):
                prompt = await self._model.encode_text(given)
            else:
                prompt = await self._model.prompt_of(given)
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
        limits = limits_within(self._capacity(), self._model.limits, generation, prompt.tokens)
        sampling = validate.sampling(generation, prompt.tokens, limits, secrets.randbits(63))
        given = None if generation.output_tokens_max is None else generation.output_tokens_param
        call.reserve(prompt.tokens, sampling.output_tokens_max, given)
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
                return await self._answering.stream(http, call, running, form)
            return await self._answering.whole(call, running, form)

    async def _models(self, _http: web.Request, _call: Call) -> web.StreamResponse:
        return json_response(200, msgspec.json.encode(ModelList([self._model_object()])))

    async def _model_by_id(self, http: web.Request, _call: Call) -> web.StreamResponse:
        validate.check_model(http.match_info["model"], self._model.limits)
        return json_response(200, msgspec.json.encode(self._model_object()))

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


def _header_lists(http: web.Request) -> dict[str, str]:
    """By name in lower case; what is given more than once is a list, as HTTP has it, and no choice of one."""
    names = {name.lower() for name in http.headers}
    return {name: ", ".join(http.headers.getall(name)) for name in names}
