"""The handlers of the API's operations: from a client's request to its answer.

What a request means is `gateway.api.validate`'s, what becomes of it `gateway.answers.requests`'s, how the
answer is written `gateway.answering`'s.
"""

import asyncio
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import msgspec
from aiohttp import web

from cluster.logs import Logger
from gateway.answer_forms import AnswerForm, ChatForm, CompletionForm, Header, RunningUsage
from gateway.answering import Answering, Reply, Voice
from gateway.answers.choices import Choices
from gateway.answers.orders import SEED_BITS, choices_of
from gateway.answers.placing import Order
from gateway.answers.requests import Requests
from gateway.api import request_body, validate
from gateway.api.answer_types import ModelList, ModelObject
from gateway.api.api_errors import METHOD_NOT_ALLOWED, NOT_FOUND, ApiError
from gateway.api.operations import OPERATIONS, OperationName
from gateway.api.prompts import prompts_of
from gateway.api.validate import Generation
from gateway.api_page import ApiPages
from gateway.calls import Call, Calls, Handle, json_response
from gateway.capacity import Capacity, limits_within
from gateway.chat_rendering import template_options
from gateway.http_body import BodyLimits, BodyReader
from gateway.logprobs import TokenNames
from gateway.metrics import GatewayMetrics
from gateway.tenants.identity import Identity
from gateway.tenants.tenant_use import TenantUse
from gateway.text.answer_text import TextRules
from gateway.text.stop_matcher import StopStrings
from gateway.text_model import Prompt, TextModel
from gateway.tokenize_routes import TokenizeRoutes
from gateway.tool_parsers import tool_parser
from kvhash import Namespace
from policy.core import RequestId

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
        keep_alive_s: float,
    ) -> None:
        self._model = model
        self._requests = requests
        self._capacity = capacity
        self._bodies = BodyReader(body_limits)
        metrics.body_bytes.set_function(lambda: self._bodies.held_bytes)
        self._calls = Calls(metrics, log, identity, tenants)
        self._answering = Answering(self._calls, write_timeout_s=write_timeout_s, keep_alive_s=keep_alive_s)
        self._names = TokenNames(model.all_token_bytes)
        self._started_at = int(time.time())

    def routes(self) -> tuple[web.RouteDef, ...]:
        pages = ApiPages(self._model.limits.name)
        tokens = TokenizeRoutes(self._model, self._requests, self._bodies)
        handles: dict[str, Handle] = {
            OperationName.CHAT_COMPLETIONS: self._chat,
            OperationName.COMPLETIONS: self._completion,
            OperationName.MODELS: self._models,
            OperationName.MODEL: self._model_by_id,
            OperationName.TOKENIZE: tokens.tokenize,
            OperationName.DETOKENIZE: tokens.detokenize,
            OperationName.OPENAPI: pages.document,
            OperationName.DOCS: pages.page,
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
        model = self._model
        self._requests.check_room()
        async with self._bodies.read(http) as body:
            request = request_body.decode_chat(body)
        with self._requests.admit():
            validate.check_model(request.model, model.limits)
            generation = validate.check_chat(request, model.limits, _header_lists(http))
            await model.structures.check(generation.structure)
            space = model.space(call.caller.salt(generation.cache_salt))
            options = template_options(request)
            prompt = await model.encode_chat(request.messages, generation.tools, space, options)
            form = ChatForm(self._header(call, "chatcmpl", generation, [prompt]))
            return await self._generate(http, call, generation, [prompt], form)

    async def _completion(self, http: web.Request, call: Call) -> web.StreamResponse:
        model = self._model
        self._requests.check_room()
        async with self._bodies.read(http) as body:
            request = request_body.decode_completion(body)
        with self._requests.admit():
            validate.check_model(request.model, model.limits)
            generation = validate.check_completion(request, model.limits, _header_lists(http))
            await model.structures.check(generation.structure)
            space = model.space(call.caller.salt(generation.cache_salt))
            given = prompts_of(request, model.limits)
            prompts = await self._prompts(given, space)
            echoes = await self._echoes(given, generation)
            header = self._header(call, "cmpl", generation, prompts)
            form = CompletionForm(header, echoes, generation.answers)
            return await self._generate(http, call, generation, prompts, form)

    async def _prompts(self, given: Sequence[str | list[int]], space: Namespace) -> list[Prompt]:
        model = self._model
        prompts: list[Prompt] = []
        for one in given:
            if prompts:
                # What is little is tokenised on the event loop, which goes on in between.
                await asyncio.sleep(0)
            encoding = model.encode_text(one, space) if isinstance(one, str) else model.prompt_of(one, space)
            prompts.append(await encoding)
        return prompts

    async def _echoes(self, given: Sequence[str | list[int]], generation: Generation) -> list[str]:
        if not generation.echo:
            return []
        keep_special = generation.keep_special_tokens
        return [
            one if isinstance(one, str) else await self._model.decode(one, keep_special=keep_special)
            for one in given
        ]

    def _header(self, call: Call, prefix: str, generation: Generation, prompts: Sequence[Prompt]) -> Header:
        prompts_tokens = [prompt.tokens for prompt in prompts]
        running = RunningUsage(prompts_tokens, generation.answers) if generation.continuous_usage else None
        return Header(
            id=f"{prefix}-{call.request_id}",
            created=int(time.time()),
            model=self._model.limits.name,
            include_usage=generation.include_usage,
            return_token_ids=generation.return_token_ids,
            names=None if generation.logprobs is None else self._names,
            running_usage=running,
        )

    async def _generate(
        self,
        http: web.Request,
        call: Call,
        generation: Generation,
        prompts: Sequence[Prompt],
        form: AnswerForm,
    ) -> web.StreamResponse:
        orders = [
            self._order(call, _about(generation, place, len(prompts)), prompt, place * generation.answers)
            for place, prompt in enumerate(prompts)
        ]
        call.reserve(
            sum(prompt.tokens for prompt in prompts),
            generation.answers * sum(order.sampling.output_tokens_max for order in orders),
            None if generation.output_tokens_max is None else generation.output_tokens_param,
        )
        wanted = choices_of(orders, generation.answers)
        rules = self._text_rules(generation)
        with Choices(self._requests, wanted, rules, arrived_at_s=call.arrived_at_s) as choices:
            reply = Reply(call, choices, form, [self._voice(generation) for _ in wanted])
            if generation.stream:
                return await self._answering.stream(http, reply)
            return await self._answering.whole(http, reply)

    def _order(self, call: Call, generation: Generation, prompt: Prompt, index: int) -> Order:
        """For the first answer to a prompt, which is number `index` of all."""
        model, salt = self._model, call.caller.salt(generation.cache_salt)
        limits = limits_within(self._capacity(), model.limits, generation, prompt.tokens)
        return Order(
            request_id=RequestId(f"{call.request_id}.{index}") if index else call.request_id,
            model=model.limits.name,
            fingerprint=model.fingerprint,
            namespace=model.space(salt),
            prompt=prompt,
            sampling=validate.sampling(generation, prompt.tokens, limits, secrets.randbits(SEED_BITS)),
            trace=call.trace,
            structure_param=generation.structure.param if generation.structure else None,
            urgency=generation.urgency,
            tenant=call.caller.tenant,
            salt=salt,
        )

    def _text_rules(self, generation: Generation) -> TextRules:
        model = self._model
        token_bytes = model.token_bytes if generation.tools is None else model.call_token_bytes
        return TextRules(
            model.all_token_bytes if generation.keep_special_tokens else token_bytes,
            StopStrings(generation.stop),
            frozenset(generation.stop_token_ids),
            generation.output_tokens_min,
            log_tokens=generation.logprobs is not None,
        )

    def _voice(self, generation: Generation) -> Voice:
        use = generation.tools
        return Voice(None if use is None else tool_parser(use, self._model.limits.tool_format))

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


def _about(generation: Generation, place: int, prompts: int) -> Generation:
    """What is wrong with one of several prompts is said of that one."""
    if prompts == 1:
        return generation
    return replace(generation, prompt_param=f"{generation.prompt_param}[{place}]")


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
