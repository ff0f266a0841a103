"""What an answer holds beside its text: logprobs, echo, token ids; and comments that keep a stream alive."""

import asyncio
import json
import threading

import pytest
from tests.unit.gateway.fake_cluster import END, accept, chat_body, ids, running_cluster
from tests.unit.gateway.model_files import byte_level_tokenizer, write_model_folder

from cluster.messages import Cancel, Finish, RefusalReason, Refused, Submit
from gateway.answer_forms import ChatForm
from policy.core import FinishReason, TokenLogprobs

pytestmark = pytest.mark.unit

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
TOKENIZER = byte_level_tokenizer()


def completion(**parameters) -> dict[str, object]:
    return {"model": "tiny", "prompt": "The lazy", "max_tokens": 100} | parameters


def logprobs_of(token_ids: list[int], top: int) -> tuple[TokenLogprobs, ...]:
    """The chosen token is the most probable one only where its number is even."""
    return tuple(
        TokenLogprobs(
            -0.5 - number,
            tuple((token_id if place == number % 2 else END, -0.25 - number - place) for place in range(top)),
        )
        for number, token_id in enumerate(token_ids)
    )


def chunks_of(text: str) -> list[dict]:
    events = [line for line in text.split("\n\n") if line and not line.startswith(":")]
    assert events[-1] == "data: [DONE]"
    return [json.loads(event.removeprefix("data: ")) for event in events[:-1]]


async def answer_with(cluster, path, body, token_ids, logprobs, *, at_once: int = 1) -> str:
    asking = asyncio.create_task(cluster.post(path, body))
    submit = await cluster.prefill.submits.get()
    for begin in range(0, len(token_ids), at_once):
        piece = slice(begin, begin + at_once)
        await cluster.decode.tokens(submit, token_ids[piece], begin, logprobs=logprobs[piece])
    await cluster.decode.finish(submit, len(token_ids))
    reply = await asking
    assert reply.status == 200
    return reply.text


@pytest.mark.parametrize("stop", [None, ["fox, 你好!"[:6]], ["世"]])
async def test_logprobs_of_a_chat_are_those_of_its_text_whole_and_streamed(cluster, stop) -> None:
    token_ids = [*ids("The quick 🙂 fox, 你好!"), END]
    logprobs = logprobs_of(token_ids, 2)
    body = chat_body(logprobs=True, top_logprobs=2, stop=stop)
    whole = json.loads(await answer_with(cluster, CHAT, body, token_ids, logprobs, at_once=3))["choices"][0]
    content = whole["logprobs"]["content"]
    text = whole["message"]["content"]
    spelled = b"".join(bytes(entry["bytes"]) for entry in content)
    assert spelled.decode("utf-8", "ignore").startswith(text)
    assert len(b"".join(bytes(entry["bytes"]) for entry in content[:-1])) < len(text.encode())
    if stop is None:
        assert spelled.decode() == text
    for number, entry in enumerate(content):
        assert entry["logprob"] == -0.5 - number
        assert [top["logprob"] for top in entry["top_logprobs"]] == [-0.25 - number, -1.25 - number]
        assert entry["top_logprobs"][number % 2]["token"] == entry["token"]
        assert entry["top_logprobs"][1 - number % 2]["token"] == "<|im_end|>"
    partial = [entry for entry in content if "\\x" in entry["token"]]
    assert all(entry["token"] == "".join(f"\\x{b:02x}" for b in entry["bytes"]) for entry in partial)
    assert partial or stop

    streamed = chunks_of(await answer_with(cluster, CHAT, body | {"stream": True}, token_ids, logprobs))
    joined_text, joined = "", []
    for chunk in streamed:
        (choice,) = chunk["choices"]
        joined_text += choice["delta"].get("content", "")
        if choice["logprobs"] is not None:
            joined += choice["logprobs"]["content"]
            # With the text that completes them, never before.
            assert b"".join(bytes(entry["bytes"]) for entry in joined).decode() == joined_text or stop
    assert (joined_text, joined) == (text, content)


async def test_logprobs_of_a_text_completion_have_offsets_into_the_text(cluster) -> None:
    token_ids = [*ids("The 🙂 fox"), END]
    logprobs = logprobs_of(token_ids, 1)
    body = completion(logprobs=1)
    whole = json.loads(await answer_with(cluster, COMPLETIONS, body, token_ids, logprobs))["choices"][0]
    told = whole["logprobs"]
    count = len(token_ids) - 1
    assert [len(told[name]) for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset")] == [
        count
    ] * 4
    assert told["token_logprobs"] == [-0.5 - number for number in range(count)]
    for token, offset, top in zip(told["tokens"], told["text_offset"], told["top_logprobs"], strict=True):
        assert token in top, "the chosen token is among its alternatives"
        if not token.startswith("bytes:"):
            assert whole["text"][offset : offset + len(token)] == token
        else:
            assert "🙂" in whole["text"][offset : offset + 2]
    assert any(token.startswith("bytes:") for token in told["tokens"])

    joined = {name: [] for name in told}
    for chunk in chunks_of(
        await answer_with(cluster, COMPLETIONS, body | {"stream": True}, token_ids, logprobs)
    ):
        piece = chunk["choices"][0]["logprobs"]
        for name in joined if piece is not None else ():
            joined[name] += piece[name]
    assert joined == told


async def test_logprobs_are_asked_of_the_engine_as_they_were_asked_of_us(cluster) -> None:
    for body, expected in (
        (chat_body(), None),
        (chat_body(logprobs=True), 0),
        (chat_body(logprobs=True, top_logprobs=20), 20),
    ):
        asking = asyncio.create_task(cluster.post(CHAT, body))
        submit = await cluster.prefill.submits.get()
        assert submit.work.sampling.logprobs == expected
        await cluster.decode.tokens(submit, [END], 0, logprobs=() if expected is None else (None,))
        await cluster.decode.finish(submit, 1)
        choice = json.loads((await asking).text)["choices"][0]
        assert choice["logprobs"] == (None if expected is None else {"content": [], "refusal": None})


async def test_logprobs_that_nobody_knows_any_more_are_null(cluster) -> None:
    token_ids = ids("The fox")
    text = await answer_with(
        cluster, CHAT, chat_body(logprobs=True, top_logprobs=1), token_ids, (None,) * len(token_ids)
    )
    content = json.loads(text)["choices"][0]["logprobs"]["content"]
    assert [(entry["logprob"], entry["top_logprobs"]) for entry in content] == [(None, [])] * len(token_ids)
    text = await answer_with(
        cluster, COMPLETIONS, completion(logprobs=1), token_ids, (None,) * len(token_ids)
    )
    told = json.loads(text)["choices"][0]["logprobs"]
    assert (told["token_logprobs"][0], told["top_logprobs"][0]) == (None, None)


async def test_tokens_after_a_loss_keep_their_logprobs(cluster) -> None:
    token_ids = ids("The quick brown fox")
    logprobs = logprobs_of(token_ids, 1)
    asking = asyncio.create_task(cluster.post(CHAT, chat_body(logprobs=True, top_logprobs=1)))
    submit = await cluster.prefill.submits.get()
    await cluster.decode.tokens(submit, token_ids[:3], 0, logprobs=logprobs[:3])
    await cluster.decode.fail(submit, retryable=True)
    again = await cluster.prefill.submits.get()
    # What the new instance cannot know of the old one's tokens, the gateway has.
    await cluster.decode.tokens(again, token_ids[2:5], 2, logprobs=(None, *logprobs[3:5]))
    await cluster.decode.tokens(again, token_ids[5:], 5, logprobs=logprobs[5:])
    await cluster.decode.finish(again, len(token_ids))
    content = json.loads((await asking).text)["choices"][0]["logprobs"]["content"]
    assert [entry["logprob"] for entry in content] == [-0.5 - number for number in range(len(token_ids))]


@pytest.mark.parametrize("prompt", ["The lazy 🙂", ids("The lazy 🙂")])
@pytest.mark.parametrize("stream", [False, True])
async def test_an_echo_comes_before_the_answer(cluster, prompt, stream) -> None:
    body = completion(prompt=prompt, echo=True, stream=stream, n=2)
    asking = asyncio.create_task(cluster.post(COMPLETIONS, body))
    for text in (" dog", " fox"):
        submit = await cluster.prefill.submits.get()
        await cluster.decode.say(submit, ids(text))
    reply = await asking
    if stream:
        said = ["", ""]
        for chunk in chunks_of(reply.text):
            said[chunk["choices"][0]["index"]] += chunk["choices"][0]["text"]
    else:
        said = [choice["text"] for choice in json.loads(reply.text)["choices"]]
    assert said == ["The lazy 🙂 dog", "The lazy 🙂 fox"]


async def test_special_tokens_are_part_of_the_text_where_they_are_asked_for(cluster) -> None:
    start = TOKENIZER.token_to_id("<|im_start|>")
    for kept, expected in ((False, "<|im_start|>fox"), (True, "fox")):
        asking = asyncio.create_task(cluster.chat(skip_special_tokens=kept))
        await cluster.decode.say(await cluster.prefill.submits.get(), [start, *ids("fox")])
        assert (await asking)[1]["choices"][0]["message"]["content"] == expected


async def test_tokens_behind_the_end_are_text_where_ends_are_ignored(cluster) -> None:
    asking = asyncio.create_task(cluster.chat(ignore_eos=True, max_tokens=20))
    submit = await cluster.prefill.submits.get()
    token_ids = [*ids("The"), END, *ids(" fox")]
    await cluster.decode.tokens(submit, token_ids, 0)
    await cluster.decode.finish(submit, len(token_ids), FinishReason.LENGTH)
    _, answer = await asking
    assert answer["choices"][0]["message"]["content"] == "The fox"
    assert answer["usage"]["completion_tokens"] == len(token_ids)


async def test_a_stream_that_has_nothing_to_say_is_kept_alive(folder) -> None:
    """Before the first token, between tokens, and while a stop string may have begun."""
    async with running_cluster(folder, keep_alive_s=0.05) as cluster:
        body = chat_body(stream=True, stop=["END!"])
        reply = await cluster.session.post(cluster.url + CHAT, json=body)
        assert reply.status == 200
        assert await reply.content.readuntil(b"\n\n") == b": keep-alive\n\n"
        submit = await cluster.prefill.submits.get()
        await cluster.decode.tokens(submit, ids("The EN"), 0)
        events = [await reply.content.readuntil(b"\n\n") for _ in range(5)]
        first = events.index(next(event for event in events if event.startswith(b"data")))
        data = events[first : first + 2]
        assert json.loads(data[0][6:])["choices"][0]["delta"] == {"role": "assistant", "content": ""}
        assert json.loads(data[1][6:])["choices"][0]["delta"] == {"content": "The "}
        while (await reply.content.readuntil(b"\n\n")) != b": keep-alive\n\n":
            pass
        await cluster.decode.tokens(submit, [END], len(ids("The EN")))
        await cluster.decode.finish(submit, len(ids("The EN")) + 1)
        text = (await reply.content.read()).decode()
        said = [chunk["choices"][0]["delta"].get("content", "") for chunk in chunks_of(text)]
        assert "".join(said) == "EN"


async def test_a_refusal_that_comes_late_still_has_its_own_status(folder) -> None:
    """As long as no prefill has taken the request on, however long that takes."""
    async with running_cluster(folder, keep_alive_s=0.05) as cluster:
        decided = asyncio.Event()

        async def refuse(body: Submit) -> object:
            await decided.wait()
            return Refused(body.work.request_id, body.work.attempt, RefusalReason.BAD_REQUEST, "no")

        cluster.prefill.answer = lambda body: refuse(body) if isinstance(body, Submit) else accept(body)
        asking = asyncio.create_task(cluster.post(CHAT, chat_body(stream=True)))
        await cluster.prefill.submits.get()
        await asyncio.sleep(0.15)  # several intervals
        assert not asking.done()
        decided.set()
        reply = await asking
        assert (reply.status, json.loads(reply.text)["error"]["message"]) == (400, "no")


async def test_what_fails_after_a_comment_is_an_error_event(folder) -> None:
    async with running_cluster(folder, keep_alive_s=0.05) as cluster:
        reply = await cluster.session.post(cluster.url + CHAT, json=chat_body(stream=True))
        submit = await cluster.prefill.submits.get()
        await cluster.prefill.fail(submit, retryable=False, detail="the engine broke")
        text = (await reply.content.read()).decode()
        assert reply.status == 200
        *_, last = [event for event in text.split("\n\n") if event]
        assert last.startswith("event: error\ndata: ")
        assert json.loads(last.partition("data: ")[2])["error"]["message"] == "the engine broke"


async def test_whole_answers_and_busy_streams_get_no_comments(folder) -> None:
    async with running_cluster(folder, keep_alive_s=0.2) as cluster:
        asking = asyncio.create_task(cluster.post(CHAT, chat_body(stream=True)))
        submit = await cluster.prefill.submits.get()
        token_ids = ids("The quick brown fox jumps over the lazy dog")
        for index, token_id in enumerate(token_ids):
            await cluster.decode.tokens(submit, [token_id], index)
            await asyncio.sleep(0.02)
        await cluster.decode.finish(submit, len(token_ids))
        assert ": keep-alive" not in (await asking).text


TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}


@pytest.mark.parametrize("stream", [False, True])
async def test_the_one_call_that_is_wanted_ends_the_answer(tmp_path, stream) -> None:
    """Whatever follows would not be told: decode is told to stop with what came, and that is the usage."""
    folder = write_model_folder(tmp_path)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 8192}))
    async with running_cluster(folder) as cluster:
        await one_call(cluster, stream)


async def one_call(cluster, stream: bool) -> None:
    body = chat_body(tools=[TOOL], parallel_tool_calls=False, stream=stream, max_tokens=100)
    if stream:
        body["stream_options"] = {"include_usage": True}
    asking = asyncio.create_task(cluster.post(CHAT, body))
    submit = await cluster.prefill.submits.get()
    call = '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}'
    token_ids = ids(call)
    await cluster.decode.tokens(submit, token_ids, 0)
    reply = await asking
    assert await cluster.decode.notices.get() == Finish(submit.work.request_id, 0, len(token_ids))
    if stream:
        *chunks, last = chunks_of(reply.text)
        usage, reason = last["usage"], chunks[-1]["choices"][0]["finish_reason"]
    else:
        answer = json.loads(reply.text)
        usage, reason = answer["usage"], answer["choices"][0]["finish_reason"]
        (made,) = answer["choices"][0]["message"]["tool_calls"]
        assert made["function"] == {"name": "weather", "arguments": '{"city": "Paris"}'}
    assert (reason, usage["completion_tokens"]) == ("tool_calls", len(token_ids))


async def test_whole_answers_are_bounded_and_large_ones_are_formed_on_a_thread(cluster, monkeypatch) -> None:
    formed_on: list[bool] = []
    whole = ChatForm.whole

    def watched(*arguments):
        formed_on.append(threading.current_thread() is threading.main_thread())
        return whole(*arguments)

    monkeypatch.setattr(ChatForm, "whole", watched)
    token_ids = ids("The quick brown fox")
    logprobs = logprobs_of(token_ids, 2)
    body = chat_body(logprobs=True, top_logprobs=2)
    usual = await answer_with(cluster, CHAT, body, token_ids, logprobs)
    monkeypatch.setattr("gateway.answering.FORMED_AT_ONCE_CHARS_MAX", 100)
    large = await answer_with(cluster, CHAT, body, token_ids, logprobs)
    assert json.loads(large)["choices"] == json.loads(usual)["choices"]
    assert formed_on == [True, False]

    monkeypatch.setattr("gateway.answering.WHOLE_CHARS_MAX", 500)
    asking = asyncio.create_task(cluster.post(CHAT, body))
    submit = await cluster.prefill.submits.get()
    await cluster.decode.tokens(submit, token_ids, 0, logprobs=logprobs)
    reply = await asking
    error = json.loads(reply.text)["error"]
    assert (reply.status, error["code"], error["param"]) == (413, "answer_too_large", "stream")
    notice = await cluster.decode.notices.get()
    while not isinstance(notice, Cancel):
        notice = await cluster.decode.notices.get()
    assert notice.request_id == submit.work.request_id
