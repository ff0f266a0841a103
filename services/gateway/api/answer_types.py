"""What goes out: answers, their pieces, models and errors in the shapes of OpenAI's API, as msgspec structs.

Names and types only; `gateway.api.openapi` tells them to clients.
"""

from typing import Literal

from msgspec import UNSET, Struct, UnsetType

from gateway.api.tool_types import ToolCall, ToolCallDelta

TokenIds = list[int] | UnsetType
"""The tokens of an answer or of a piece of it, for clients that asked with `return_token_ids`."""


class PromptTokensDetails(Struct):
    cached_tokens: int


class Usage(Struct):
    """What was cached is known at the end: while an answer goes on there are no details."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails | UnsetType = UNSET


class TopLogprob(Struct):
    """`bytes` are the token's in UTF-8, which alone need not be whole characters."""

    token: str
    logprob: float
    bytes: list[int] | None


class TokenLogprob(Struct):
    """`logprob` is null where nobody knows it any more: of a token that an instance which was lost had
    sent."""

    token: str
    logprob: float | None
    bytes: list[int] | None
    top_logprobs: list[TopLogprob]


class ChatLogprobs(Struct):
    """One entry for each token of the text that is sent with them."""

    content: list[TokenLogprob]
    refusal: None = None


class CompletionLogprobs(Struct):
    """Lists of one length: an entry for each token. `text_offset` in characters from the text's beginning;
    of an entry of `top_logprobs` the keys are tokens."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None] | None
    text_offset: list[int]


class AnswerMessage(Struct, tag_field="role", tag="assistant"):
    """`content` is null where the answer is calls only."""

    content: str | None
    refusal: None = None
    tool_calls: list[ToolCall] | UnsetType = UNSET


class ChatChoice(Struct):
    index: int
    message: AnswerMessage
    finish_reason: str
    logprobs: ChatLogprobs | None = None
    token_ids: TokenIds = UNSET


class ChatCompletion(Struct, tag_field="object", tag="chat.completion"):
    id: str
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage


class ChatDelta(Struct, omit_defaults=True):
    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType | None = UNSET
    tool_calls: list[ToolCallDelta] | UnsetType = UNSET


class ChatChunkChoice(Struct):
    index: int
    delta: ChatDelta
    finish_reason: str | None = None
    logprobs: ChatLogprobs | None = None
    token_ids: TokenIds = UNSET


class ChatChunk(Struct, tag_field="object", tag="chat.completion.chunk"):
    """`usage` is absent unless the client asked for it, then null in all chunks but the last."""

    id: str
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: Usage | UnsetType | None = UNSET


class TextChoice(Struct):
    index: int
    text: str
    finish_reason: str | None = None
    logprobs: CompletionLogprobs | None = None
    token_ids: TokenIds = UNSET


class TextCompletion(Struct, tag_field="object", tag="text_completion"):
    """A whole text completion, and each chunk of a streamed one."""

    id: str
    created: int
    model: str
    choices: list[TextChoice]
    usage: Usage | UnsetType | None = UNSET


class TokenizeResponse(Struct):
    """`token_strs` for clients that asked with `return_token_strs`, else null."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeResponse(Struct):
    prompt: str


class ModelObject(Struct, tag_field="object", tag="model"):
    id: str
    created: int
    owned_by: str
    root: str
    max_model_len: int


class ModelList(Struct, tag_field="object", tag="list"):
    data: list[ModelObject]


class ErrorObject(Struct):
    """`reason` is there where the cluster refused: which of its limits or targets, in one word."""

    message: str
    type: str
    param: str | None = None
    code: str | None = None
    reason: str | UnsetType = UNSET


class ErrorBody(Struct):
    error: ErrorObject
