"""Tools through the HTTP API, in front of a scripted cluster: whole and streamed, called, forced and not."""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from tests.unit.gateway import chat_templates
from tests.unit.gateway.fake_cluster import Cluster, chat_body, running_cluster
from tests.unit.gateway.model_files import byte_level_tokenizer, write_model_folder
from tokenizers import Tokenizer

from gateway.text.detokenizer import Detokenizer, TokenBytes
from gateway.text_model import unpack_token_ids
from policy.core import StructureKind

pytestmark = pytest.mark.unit

CHAT = "/v1/chat/completions"
MARKER = "[TOOL_CALLS]"
CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS = [
    {"type": "function", "function": {"name": "weather", "description": "Of a city.", "parameters": CITY}},
    {"type": "function", "function": {"name": "now"}},
]
ARGUMENTS = '{"city": "Köln 🙂"}'
CALL = f'<tool_call>\n{{"name": "weather", "arguments": {ARGUMENTS}}}\n</tool_call>'
NAMED = {"type": "function", "function": {"name": "weather"}}


def tokenizer() -> Tokenizer:
    """With a marker of calls that is a special token, as Mistral's."""
    made = Tokenizer.from_str(byte_level_tokenizer().to_str())
    made.add_special_tokens([MARKER])
    return made


def ids(text: str) -> list[int]:
    return tokenizer().encode(text, add_special_tokens=False).ids


def model_folder(folder: Path, template: str) -> Path:
    write_model_folder(folder, template=template)
    tokenizer().save(str(folder / "tokenizer.json"))
    config = json.loads((folder / "config.json").read_text())
    config["max_position_embeddings"] = 8192
    config["vocab_size"] = tokenizer().get_vocab_size()
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture
async def cluster(tmp_path) -> AsyncIterator[Cluster]:
    async with running_cluster(model_folder(tmp_path, chat_templates.CHATML)) as running:
        yield running


@pytest.fixture
async def mistral(tmp_path) -> AsyncIterator[Cluster]:
    async with running_cluster(model_folder(tmp_path, chat_templates.MISTRAL)) as running:
        yield running


async def answered(cluster: Cluster, text: str, **parameters: object) -> dict[str, object]:
    """The one choice of a whole answer, whose model says `text`."""
    asking = asyncio.create_task(cluster.chat(**parameters))
    submit = await cluster.prefill.submits.get()
    await cluster.decode.say(submit, ids(text))
    status, answer = await asking
    assert status == 200, answer
    (choice,) = answer["choices"]
    return choice


async def streamed(cluster: Cluster, text: str, **parameters: object) -> list[dict[str, object]]:
    """The choices of a stream's chunks."""
    asking = asyncio.create_task(cluster.post(CHAT, chat_body(stream=True, **parameters)))
    submit = await cluster.prefill.submits.get()
    await cluster.decode.say(submit, ids(text))
    reply = await asking
    assert reply.status == 200
    *events, done = [event.removeprefix("data: ") for event in reply.text.split("\n\n") if event]
    assert done == "[DONE]"
    return [choice for event in events for choice in json.loads(event)["choices"]]


def put_together(choices: list[dict[str, object]]) -> dict[str, object]:
    """A message as clients build it of a stream."""
    message: dict[str, object] = {"content": None}
    calls: list[dict[str, object]] = []
    for choice in choices:
        delta = choice["delta"]
        if delta.get("content"):
            message["content"] = (message["content"] or "") + delta["content"]
        for part in delta.get("tool_calls") or ():
            if part["index"] == len(calls):
                assert part["id"]
                assert part["type"] == "function"
                calls.append({"name": part["function"]["name"], "arguments": ""})
            assert part["index"] == len(calls) - 1
            calls[-1]["arguments"] += part["function"]["arguments"]
    return message | ({"calls": calls} if calls else {})


def calls_of(choice: dict[str, object]) -> list[tuple[str, str]]:
    calls = choice["message"].get("tool_calls") or []
    return [(call["function"]["name"], call["function"]["arguments"]) for call in calls]


async def test_a_model_that_knows_no_tools_is_told_of_them_and_calls(cluster) -> None:
    asking = asyncio.create_task(cluster.chat(tools=TOOLS))
    submit = await cluster.prefill.submits.get()
    prompt = tokenizer().decode(unpack_token_ids(submit.work.prompt_token_ids), skip_special_tokens=False)
    assert prompt.startswith("<|im_start|>system\n# Tools\n")
    assert '{"name": "weather", "description": "Of a city.", "parameters": {' in prompt
    assert submit.work.sampling.structure is None
    await cluster.decode.say(submit, ids(f"I look.\n{CALL}\n{CALL}"))
    status, answer = await asking
    assert status == 200
    (choice,) = answer["choices"]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] == "I look."
    assert calls_of(choice) == [("weather", ARGUMENTS)] * 2
    first, second = choice["message"]["tool_calls"]
    assert first["type"] == "function"
    assert first["id"] != second["id"]


async def test_calls_alone_have_no_content(cluster) -> None:
    choice = await answered(cluster, CALL, tools=TOOLS, tool_choice="auto")
    assert choice["message"]["content"] is None
    assert calls_of(choice) == [("weather", ARGUMENTS)]


@pytest.mark.parametrize("text", ["Hello, no call <tool_call>.", f"{CALL}", f"Well: {CALL} And {CALL} so."])
async def test_a_stream_put_together_is_the_whole_answer(cluster, text: str) -> None:
    choices = await streamed(cluster, text, tools=TOOLS)
    whole = await answered(cluster, text, tools=TOOLS)
    message = put_together(choices)
    assert message["content"] == whole["message"]["content"]
    assert [(call["name"], call["arguments"]) for call in message.get("calls", ())] == calls_of(whole)
    assert choices[-1]["finish_reason"] == whole["finish_reason"]
    assert all(choice["finish_reason"] is None for choice in choices[:-1])


async def test_arguments_come_as_they_are_written(cluster) -> None:
    """Their beginning is read before the model has said their end."""
    token_ids = ids(CALL)
    begun = ids(CALL[: CALL.index("Köln")])
    assert token_ids[: len(begun)] == begun
    body = chat_body(stream=True, tools=TOOLS)
    async with asyncio.timeout(10):
        asking = asyncio.ensure_future(cluster.session.post(cluster.url + CHAT, json=body))
        submit = await cluster.prefill.submits.get()
        await cluster.decode.tokens(submit, begun, 0)
        reply = await asking
        seen = b""
        while b'"arguments":"{\\"city\\"' not in seen:
            seen += await reply.content.readany()
        await cluster.decode.tokens(submit, token_ids[len(begun) :], len(begun))
        await cluster.decode.finish(submit, len(token_ids))
        seen += await reply.content.read()
    deltas = [
        part
        for event in seen.decode().split("\n\n")
        if event.startswith("data: {")
        for choice in json.loads(event.removeprefix("data: "))["choices"]
        for part in choice["delta"].get("tool_calls") or ()
    ]
    assert "".join(part["function"]["arguments"] for part in deltas) == ARGUMENTS
    assert [sorted(part) for part in deltas] == [
        ["function", "id", "index", "type"],
        *[["function", "index"]] * (len(deltas) - 1),
    ]


async def test_without_tools_nothing_is_a_call(cluster) -> None:
    for parameters in ({}, {"tools": TOOLS, "tool_choice": "none"}):
        choice = await answered(cluster, CALL, **parameters)
        assert choice["message"]["content"] == CALL
        assert choice["message"].get("tool_calls") is None
        assert choice["finish_reason"] == "stop"


async def test_one_call_at_most_where_no_more_are_wanted(cluster) -> None:
    text = f"{CALL}\n{CALL}"
    choice = await answered(cluster, text, tools=TOOLS, parallel_tool_calls=False)
    assert calls_of(choice) == [("weather", ARGUMENTS)]
    assert choice["finish_reason"] == "tool_calls"


async def test_a_named_function_is_called_with_what_the_model_says(cluster) -> None:
    asking = asyncio.create_task(cluster.chat(tools=TOOLS, tool_choice=NAMED))
    submit = await cluster.prefill.submits.get()
    structure = submit.work.sampling.structure
    assert structure is not None
    assert structure.kind is StructureKind.JSON_SCHEMA
    assert json.loads(structure.text) == CITY
    await cluster.decode.say(submit, ids(ARGUMENTS))
    (choice,) = (await asking)[1]["choices"]
    assert calls_of(choice) == [("weather", ARGUMENTS)]
    assert choice["message"]["content"] is None
    assert choice["finish_reason"] == "stop"


async def test_a_required_call_comes_from_a_list(cluster) -> None:
    text = f'[{{"name": "weather", "arguments": {ARGUMENTS}}}, {{"name": "now", "arguments": {{}}}}]'
    choice = await answered(cluster, text, tools=TOOLS, tool_choice="required")
    assert calls_of(choice) == [("weather", ARGUMENTS), ("now", "{}")]
    assert choice["finish_reason"] == "tool_calls"
    message = put_together(await streamed(cluster, text, tools=TOOLS, tool_choice="required"))
    assert [(call["name"], call["arguments"]) for call in message["calls"]] == calls_of(choice)


async def test_a_marker_that_is_a_special_token_is_seen(mistral) -> None:
    text = f'Well. {MARKER}[{{"name": "weather", "arguments": {ARGUMENTS}}}]'
    choice = await answered(mistral, text, tools=TOOLS)
    assert choice["message"]["content"] == "Well."
    assert calls_of(choice) == [("weather", ARGUMENTS)]
    assert len(choice["message"]["tool_calls"][0]["id"]) == 9
    # Without tools special tokens have no text.
    assert (await answered(mistral, text))["message"]["content"] == text.replace(MARKER, "")


async def test_a_conversation_goes_on_with_what_tools_gave(mistral) -> None:
    call = {"id": "call_0123456789", "type": "function", "function": {"name": "now", "arguments": "{}"}}
    messages = [
        {"role": "user", "content": "What time is it?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": call["id"], "content": "noon"},
    ]
    choice = await answered(mistral, "It is noon.", messages=messages, tools=TOOLS)
    assert choice["message"]["content"] == "It is noon."


async def test_bad_tools_are_refused_before_anything_is_placed(cluster) -> None:
    for parameters, param in (
        ({"tools": [TOOLS[0], TOOLS[0]]}, "tools[1].function.name"),
        ({"tool_choice": "required"}, "tool_choice"),
        (
            {"tools": TOOLS, "tool_choice": NAMED, "response_format": {"type": "json_object"}},
            "response_format",
        ),
        ({"tools": [{"type": "retrieval"}]}, "tools[0].type"),
    ):
        status, answer = await cluster.chat(**parameters)
        assert (status, answer["error"]["param"]) == (400, param), answer
    assert not cluster.scheduled


def test_special_tokens_are_text_only_where_they_are_kept() -> None:
    token_ids = ids(f"{MARKER}x<|im_end|>")
    table = TokenBytes(tokenizer())
    assert Detokenizer(table).feed(token_ids) == "x"
    assert Detokenizer(table.keeping({MARKER})).feed(token_ids) == f"{MARKER}x"
    assert Detokenizer(table).feed(token_ids) == "x"
