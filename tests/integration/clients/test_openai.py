"""OpenAI's own client against a live stack: chat and text completions, streams, models, headers.

The client checks little of what it is sent, so its objects are looked at here field by field.
"""

from collections.abc import AsyncIterator

import openai
import pytest
from openai.types.chat import ChatCompletionChunk
from tests.support.openai_clients import async_client_of
from tests.support.stack import RunningStack

pytestmark = [pytest.mark.integration, pytest.mark.timeout(180)]

QUESTION = [{"role": "user", "content": "What is the capital of France?"}]


@pytest.fixture
async def async_client(smollm2_stack: RunningStack) -> AsyncIterator[openai.AsyncOpenAI]:
    async with async_client_of(smollm2_stack) as client:
        yield client


def text_of(chunks: list[ChatCompletionChunk], index: int = 0) -> str:
    return "".join(
        choice.delta.content or "" for chunk in chunks for choice in chunk.choices if choice.index == index
    )


def test_a_chat(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="smollm2", messages=QUESTION, max_completion_tokens=24, temperature=0
    )
    assert answer.object == "chat.completion"
    assert answer.id.startswith("chatcmpl-")
    assert answer.model == "smollm2"
    (choice,) = answer.choices
    assert choice.index == 0
    assert choice.message.role == "assistant"
    assert "Paris" in (choice.message.content or "")
    assert choice.message.refusal is None
    assert choice.message.tool_calls is None
    assert choice.finish_reason in ("stop", "length")
    assert answer.usage is not None
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    assert answer.usage.prompt_tokens_details is not None
    assert (answer.usage.prompt_tokens_details.cached_tokens or 0) % 16 == 0


def test_a_streamed_chat_joins_to_the_whole_one(client: openai.OpenAI) -> None:
    asked = {"model": "smollm2", "messages": QUESTION, "max_tokens": 24, "temperature": 0}
    whole = client.chat.completions.create(**asked)
    with client.chat.completions.create(
        **asked, stream=True, stream_options={"include_usage": True}
    ) as stream:
        *chunks, last = list(stream)
    assert chunks[0].choices[0].delta.role == "assistant"
    assert text_of(chunks) == whole.choices[0].message.content
    assert [chunk.usage for chunk in chunks] == [None] * len(chunks)
    assert [chunk.choices[0].finish_reason for chunk in chunks] == [
        *[None] * (len(chunks) - 1),
        whole.choices[0].finish_reason,
    ]
    assert {chunk.id for chunk in [*chunks, last]} == {chunks[0].id}
    assert last.choices == []
    assert last.usage is not None
    assert whole.usage is not None
    assert last.usage.completion_tokens == whole.usage.completion_tokens
    assert last.usage.prompt_tokens == whole.usage.prompt_tokens


def test_without_include_usage_no_chunk_has_any(client: openai.OpenAI) -> None:
    stream = client.chat.completions.create(model="smollm2", messages=QUESTION, max_tokens=4, stream=True)
    chunks = list(stream)
    assert all(chunk.usage is None and chunk.choices for chunk in chunks)
    assert chunks[-1].choices[0].finish_reason == "length"


def test_the_stream_helper_gathers_the_answer(client: openai.OpenAI) -> None:
    asked = {
        "model": "smollm2",
        "messages": [{"role": "user", "content": "Say hello."}],
        "max_tokens": 200,
        "temperature": 0,
    }
    whole = client.chat.completions.create(**asked)
    assert whole.choices[0].finish_reason == "stop"
    with client.chat.completions.stream(**asked, stream_options={"include_usage": True}) as stream:
        deltas = [event.delta for event in stream if event.type == "content.delta"]
        final = stream.get_final_completion()
    assert "".join(deltas) == final.choices[0].message.content == whole.choices[0].message.content
    assert final.usage is not None
    assert whole.usage is not None
    assert final.usage.completion_tokens == whole.usage.completion_tokens


def test_the_stream_helper_says_where_an_answer_was_cut(client: openai.OpenAI) -> None:
    with client.chat.completions.stream(model="smollm2", messages=QUESTION, max_tokens=3) as stream:
        stream.until_done()
        with pytest.raises(openai.LengthFinishReasonError) as raised:
            stream.get_final_completion()
    assert raised.value.completion.choices[0].finish_reason == "length"


async def test_the_asynchronous_client(async_client: openai.AsyncOpenAI) -> None:
    asked = {"model": "smollm2", "messages": QUESTION, "max_tokens": 12, "temperature": 0}
    whole = await async_client.chat.completions.create(**asked)
    stream = await async_client.chat.completions.create(**asked, stream=True)
    chunks = [chunk async for chunk in stream]
    assert text_of(chunks) == whole.choices[0].message.content
    async with async_client.chat.completions.stream(
        model="smollm2", messages=QUESTION, temperature=0, max_tokens=12
    ) as helper:
        deltas = [event.delta async for event in helper if event.type == "content.delta"]
    assert "".join(deltas) == whole.choices[0].message.content


def test_a_conversation_takes_back_what_was_answered(client: openai.OpenAI) -> None:
    first = client.chat.completions.create(model="smollm2", messages=QUESTION, max_tokens=20, temperature=0)
    messages = [
        {"role": "system", "content": [{"type": "text", "text": "You are brief."}]},
        *QUESTION,
        first.choices[0].message,
        {"role": "user", "content": "And of Italy?"},
    ]
    second = client.chat.completions.create(model="smollm2", messages=messages, max_tokens=20, temperature=0)
    assert second.choices[0].message.content
    # The client writes every field of a message that it knows, the unset ones as null.
    messages[2] = first.choices[0].message.model_dump()
    again = client.chat.completions.create(model="smollm2", messages=messages, max_tokens=20, temperature=0)
    assert again.choices[0].message.content == second.choices[0].message.content


def test_a_seed_repeats_an_answer(client: openai.OpenAI) -> None:
    def ask(seed: int) -> str | None:
        answer = client.chat.completions.create(
            model="smollm2", messages=QUESTION, max_tokens=16, temperature=1.5, top_p=0.95, seed=seed
        )
        return answer.choices[0].message.content

    assert ask(7) == ask(7)
    assert len({ask(seed) for seed in range(1, 4)}) > 1


def test_a_stop_string_ends_an_answer_and_is_not_in_it(client: openai.OpenAI) -> None:
    asked = {"model": "smollm2", "messages": QUESTION, "max_tokens": 24, "temperature": 0}
    whole = client.chat.completions.create(**asked).choices[0].message.content or ""
    stop = whole[6:9]
    answer = client.chat.completions.create(**asked, stop=[stop, "never said"])
    assert answer.choices[0].message.content == whole[: whole.index(stop)]
    assert answer.choices[0].finish_reason == "stop"
    chunks = list(client.chat.completions.create(**asked, stop=stop, stream=True))
    assert text_of(chunks) == whole[: whole.index(stop)]
    assert chunks[-1].choices[0].finish_reason == "stop"


def test_what_the_client_does_not_know_goes_in_its_extra_body(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="smollm2",
        messages=QUESTION,
        max_tokens=40,
        extra_body={"guided_choice": ["Paris", "Rome"], "top_k": 20, "min_p": 0.01, "priority": 1},
        extra_headers={"x-slo-ttft-ms": "60000"},
    )
    assert answer.choices[0].message.content in ("Paris", "Rome")


def test_models(client: openai.OpenAI) -> None:
    (model,) = client.models.list()
    assert (model.id, model.object, model.owned_by) == ("smollm2", "model", "moonpool")
    assert model.created > 0
    assert model.model_extra is not None
    assert (model.model_extra["root"], model.model_extra["max_model_len"]) == ("smollm2", 8192)
    assert client.models.retrieve("smollm2") == model
    with pytest.raises(openai.NotFoundError, match="does not exist"):
        client.models.retrieve("gpt-4o")


def test_headers_of_a_raw_response(client: openai.OpenAI) -> None:
    raw = client.chat.completions.with_raw_response.create(
        model="smollm2", messages=QUESTION, max_tokens=2, extra_headers={"x-request-id": "mine-1"}
    )
    assert raw.headers["x-request-id"] == "mine-1"
    assert raw.request_id == "mine-1"
    answer = raw.parse()
    assert answer.choices[0].finish_reason == "length"
    made = client.chat.completions.create(model="smollm2", messages=QUESTION, max_tokens=2)
    assert made._request_id
    with client.chat.completions.with_streaming_response.create(
        model="smollm2", messages=QUESTION, max_tokens=2, stream=True
    ) as streamed:
        assert streamed.headers["content-type"].startswith("text/event-stream")
        assert streamed.headers["x-request-id"]
        lines = [line for line in streamed.iter_lines() if line]
    assert lines[-1] == "data: [DONE]"


def test_what_is_not_served_is_not_found(client: openai.OpenAI) -> None:
    for ask in (
        lambda: client.responses.create(model="smollm2", input="Hello"),
        lambda: client.embeddings.create(model="smollm2", input="Hello"),
        lambda: client.moderations.create(input="Hello"),
    ):
        with pytest.raises(openai.NotFoundError, match="there is nothing at /v1/") as raised:
            ask()
        assert raised.value.type == "invalid_request_error"
