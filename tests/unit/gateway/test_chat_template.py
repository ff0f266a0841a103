"""Conversations with tools as templates see them: as transformers renders them, or told in our words."""

import json
import threading

import msgspec
import pytest
from tests.unit.gateway import chat_templates
from tests.unit.gateway.model_files import byte_level_tokenizer, write_model_folder

from gateway.api.request_types import ChatMessage
from gateway.api.tools import Tool, ToolChoice, ToolUse
from gateway.chat_messages import content_chars, plain_messages, told_in_words
from gateway.chat_rendering import AS_USUAL, TemplateOptions
from gateway.model_folder import load_model_folder
from gateway.text.call_layouts import ToolFormat
from gateway.text.chat_template import ChatTemplate
from gateway.text_model import RENDERED_AT_ONCE_CHARS_MAX, TextModel, unpack_token_ids

pytestmark = pytest.mark.unit

SPECIAL_TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}
WEATHER = Tool(
    "get_weather",
    "The weather <in> a city; Wörter.",
    '{"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}',
)
USE = ToolUse((WEATHER, Tool("now", None, '{"type":"object","properties":{}}')), ToolChoice.AUTO)
CALL = {
    "id": "call_0123456789abcdef",
    "type": "function",
    "function": {"name": "get_weather", "arguments": '{"city": "Köln", "days": [1, 2]}'},
}
CONVERSATION = [
    {"role": "system", "content": "Be short."},
    {"role": "user", "content": "Weather in Köln?"},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": CALL["id"], "content": '{"degrees": 7}'},
    {"role": "user", "content": [{"type": "text", "text": "And"}, {"type": "text", "text": "now?"}]},
]


def messages_of(conversation: list[dict[str, object]]) -> list[ChatMessage]:
    return msgspec.convert(conversation, list[ChatMessage])


def as_transformers_has_it(conversation: list[dict[str, object]]) -> list[dict[str, object]]:
    """What a user of transformers would write: arguments parsed, texts whole."""
    written = json.loads(json.dumps(conversation))
    for message in written:
        for call in message.get("tool_calls") or ():
            call["function"]["arguments"] = json.loads(call["function"]["arguments"])
        if isinstance(message["content"], list):
            message["content"] = "\n".join(part["text"] for part in message["content"])
        message["content"] = message["content"] or ""
    return written


@pytest.mark.parametrize("source", [chat_templates.QWEN, chat_templates.QWEN3, chat_templates.LLAMA3])
@pytest.mark.parametrize("tools", [USE.template_tools, None])
def test_a_conversation_with_tools_equals_transformers(source: str, tools: list[dict] | None) -> None:
    transformers = pytest.importorskip("transformers")
    reference = transformers.PreTrainedTokenizerFast(
        tokenizer_object=byte_level_tokenizer(), **SPECIAL_TOKENS
    )
    expected = reference.apply_chat_template(
        as_transformers_has_it(CONVERSATION),
        tools=tools,
        chat_template=source,
        add_generation_prompt=True,
        tokenize=False,
    )
    template = ChatTemplate(source, SPECIAL_TOKENS)
    assert template.knows_tools
    assert template.render(plain_messages(messages_of(CONVERSATION), template.tool_format), tools) == expected
    assert '{"city": "Köln", "days": [1, 2]}' in expected
    assert ("<in> a city; Wörter." in expected) == (tools is not None)


def test_mistrals_template_gets_ids_that_it_takes() -> None:
    template = ChatTemplate(chat_templates.MISTRAL, SPECIAL_TOKENS)
    rendered = template.render(
        plain_messages(messages_of(CONVERSATION[1:]), template.tool_format), USE.template_tools
    )
    assert '[TOOL_CALLS][{"name": "get_weather", "arguments": {"city": "Köln", "days": [1, 2]}' in rendered
    assert rendered.count("789abcdef") == 2, "a call and its result keep one id"
    short = CALL | {"id": "c_1"}
    conversation = [CONVERSATION[1] | {}, CONVERSATION[2] | {"tool_calls": [short]}]
    assert '"id": "0000000c1"' in template.render(
        plain_messages(messages_of(conversation), template.tool_format)
    )


@pytest.mark.parametrize(
    ("source", "knows_tools", "tool_format"),
    [
        (chat_templates.QWEN, True, ToolFormat.HERMES),
        (chat_templates.QWEN3, True, ToolFormat.HERMES),
        (chat_templates.LLAMA3, True, ToolFormat.LLAMA3_JSON),
        (chat_templates.MISTRAL, True, ToolFormat.MISTRAL),
        (
            "{% for tool in tools %}{% endfor %}{{ '[TOOL_CALLS]' + name + '[ARGS]' }}",
            True,
            ToolFormat.MISTRAL_ARGS,
        ),
        (chat_templates.CHATML, False, ToolFormat.HERMES),
        # Names a marker and has a variable of the name, but reads no tools.
        ("{% set tools = 1 %}{{ messages[0].tools }} [TOOL_CALLS]", False, ToolFormat.HERMES),
    ],
)
def test_the_format_is_known_by_the_template(source: str, knows_tools: bool, tool_format: ToolFormat) -> None:
    template = ChatTemplate(source, SPECIAL_TOKENS)
    assert (template.knows_tools, template.tool_format) == (knows_tools, tool_format)


def test_told_in_words() -> None:
    second = {**CALL, "id": "call_2", "function": {"name": "now", "arguments": ""}}
    conversation = [
        *CONVERSATION[:2],
        {"role": "assistant", "content": "I look.", "tool_calls": [CALL, second]},
        {"role": "tool", "tool_call_id": CALL["id"], "content": "7 degrees"},
        {"role": "tool", "tool_call_id": "call_2", "content": "noon"},
        {"role": "assistant", "content": "Cold."},
        {"role": "tool", "tool_call_id": "call_2", "content": "late"},
    ]
    plain = plain_messages(messages_of(conversation), ToolFormat.HERMES)
    told = told_in_words(plain, USE.template_tools)
    assert [message["role"] for message in told] == [
        *("system", "user", "assistant", "user", "assistant", "user")
    ]
    signatures = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in USE.template_tools)
    assert told[0]["content"].startswith("Be short.\n\n# Tools\n")
    assert f"<tools>\n{signatures}\n</tools>" in told[0]["content"]
    assert (
        '<tool_call>\n{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call>'
        in (told[0]["content"])
    )
    assert told[2]["content"] == (
        "I look.\n"
        '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Köln", "days": [1, 2]}}\n</tool_call>\n'
        '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
    )
    assert told[3]["content"] == (
        "<tool_response>\n7 degrees\n</tool_response>\n<tool_response>\nnoon\n</tool_response>"
    )
    assert told[5]["content"] == "<tool_response>\nlate\n</tool_response>"
    assert all("tool_calls" not in message for message in told)


def test_told_in_words_without_a_system_message_and_without_tools() -> None:
    plain = plain_messages(messages_of(CONVERSATION[1:2]), ToolFormat.HERMES)
    told = told_in_words(plain, USE.template_tools)
    assert [message["role"] for message in told] == ["system", "user"]
    assert told[0]["content"].startswith("# Tools\n")
    assert told_in_words(plain, []) == plain


@pytest.mark.parametrize("arguments", ["{", "[1]", "7", "null", '{"a": 1} x', "[" * 100_000])
def test_arguments_that_were_cut_are_told_as_they_are(arguments: str) -> None:
    call = {**CALL, "function": {"name": "now", "arguments": arguments}}
    conversation = [*CONVERSATION[:2], {"role": "assistant", "tool_calls": [CALL, call]}]
    plain = plain_messages(messages_of(conversation), ToolFormat.HERMES)
    assert plain[2]["tool_calls"][1]["function"] == {"name": "now", "arguments": arguments}
    assert arguments in json.loads(told_in_words(plain, [])[2]["content"].split("\n")[-2])["arguments"]


def test_calls_count_for_the_length() -> None:
    assert [content_chars(message) for message in messages_of(CONVERSATION)] == [9, 16, 32, 14, 7]


@pytest.mark.parametrize("source", [chat_templates.QWEN, chat_templates.CHATML])
async def test_a_model_is_told_of_tools_only_where_they_are_given(tmp_path, source: str) -> None:
    model = TextModel(
        load_model_folder(write_model_folder(tmp_path, template=source), "tiny", "float32"), b"s"
    )
    tokenizer = byte_level_tokenizer()
    with_tools = await model.encode_chat(messages_of(CONVERSATION), USE)
    text = tokenizer.decode(unpack_token_ids(with_tools.token_ids), skip_special_tokens=False)
    assert '<tools>\n{"type": "function", "function": {"name": "get_weather"' in text
    assert "<tool_response>\n" in text
    without = await model.encode_chat(messages_of(CONVERSATION))
    text = tokenizer.decode(unpack_token_ids(without.token_ids), skip_special_tokens=False)
    assert "<tools>" not in text
    assert text.startswith("<|im_start|>system\nBe short.<|im_end|>\n")
    model.close()


@pytest.mark.parametrize(
    ("tools", "options", "at_once"),
    [
        (None, AS_USUAL, True),
        (USE, AS_USUAL, True),
        (ToolUse((Tool("f", "d" * RENDERED_AT_ONCE_CHARS_MAX, "{}"),), ToolChoice.AUTO), AS_USUAL, False),
        (None, TemplateOptions(variables={"times": 1}), False),
    ],
)
async def test_only_what_is_little_is_rendered_on_the_event_loop(
    tmp_path, monkeypatch, tools: ToolUse | None, options: TemplateOptions, at_once: bool
) -> None:
    """Tools count, and variables may make a template write anything."""
    threads: list[threading.Thread] = []
    render = ChatTemplate.render

    def rendered(self: ChatTemplate, *arguments: object, **named: object) -> str:
        threads.append(threading.current_thread())
        return render(self, *arguments, **named)

    monkeypatch.setattr(ChatTemplate, "render", rendered)
    model = TextModel(load_model_folder(write_model_folder(tmp_path), "tiny", "float32"), b"s")
    await model.encode_chat(messages_of(CONVERSATION[1:2]), tools, options=options)
    assert [thread is threading.main_thread() for thread in threads] == [at_once]
    model.close()
