"""What comes in: the bodies of requests as msgspec structs, with the ranges that hold for every model.

`gateway.api.request_body` decodes into them and `gateway.api.openapi` tells them to clients, so that what is
documented is what is checked. What goes with what, and what depends on the served model, is
`gateway.api.validate`'s. A parameter that is neither a field here nor in one of the NEUTRAL tables does not
exist.
"""

from typing import Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import UNSET, Meta, Raw, Struct, UnsetType

from gateway.api.parameter_limits import (
    CACHE_SALT_CHARS_MAX,
    CHOICES_MAX,
    HINT_CHARS_MAX,
    MESSAGE_CALLS_MAX,
    MESSAGE_PARTS_MAX,
    MESSAGES_MAX,
    METADATA_ENTRIES_MAX,
    PROMPTS_MAX,
    SEED_MAX,
    SEED_MIN,
    STOP_STRING_CHARS_MAX,
    STOP_STRINGS_MAX,
    STRUCTURE_CHOICES_MAX,
    TBT_MS_MAX,
    TBT_MS_MIN,
    TEMPERATURE_MAX,
    TEMPLATE_VARIABLES_MAX,
    TOKEN_ID_DIGITS_MAX,
    TTFT_MS_MAX,
    TTFT_MS_MIN,
)
from gateway.api.tool_types import ToolCall, ToolChoiceParam, Tools
from policy.core import PRIORITY_MAX, PRIORITY_MIN, STRUCTURE_BYTES_MAX
from policy.sampling_limits import (
    LOGIT_BIAS_ENTRIES_MAX,
    LOGIT_BIAS_MAX,
    LOGIT_BIAS_MIN,
    LOGPROBS_MAX,
    PENALTY_MAX,
    PENALTY_MIN,
    REPETITION_PENALTY_MAX,
    REPETITION_PENALTY_MIN,
    STOP_TOKEN_IDS_MAX,
    TOP_K_MAX,
)

Count = Annotated[int, Meta(ge=1)]
Penalty = Annotated[float, Meta(ge=PENALTY_MIN, le=PENALTY_MAX)]
Probability = Annotated[float, Meta(ge=0.0, le=1.0)]
TopLogprobs = Annotated[int, Meta(ge=0, le=LOGPROBS_MAX)]
StopString = Annotated[str, Meta(min_length=1, max_length=STOP_STRING_CHARS_MAX)]
TokenId = Annotated[int, Meta(ge=0)]
StructureText = Annotated[str, Meta(max_length=STRUCTURE_BYTES_MAX)]
StructureChoices = Annotated[list[str], Meta(min_length=1, max_length=STRUCTURE_CHOICES_MAX)]
SchemaJson = Annotated[
    Raw, Meta(extra_json_schema={"description": "A JSON schema, or a string that holds one."})
]
LogitBias = Annotated[
    dict[str, float],
    Meta(
        max_length=LOGIT_BIAS_ENTRIES_MAX,
        extra_json_schema={
            "propertyNames": {"pattern": f"^[0-9]{{1,{TOKEN_ID_DIGITS_MAX}}}$"},
            "additionalProperties": {"type": "number", "minimum": LOGIT_BIAS_MIN, "maximum": LOGIT_BIAS_MAX},
        },
    ),
]
"""By token id, which JSON has as a string. Its entries are `validate`'s, who names the token at fault."""
Nothing = Annotated[list[None], Meta(max_length=0)] | None
"""Null or an empty list."""


class StreamOptions(Struct, forbid_unknown_fields=True):
    """`continuous_usage_stats` is vLLM's: usage so far in every chunk, with `include_usage`."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: Literal[False] | None = None


class TextPart(Struct, forbid_unknown_fields=True):
    """Its type is a field: msgspec would let a tag be left out, there being one kind of part only."""

    type: Literal["text"]
    text: str


Content = str | Annotated[list[TextPart], Meta(min_length=1, max_length=MESSAGE_PARTS_MAX)]


class SystemMessage(Struct, forbid_unknown_fields=True, tag_field="role", tag="system"):
    role: ClassVar[str] = "system"
    content: Content
    name: str | None = None


class DeveloperMessage(Struct, forbid_unknown_fields=True, tag_field="role", tag="developer"):
    role: ClassVar[str] = "developer"
    content: Content
    name: str | None = None


class UserMessage(Struct, forbid_unknown_fields=True, tag_field="role", tag="user"):
    role: ClassVar[str] = "user"
    content: Content
    name: str | None = None


class AssistantMessage(Struct, forbid_unknown_fields=True, tag_field="role", tag="assistant"):
    """An earlier answer: text, calls, or both. From `annotations` on, what answers hold, ours, those of other
    servers or as clients keep them, and nobody has to cut off before sending them back; `parsed` says what
    `content` says and is not read, nor is what was thought before it."""

    role: ClassVar[str] = "assistant"
    content: Content | None = None
    tool_calls: Annotated[list[ToolCall], Meta(max_length=MESSAGE_CALLS_MAX)] | None = None
    name: str | None = None
    annotations: Nothing = None
    audio: None = None
    function_call: None = None
    refusal: None = None
    parsed: Raw | UnsetType = UNSET
    reasoning: str | None = None
    reasoning_content: str | None = None


class ToolMessage(Struct, forbid_unknown_fields=True, tag_field="role", tag="tool"):
    """What the call `tool_call_id` of an earlier assistant message gave."""

    role: ClassVar[str] = "tool"
    content: Content
    tool_call_id: str
    name: str | None = None


TemplateVariables = Annotated[dict[str, Any], Meta(max_length=TEMPLATE_VARIABLES_MAX)]
ChatMessage = SystemMessage | DeveloperMessage | UserMessage | AssistantMessage | ToolMessage


class TextFormat(Struct, forbid_unknown_fields=True, tag_field="type", tag="text"):
    pass


class JsonObjectFormat(Struct, forbid_unknown_fields=True, tag_field="type", tag="json_object"):
    pass


class JsonSchema(Struct, forbid_unknown_fields=True):
    """The answer is held to the schema whatever `strict` says."""

    schema: SchemaJson
    name: str | None = None
    description: str | None = None
    strict: bool | None = None


class JsonSchemaFormat(Struct, forbid_unknown_fields=True, tag_field="type", tag="json_schema"):
    json_schema: JsonSchema


ResponseFormat = TextFormat | JsonObjectFormat | JsonSchemaFormat


class StructuredOutputs(Struct, forbid_unknown_fields=True):
    """vLLM's form of it; one of these is given."""

    json: SchemaJson = msgspec.field(default_factory=Raw)
    regex: StructureText | None = None
    choice: StructureChoices | None = None
    grammar: StructureText | None = None
    json_object: bool | None = None


Hint = Annotated[str, Meta(max_length=HINT_CHARS_MAX)]
"""What a client says of its request to whom it may concern: nothing depends on it."""


class GenerationRequest(Struct, kw_only=True):
    """What chat and text completions have in common. Fields that are not here are passed over, for
    `gateway.api.request_body` looks at all names before."""

    model: str
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Annotated[int, Meta(ge=1, le=CHOICES_MAX)] | None = None
    max_tokens: Count | None = None
    min_tokens: Annotated[int, Meta(ge=0)] | None = None
    temperature: Annotated[float, Meta(ge=0.0, le=TEMPERATURE_MAX)] | None = None
    top_p: Annotated[float, Meta(gt=0.0, le=1.0)] | None = None
    top_k: Annotated[int, Meta(ge=-1, le=TOP_K_MAX)] | None = None
    min_p: Probability | None = None
    repetition_penalty: (
        Annotated[float, Meta(ge=REPETITION_PENALTY_MIN, le=REPETITION_PENALTY_MAX)] | None
    ) = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    logit_bias: LogitBias | None = None
    seed: Annotated[int, Meta(ge=SEED_MIN, le=SEED_MAX)] | None = None
    stop: StopString | Annotated[list[StopString], Meta(max_length=STOP_STRINGS_MAX)] | None = None
    stop_token_ids: Annotated[list[TokenId], Meta(max_length=STOP_TOKEN_IDS_MAX)] | None = None
    ignore_eos: bool | None = None
    return_token_ids: bool | None = None
    skip_special_tokens: bool | None = None
    priority: Annotated[int, Meta(ge=PRIORITY_MIN, le=PRIORITY_MAX)] | None = None
    ttft_ms_max: Annotated[float, Meta(ge=TTFT_MS_MIN, le=TTFT_MS_MAX)] | None = None
    tbt_ms_max: Annotated[float, Meta(ge=TBT_MS_MIN, le=TBT_MS_MAX)] | None = None
    user: Hint | None = None
    safety_identifier: Hint | None = None
    prompt_cache_key: Hint | None = None
    metadata: Annotated[dict[str, Hint], Meta(max_length=METADATA_ENTRIES_MAX)] | None = None
    cache_salt: Annotated[str, Meta(max_length=CACHE_SALT_CHARS_MAX)] | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: SchemaJson = msgspec.field(default_factory=Raw)
    guided_regex: StructureText | None = None
    guided_choice: StructureChoices | None = None
    guided_grammar: StructureText | None = None


class ChatRequest(GenerationRequest, kw_only=True):
    messages: Annotated[list[ChatMessage], Meta(min_length=1, max_length=MESSAGES_MAX)]
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: TopLogprobs | None = None
    tools: Tools | None = None
    tool_choice: ToolChoiceParam | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: TemplateVariables | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None


TOKEN_ID_SCHEMA = {"type": "integer", "minimum": 0}
PROMPT_SCHEMA = {
    "description": "A text, the ids of its tokens, or a list of either.",
    "anyOf": [
        {"type": "string"},
        {"type": "array", "items": {"type": "string"}, "minItems": 1, "maxItems": PROMPTS_MAX},
        {"type": "array", "items": TOKEN_ID_SCHEMA, "minItems": 1},
        {
            "type": "array",
            "items": {"type": "array", "items": TOKEN_ID_SCHEMA, "minItems": 1},
            "minItems": 1,
            "maxItems": PROMPTS_MAX,
        },
    ],
}
PromptJson = Annotated[Raw, Meta(extra_json_schema=PROMPT_SCHEMA)]
"""Read by `gateway.api.prompts`, which counts before it makes objects: a body may hold millions of them."""


class CompletionRequest(GenerationRequest, kw_only=True):
    prompt: PromptJson
    best_of: Annotated[int, Meta(ge=1, le=CHOICES_MAX)] | None = None
    echo: bool | None = None
    logprobs: TopLogprobs | None = None


class TokenizeRequest(Struct, kw_only=True):
    """A text or a conversation, one of them."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[ChatMessage], Meta(min_length=1, max_length=MESSAGES_MAX)] | None = None
    tools: Tools | None = None
    chat_template_kwargs: TemplateVariables | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(Struct, kw_only=True):
    """`tokens` are read by `gateway.api.prompts`, like a prompt."""

    model: str | None = None
    tokens: Annotated[Raw, Meta(extra_json_schema={"type": "array", "items": TOKEN_ID_SCHEMA})]
