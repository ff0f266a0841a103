"""Texts and conversations as tokens, and back: `/tokenize` and `/detokenize`, in vLLM's shapes.

What they tell is what a generation would be given: the same checks, template and tokenizer. Nothing is
placed for them.
"""

import msgspec
from aiohttp import web

from gateway.answers.requests import Requests
from gateway.api import request_body
from gateway.api.answer_types import DetokenizeResponse, TokenizeResponse
from gateway.api.prompts import tokens_of
from gateway.api.request_types import TokenizeRequest
from gateway.api.tools import offered
from gateway.api.validate import check_model
from gateway.calls import Call, json_response
from gateway.chat_rendering import template_options
from gateway.http_body import BodyReader
from gateway.text_model import Prompt, TextModel


class TokenizeRoutes:
    def __init__(self, model: TextModel, requests: Requests, bodies: BodyReader) -> None:
        self._model = model
        self._requests = requests
        self._bodies = bodies

    async def tokenize(self, http: web.Request, _call: Call) -> web.StreamResponse:
        self._requests.check_room()
        async with self._bodies.read(http) as body:
            request = request_body.decode_tokenize(body)
        with self._requests.admit():
            self._check_model(request.model)
            prompt = await self._prompt(request)
            token_ids, token_strs = await self._model.tokens_of(
                prompt, spelled=bool(request.return_token_strs)
            )
            told = TokenizeResponse(
                len(token_ids), self._model.limits.context_tokens_max, token_ids, token_strs
            )
            return json_response(200, msgspec.json.encode(told))

    async def detokenize(self, http: web.Request, _call: Call) -> web.StreamResponse:
        """Special tokens are told by their names: the text of a whole prompt, put into `/tokenize`, is that
        prompt again."""
        self._requests.check_room()
        async with self._bodies.read(http) as body:
            request = request_body.decode_detokenize(body)
        with self._requests.admit():
            self._check_model(request.model)
            token_ids = tokens_of(request, self._model.limits)
            text = await self._model.decode(token_ids, keep_special=True)
            return json_response(200, msgspec.json.encode(DetokenizeResponse(text)))

    async def _prompt(self, request: TokenizeRequest) -> Prompt:
        """Templates write special tokens themselves: a conversation gets no more unless it asks for them."""
        special = request.add_special_tokens
        if request.messages is None:
            assert request.prompt is not None, "one of both is there"
            return await self._model.encode_text(request.prompt, add_special_tokens=special is not False)
        return await self._model.encode_chat(
            request.messages,
            offered(request.tools),
            options=template_options(request),
            add_special_tokens=bool(special),
        )

    def _check_model(self, name: str | None) -> None:
        if name is not None:
            check_model(name, self._model.limits)
