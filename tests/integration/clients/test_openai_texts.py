"""OpenAI's own client against a live stack: text completions of every form of prompt, several answers to
one, and logprobs."""

from typing import Any

import openai
import pytest
from openai.types import Completion

pytestmark = [pytest.mark.integration, pytest.mark.timeout(180)]

PROMPT = "The capital of France is"
OTHER_PROMPT = "One, two, three, four,"
QUESTION = [{"role": "user", "content": "Name a colour."}]


def ids_of(client: openai.OpenAI, text: str) -> list[int]:
    """By the server's own tokenizer, which is outside /v1."""
    answer: Any = client.post("../tokenize", cast_to=object, body={"model": "smollm2", "prompt": text})
    ids: list[int] = answer["tokens"]
    return ids


def complete(client: openai.OpenAI, prompt: Any, **parameters: Any) -> Completion:
    return client.completions.create(
        model="smollm2", prompt=prompt, **{"max_tokens": 8, "temperature": 0} | parameters
    )


def texts(answer: Completion) -> list[str]:
    assert [choice.index for choice in answer.choices] == list(range(len(answer.choices)))
    return [choice.text for choice in answer.choices]


def streamed(
    client: openai.OpenAI, prompt: Any, **parameters: Any
) -> tuple[dict[int, str], list[Completion]]:
    """The text of each choice, and all chunks."""
    found: dict[int, str] = {}
    chunks = list(
        client.completions.create(
            model="smollm2",
            prompt=prompt,
            stream=True,
            stream_options={"include_usage": True},
            **{"max_tokens": 8, "temperature": 0} | parameters,
        )
    )
    for chunk in chunks:
        for choice in chunk.choices:
            found[choice.index] = found.get(choice.index, "") + choice.text
    return found, chunks


def test_a_text(client: openai.OpenAI) -> None:
    answer = complete(client, PROMPT)
    assert answer.object == "text_completion"
    assert answer.id.startswith("cmpl-")
    (text,) = texts(answer)
    assert "Paris" in text
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 8
    found, chunks = streamed(client, PROMPT)
    assert found == {0: text}
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 8


def test_token_ids_are_the_same_prompt(client: openai.OpenAI) -> None:
    assert texts(complete(client, ids_of(client, PROMPT))) == texts(complete(client, PROMPT))


def test_lists_of_prompts_are_answered_in_order(client: openai.OpenAI) -> None:
    apart = [texts(complete(client, prompt))[0] for prompt in (PROMPT, OTHER_PROMPT)]
    both = complete(client, [PROMPT, OTHER_PROMPT])
    assert texts(both) == apart
    assert both.usage is not None
    assert both.usage.completion_tokens == 16
    ids = [ids_of(client, prompt) for prompt in (PROMPT, OTHER_PROMPT)]
    assert both.usage.prompt_tokens == sum(map(len, ids))
    assert texts(complete(client, ids)) == apart
    found, _ = streamed(client, [PROMPT, OTHER_PROMPT])
    assert found == dict(enumerate(apart))


def test_several_answers_to_each_prompt(client: openai.OpenAI) -> None:
    drawn = {"n": 2, "temperature": 1.3, "seed": 5}
    answer = complete(client, [PROMPT, OTHER_PROMPT], **drawn)
    assert len(answer.choices) == 4
    assert len(set(texts(answer))) == 4
    found, _ = streamed(client, [PROMPT, OTHER_PROMPT], **drawn)
    assert found == dict(enumerate(texts(answer)))
    alone = complete(client, OTHER_PROMPT, temperature=1.3, seed=5)
    assert texts(alone)[0] == texts(answer)[2]


def test_echo_gives_the_prompt_back(client: openai.OpenAI) -> None:
    (text,) = texts(complete(client, PROMPT))
    assert texts(complete(client, PROMPT, echo=True)) == [PROMPT + text]
    assert streamed(client, PROMPT, echo=True)[0] == {0: PROMPT + text}


def test_logprobs_of_a_text(client: openai.OpenAI) -> None:
    answer = complete(client, PROMPT, logprobs=3)
    (choice,) = answer.choices
    shown = choice.logprobs
    assert shown is not None
    assert shown.tokens is not None
    assert shown.token_logprobs is not None
    assert shown.top_logprobs is not None
    assert shown.text_offset is not None
    assert "".join(shown.tokens) == choice.text
    assert len(shown.tokens) == 8
    assert all(value <= 0 for value in shown.token_logprobs)
    for token, value, best in zip(shown.tokens, shown.token_logprobs, shown.top_logprobs, strict=True):
        # Greedy: the token that was taken is the likeliest.
        assert best[token] == pytest.approx(value)
        assert max(best.values()) == pytest.approx(value)
    offsets = [sum(map(len, shown.tokens[:count])) for count in range(8)]
    assert [offset - shown.text_offset[0] for offset in shown.text_offset] == offsets


def test_several_answers_of_a_chat(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {
        "model": "smollm2",
        "messages": QUESTION,
        "n": 3,
        "temperature": 1.3,
        "seed": 11,
        "max_tokens": 12,
    }
    answer = client.chat.completions.create(**asked)
    contents = [choice.message.content or "" for choice in answer.choices]
    assert len(set(contents)) == 3
    assert answer.usage is not None
    assert answer.usage.completion_tokens > 12
    found = dict.fromkeys(range(3), "")
    ends: dict[int, str] = {}
    for chunk in client.chat.completions.create(**asked, stream=True):
        for choice in chunk.choices:
            found[choice.index] += choice.delta.content or ""
            if choice.finish_reason:
                ends[choice.index] = choice.finish_reason
    assert found == dict(enumerate(contents))
    assert ends == {choice.index: choice.finish_reason for choice in answer.choices}
    first = client.chat.completions.create(**asked | {"n": 1})
    assert first.choices[0].message.content == contents[0]


def test_logprobs_of_a_chat(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {
        "model": "smollm2",
        "messages": QUESTION,
        "temperature": 0,
        "max_tokens": 8,
        "logprobs": True,
        "top_logprobs": 2,
    }
    (choice,) = client.chat.completions.create(**asked).choices
    assert choice.logprobs is not None
    assert choice.logprobs.content is not None
    entries = choice.logprobs.content
    said = b"".join(bytes(entry.bytes or []) for entry in entries)
    assert said.decode() == choice.message.content
    for entry in entries:
        assert len(entry.top_logprobs) == 2
        assert entry.top_logprobs[0].token == entry.token
        assert entry.top_logprobs[0].logprob == pytest.approx(entry.logprob)
        assert entry.top_logprobs[0].logprob >= entry.top_logprobs[1].logprob
    gathered = [
        entry
        for chunk in client.chat.completions.create(**asked, stream=True)
        for piece in chunk.choices
        if piece.logprobs is not None
        for entry in piece.logprobs.content or []
    ]
    assert [(entry.token, entry.logprob) for entry in gathered] == [
        (entry.token, entry.logprob) for entry in entries
    ]


def test_the_stream_helper_gathers_logprobs(client: openai.OpenAI) -> None:
    with client.chat.completions.stream(
        model="smollm2",
        messages=[{"role": "user", "content": "Say hello."}],
        max_tokens=200,
        temperature=0,
        logprobs=True,
    ) as stream:
        final = stream.get_final_completion()
    (choice,) = final.choices
    assert choice.logprobs is not None
    assert "".join(entry.token for entry in choice.logprobs.content or []) == choice.message.content
