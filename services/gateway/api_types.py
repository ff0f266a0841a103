"""The shapes of OpenAI's API: what comes in and what goes out, as msgspec structs.

Owns names and types only; ranges and what goes with what are `gateway.validate`'s. A parameter that is
neither a field here nor in one of the NEUTRAL tables does not exist.
"""

from typing import Annotated, Literal

from msgspec import UNSET, Meta, Raw, Struct, UnsetType

Neutral = dict[str, tuple[object, ...]]
"""Parameters that are not supported yet, with the values at which they ask for nothing."""


TokenIds = list[int] | UnsetType
"""The tokens of an answer or of a piece of it, for clients that asked with `return_token_ids`."""


class StreamOptions(Struct, forbid_unknown_fields=True):
    include_usage: bool | None = None
    include_obfuscation: Literal[False] | None = None


class TextPart(Struct, forbid_unknown_fields=True, tag_field="type", tag="text"):
    text: str


class TextFormat(Struct, forbid_unknown_fields=True, tag_field="type", tag="text"):
    pass


class JsonObjectFormat(Struct, forbid_unknown_fields=True, tag_field="type", tag="json_object"):
    pass


class JsonSchema(Struct, forbid_unknown_fields=True):
    """The answer is held to the schema whatever `strict` says."""

    schema: Raw
    name: str | None = None
    description: str | None = None
    strict: bool | None = None


class JsonSchemaFormat(Struct, forbid_unknown_fields=True, tag_field="type", tag="json_schema"):
    json_schema: JsonSchema


ResponseFormat = TextFormat | JsonObjectFormat | JsonSchemaFormat


class StructuredOutputs(Struct, forbid_unknown_fields=True):
    """vLLM's form of it; one of these is given."""

    json: Raw = Raw()
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None


Nothing = Annotated[list[None], Meta(max_length=0)] | None
"""Null or an empty list."""


class ChatMessage(Struct, forbid_unknown_fields=True):
    """From `annotations` on, what our answers hold and nobody has to cut off before sending them back."""

    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[TextPart]
    name: str | None = None
    annotations: Nothing = None
    audio: None = None
    function_call: None = None
    refusal: None = None
    tool_calls: Nothing = None


class GenerationRequest(Struct, kw_only=True):
    """What chat and text completions have in common. Fields that are not here are passed over, for
    `gateway.validate` looks at all names before."""

    model: str
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    return_token_ids: bool | None = None
    priority: int | None = None
    ttft_ms_max: float | None = None
    tbt_ms_max: float | None = None
    user: str | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: Raw = Raw()
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None


class ChatRequest(GenerationRequest, kw_only=True):
    messages: list[ChatMessage]
    max_completion_tokens: int | None = None


class CompletionRequest(GenerationRequest, kw_only=True):
    prompt: str | list[int]


_GENERATION_NEUTRAL: Neutral = {
    "metadata": (None, {}),
    "n": (None, 1),
    "service_tier": (None, "auto", "default"),
    "skip_special_tokens": (None, True),
}

CHAT_NEUTRAL: Neutral = _GENERATION_NEUTRAL | {
    "audio": (None,),
    "function_call": (None, "none"),
    "functions": (None, []),
    "logprobs": (None, False),
    "modalities": (None, ["text"]),
    "parallel_tool_calls": (None, True, False),
    "prediction": (None,),
    "reasoning_effort": (None,),
    "store": (None, False),
    "tool_choice": (None, "none"),
    "tools": (None, []),
    "top_logprobs": (None, 0),
    "web_search_options": (None,),
}

COMPLETION_NEUTRAL: Neutral = _GENERATION_NEUTRAL | {
    "best_of": (None, 1),
    "echo": (None, False),
    "logprobs": (None,),
    "suffix": (None, ""),
}


class PromptTokensDetails(Struct):
    cached_tokens: int


class Usage(Struct):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class AssistantMessage(Struct, tag_field="role", tag="assistant"):
    content: str
    refusal: None = None


class ChatChoice(Struct):
    index: int
    message: AssistantMessage
    finish_reason: str
    logprobs: None = None
    token_ids: TokenIds = UNSET


class ChatCompletion(Struct, tag_field="object", tag="chat.completion"):
    id: str
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage


class ChatDelta(Struct, omit_defaults=True):
    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType = UNSET


class ChatChunkChoice(Struct):
    index: int
    delta: ChatDelta
    finish_reason: str | None = None
    logprobs: None = None
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
    logprobs: None = None
    token_ids: TokenIds = UNSET


class TextCompletion(Struct, tag_field="object", tag="text_completion"):
    """A whole text completion, and each chunk of a streamed one."""

    id: str
    created: int
    model: str
    choices: list[TextChoice]
    usage: Usage | UnsetType | None = UNSET


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
