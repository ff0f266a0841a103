"""LangChain's ChatOpenAI against a live stack."""

from typing import Any

import pytest
from langchain_core.exceptions import ContextOverflowError
from langchain_core.messages import AIMessageChunk, HumanMessage, SystemMessage, ToolMessage
from langchain_openai import ChatOpenAI
from pydantic import BaseModel, ConfigDict, Field
from tests.support.openai_clients import ANSWER_S_MAX, NO_KEY
from tests.support.stack import RunningStack

pytestmark = [pytest.mark.integration, pytest.mark.timeout(180)]

QUESTION = "What is the capital of France?"


class City(BaseModel):
    """A city of the world."""

    model_config = ConfigDict(extra="forbid")
    name: str = Field(max_length=20)
    inhabitants: int = Field(ge=0, le=50_000_000)


@pytest.fixture(scope="module")
def model(smollm2_stack: RunningStack) -> ChatOpenAI:
    return model_of(smollm2_stack)


def model_of(stack: RunningStack, **settings: Any) -> ChatOpenAI:
    return ChatOpenAI(
        **{
            "model": "smollm2",
            "base_url": stack.state.url,
            "api_key": NO_KEY,
            "temperature": 0,
            "max_tokens": 16,
            "timeout": ANSWER_S_MAX,
            "max_retries": 0,
            "stream_usage": True,
        }
        | settings
    )


def test_invoke_tells_usage_and_reason(model: ChatOpenAI) -> None:
    answer = model.invoke(QUESTION)
    assert "Paris" in answer.content
    assert answer.response_metadata["model_name"] == "smollm2"
    assert answer.response_metadata["finish_reason"] in ("stop", "length")
    usage = answer.usage_metadata
    assert usage is not None
    assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"]
    assert usage["input_token_details"]["cache_read"] % 16 == 0


def test_a_stream_adds_up_to_the_answer(model: ChatOpenAI) -> None:
    whole = model.invoke(QUESTION)
    chunks = list(model.stream(QUESTION))
    assert len(chunks) > 3
    gathered: Any = chunks[0]
    for chunk in chunks[1:]:
        gathered += chunk
    assert isinstance(gathered, AIMessageChunk)
    assert gathered.content == whole.content
    assert gathered.usage_metadata is not None
    assert whole.usage_metadata is not None
    assert gathered.usage_metadata["output_tokens"] == whole.usage_metadata["output_tokens"]


async def test_the_asynchronous_forms(smollm2_stack: RunningStack) -> None:
    model = model_of(smollm2_stack)
    whole = await model.ainvoke(QUESTION)
    chunks = [str(chunk.content) async for chunk in model.astream(QUESTION)]
    assert "".join(chunks) == whole.content


def test_a_batch_is_answered_in_order(model: ChatOpenAI) -> None:
    questions = [QUESTION, "What is the capital of Italy?"]
    answers = model.batch(questions)
    assert [answer.content for answer in answers] == [model.invoke(one).content for one in questions]


def test_a_conversation(model: ChatOpenAI) -> None:
    messages = [SystemMessage("You are brief."), HumanMessage(QUESTION)]
    messages += [model.invoke(messages), HumanMessage("And of Italy?")]
    assert model.invoke(messages).content


def test_logprobs(smollm2_stack: RunningStack) -> None:
    answer = model_of(smollm2_stack, logprobs=True, top_logprobs=2).invoke(QUESTION)
    entries = answer.response_metadata["logprobs"]["content"]
    assert "".join(entry["token"] for entry in entries) == answer.content


@pytest.mark.parametrize("streamed", [False, True])
def test_a_bound_tool_is_called(smollm2_stack: RunningStack, streamed: bool) -> None:
    model = model_of(smollm2_stack, max_tokens=150).bind_tools([City], tool_choice="City")
    if streamed:
        chunks = list(model.stream("Tell me of Paris."))
        answer: Any = chunks[0]
        for chunk in chunks[1:]:
            answer += chunk
    else:
        answer = model.invoke("Tell me of Paris.")
    (call,) = answer.tool_calls
    assert call["name"] == "City"
    City.model_validate(call["args"])
    history = [HumanMessage("Tell me of Paris."), answer, ToolMessage("known", tool_call_id=call["id"])]
    assert model_of(smollm2_stack).invoke(history).content


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_structured_output(smollm2_stack: RunningStack, method: str) -> None:
    model = model_of(smollm2_stack, max_tokens=200).with_structured_output(City, method=method)
    assert isinstance(model.invoke("Describe the city of Paris."), City)


def test_json_of_any_schema(smollm2_stack: RunningStack) -> None:
    model = model_of(smollm2_stack, max_tokens=200)
    structured = model.with_structured_output(None, method="json_mode")
    answer = structured.invoke('Answer with {"ok": true} and nothing else, in JSON.')
    assert isinstance(answer, dict)


def test_a_prompt_that_is_too_long_is_known_as_such(model: ChatOpenAI) -> None:
    with pytest.raises(ContextOverflowError):
        model.invoke("word " * 20_000)
