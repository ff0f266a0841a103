"""Several answers to one HTTP request: n of them, to one prompt or to a list, whole and streamed."""

import asyncio
import hashlib
import json

import pytest
from tests.unit.gateway.fake_cluster import DECODE, GATEWAY, PREFILL, accept, chat_body, ids, running_cluster

from cluster import subjects
from cluster.messages import (
    Cancel,
    FailedEntry,
    Finish,
    RefusalReason,
    Refused,
    StreamBatch,
    Submit,
    TokensEntry,
)
from gateway.answers import choices as choices_module
from gateway.answers.orders import seed_of
from gateway.answers.requests import GatewayLimits
from gateway.answers.running import RequestLimits
from gateway.text_model import pack_token_ids
from policy.core import FinishReason, Placement, Rejection, RejectReason

pytestmark = pytest.mark.unit

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"


def completion(**parameters) -> dict[str, object]:
    return {"model": "tiny", "prompt": "The lazy", "max_tokens": 50} | parameters


async def submitted(cluster, count: int) -> list[Submit]:
    return [await asyncio.wait_for(cluster.prefill.submits.get(), 5.0) for _ in range(count)]


async def nothing_submitted(cluster) -> None:
    """What the gateway had to do it has done: its messages are answered in turns of this loop."""
    for _ in range(20):
        await asyncio.sleep(0)
    assert cluster.prefill.submits.empty()


def chunks_of(text: str) -> list[dict]:
    *chunks, done = [line for line in text.split("\n\n") if line]
    assert done == "data: [DONE]"
    return [json.loads(chunk.removeprefix("data: ")) for chunk in chunks]


def is_idle(cluster) -> bool:
    return cluster.requests.in_progress == 0 and not cluster.requests._running


async def test_others_follow_once_the_first_ones_prompt_is_cached(cluster) -> None:
    asking = asyncio.create_task(cluster.chat(n=3, seed=5))
    (first,) = await submitted(cluster, 1)
    await nothing_submitted(cluster)
    (question,) = cluster.scheduled
    assert (question.samples, question.resumed) == (3, False)
    await cluster.prefill.tokens(first, ids("one")[:1], 0, cached_tokens=16)
    others = await submitted(cluster, 2)
    asked = [(each.samples, each.resumed, each.attempt) for each in cluster.scheduled[1:]]
    assert asked == [(1, True, 0)] * 2
    assert len({submit.work.request_id for submit in (first, *others)}) == 3
    assert [submit.work.sampling.samples for submit in (first, *others)] == [1, 1, 1]
    # In any order; the text says which one it is.
    await cluster.decode.say(others[1], ids("three"), cached_tokens=32)
    await cluster.decode.say(others[0], ids("two"), cached_tokens=32)
    await cluster.decode.say(first, ids("one"), cached_tokens=16)
    status, answer = await asking
    assert status == 200
    assert [(c["index"], c["message"]["content"]) for c in answer["choices"]] == [
        (0, "one"),
        (1, "two"),
        (2, "three"),
    ]
    output_tokens = sum(len(ids(text)) + 1 for text in ("one", "two", "three"))
    assert answer["usage"] == {
        "prompt_tokens": first.work.prompt_tokens,
        "completion_tokens": output_tokens,
        "total_tokens": first.work.prompt_tokens + output_tokens,
        "prompt_tokens_details": {"cached_tokens": 16},
    }
    assert is_idle(cluster)


async def test_seeds_are_derived_as_documented(cluster) -> None:
    asking = asyncio.create_task(cluster.chat(n=3, seed=-1))
    submits = await submitted(cluster, 1)
    await cluster.decode.say(submits[0], ids("a"))
    submits += await submitted(cluster, 2)
    seeds = [submit.work.sampling.seed for submit in submits]
    digest = hashlib.blake2b(
        seeds[0].to_bytes(8, "little") + (2).to_bytes(8, "little"), digest_size=8
    ).digest()
    assert seeds[0] == 2**63 - 1, "as with n = 1"
    assert seeds[2] == int.from_bytes(digest, "little") % 2**63
    assert seeds[1:] == [seed_of(seeds[0], 1), seed_of(seeds[0], 2)]
    assert len(set(seeds)) == 3
    for submit in submits[1:]:
        await cluster.decode.say(submit, ids("b"))
    assert (await asking)[0] == 200


async def test_a_list_of_prompts_with_two_answers_to_each(cluster) -> None:
    prompts = ["The lazy", "The quick brown fox", "Capital of"]
    asking = asyncio.create_task(cluster.post(COMPLETIONS, completion(prompt=prompts, n=2, seed=7)))
    leaders = await submitted(cluster, 3)
    prompt_of = {pack_token_ids(ids(prompt)): prompt for prompt in prompts}
    assert [prompt_of[submit.work.prompt_token_ids] for submit in leaders] == prompts
    for number, submit in enumerate(leaders):
        await cluster.decode.say(submit, ids(f"{number}.0"), cached_tokens=number)
    followers = await submitted(cluster, 3)
    for submit in followers:
        number = prompts.index(prompt_of[submit.work.prompt_token_ids])
        await cluster.decode.say(submit, ids(f"{number}.1"), cached_tokens=100)
    reply = await asking
    answer = json.loads(reply.text)
    assert [(c["index"], c["text"], c["finish_reason"]) for c in answer["choices"]] == [
        (2 * number + k, f"{number}.{k}", "stop") for number in range(3) for k in range(2)
    ]
    usage = answer["usage"]
    assert usage["prompt_tokens"] == sum(len(ids(prompt)) for prompt in prompts)
    assert usage["completion_tokens"] == sum(len(ids(f"{n}.{k}")) + 1 for n in range(3) for k in range(2))
    assert usage["prompt_tokens_details"]["cached_tokens"] == 0 + 1 + 2


async def test_lists_of_token_ids_are_prompts_too(cluster) -> None:
    prompts = [ids("The lazy"), ids("fox")]
    asking = asyncio.create_task(cluster.post(COMPLETIONS, completion(prompt=prompts, seed=1, echo=True)))
    submits = await submitted(cluster, 2)
    assert [submit.work.sampling.seed for submit in submits] == [1, 1]
    for number, submit in enumerate(submits):
        await cluster.decode.say(submit, ids(f" {number}"))
    answer = json.loads((await asking).text)
    assert [choice["text"] for choice in answer["choices"]] == ["The lazy 0", "fox 1"]


async def test_without_a_seed_equal_prompts_get_different_ones(cluster) -> None:
    asking = asyncio.create_task(cluster.post(COMPLETIONS, completion(prompt=["fox", "fox"])))
    submits = await submitted(cluster, 2)
    assert submits[0].work.sampling.seed != submits[1].work.sampling.seed
    for submit in submits:
        await cluster.decode.say(submit, ids("x"))
    assert (await asking).status == 200


async def test_streams_of_several_answers_come_interleaved(cluster) -> None:
    body = chat_body(n=2, stream=True, stream_options={"include_usage": True})
    asking = asyncio.create_task(cluster.post(CHAT, body))
    (first,) = await submitted(cluster, 1)
    texts = ["The quick 🙂 fox", "你好, world"]
    tokens = [ids(text) for text in texts]
    await cluster.decode.tokens(first, tokens[0][:1], 0, cached_tokens=16)
    (second,) = await submitted(cluster, 1)
    submits = [first, second]
    for index in range(1, max(map(len, tokens))):
        for submit, token_ids in zip(submits, tokens, strict=True):
            begin = index - 1 if submit is second and index == 1 else index
            if begin < len(token_ids):
                await cluster.decode.tokens(submit, token_ids[begin : index + 1], begin)
    await cluster.decode.finish(second, len(tokens[1]), FinishReason.LENGTH)
    await cluster.decode.finish(first, len(tokens[0]))
    chunks = chunks_of((await asking).text)
    said = ["", ""]
    reasons: list[list[str]] = [[], []]
    first_deltas: dict[int, dict] = {}
    for chunk in chunks[:-1]:
        (choice,) = chunk["choices"]
        first_deltas.setdefault(choice["index"], choice["delta"])
        said[choice["index"]] += choice["delta"].get("content", "")
        assert "�" not in choice["delta"].get("content", "")
        if choice["finish_reason"]:
            reasons[choice["index"]].append(choice["finish_reason"])
        assert chunk["usage"] is None
    assert said == texts
    assert reasons == [["stop"], ["length"]]
    assert set(map(str, first_deltas.values())) == {str({"role": "assistant", "content": ""})}
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["completion_tokens"] == sum(map(len, tokens))
    assert chunks[-1]["usage"]["prompt_tokens"] == first.work.prompt_tokens
    assert len({chunk["id"] for chunk in chunks}) == 1


async def test_one_of_three_is_lost_and_no_token_of_any_is_missing(cluster) -> None:
    asking = asyncio.create_task(cluster.post(CHAT, chat_body(n=3, stream=True)))
    texts = ["The quick brown fox", "The lazy dog", "Paris"]
    tokens = [ids(text) for text in texts]
    (first,) = await submitted(cluster, 1)
    await cluster.decode.tokens(first, tokens[0][:2], 0)
    submits = [first, *await submitted(cluster, 2)]
    await cluster.decode.tokens(submits[1], tokens[1][:2], 0)
    await cluster.decode.fail(submits[1], retryable=True)
    (again,) = await submitted(cluster, 1)
    assert again.work.request_id == submits[1].work.request_id
    assert (again.work.attempt, cluster.scheduled[-1].resumed, cluster.scheduled[-1].samples) == (1, True, 1)
    await cluster.decode.tokens(again, tokens[1][2:], 2)
    await cluster.decode.finish(again, len(tokens[1]))
    await cluster.decode.tokens(first, tokens[0][2:], 2)
    await cluster.decode.finish(first, len(tokens[0]))
    await cluster.decode.say(submits[2], tokens[2])
    said = ["", "", ""]
    for chunk in chunks_of((await asking).text):
        for choice in chunk["choices"]:
            said[choice["index"]] += choice["delta"].get("content", "")
    assert said == texts


async def test_a_follower_that_is_lost_before_its_first_token_needs_no_admission_again(cluster) -> None:
    asking = asyncio.create_task(cluster.chat(n=2))
    (first,) = await submitted(cluster, 1)
    await cluster.decode.say(first, ids("a"))
    (second,) = await submitted(cluster, 1)
    await cluster.decode.fail(second, retryable=True)
    (again,) = await submitted(cluster, 1)
    assert (cluster.scheduled[-1].attempt, cluster.scheduled[-1].resumed) == (1, True)
    await cluster.decode.say(again, ids("b"))
    status, answer = await asking
    assert (status, [c["message"]["content"] for c in answer["choices"]]) == (200, ["a", "b"])


async def cancelled_ids(cluster, count: int) -> set[str]:
    """Of requests that decode is told to drop."""
    found: set[str] = set()
    while len(found) < count:
        notice = await asyncio.wait_for(cluster.decode.notices.get(), 5.0)
        if isinstance(notice, Cancel):
            found.add(notice.request_id)
    return found


@pytest.mark.parametrize("stream", [False, True])
async def test_one_that_fails_before_anything_was_sent_fails_all(cluster, stream) -> None:
    prompts = ["The lazy", "fox", "dog"]
    asking = asyncio.create_task(cluster.post(COMPLETIONS, completion(prompt=prompts, stream=stream)))
    submits = await submitted(cluster, 3)
    await cluster.decode.fail(submits[1], retryable=False, detail="the engine broke")
    reply = await asking
    assert (reply.status, json.loads(reply.text)["error"]["message"]) == (500, "the engine broke")
    assert await cancelled_ids(cluster, 3) == {submit.work.request_id for submit in submits}
    assert cluster.value("moonpool_gateway_client_gone_requests_total") == 0, "no client has left"
    assert is_idle(cluster)


async def test_a_rejected_one_of_several_is_the_answer(cluster) -> None:
    async def place(request):
        if request.prompt_tokens == len(ids("fox")):
            return Rejection(request.request_id, request.attempt, RejectReason.TTFT, "too much", 3.0)
        return Placement(request.request_id, request.attempt, PREFILL, DECODE)

    cluster.place = place
    reply = await cluster.post(COMPLETIONS, completion(prompt=["The lazy", "fox"]))
    assert (reply.status, reply.headers["retry-after"]) == (429, "3")
    assert is_idle(cluster)


async def test_one_that_fails_after_200_ends_the_stream_with_an_error_event(cluster) -> None:
    asking = asyncio.create_task(cluster.post(CHAT, chat_body(n=2, stream=True)))
    (first,) = await submitted(cluster, 1)
    await cluster.decode.tokens(first, ids("The quick"), 0)
    (second,) = await submitted(cluster, 1)
    await cluster.decode.fail(second, retryable=False, detail="the engine broke")
    reply = await asking
    assert reply.status == 200
    *_, last = [event for event in reply.text.split("\n\n") if event]
    assert last.startswith("event: error\ndata: ")
    assert "the engine broke" in last
    assert "[DONE]" not in reply.text
    assert await cancelled_ids(cluster, 2) == {first.work.request_id, second.work.request_id}
    assert is_idle(cluster)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("followed", [False, True])
async def test_a_client_that_leaves_takes_all_its_answers_along(cluster, stream, followed) -> None:
    """While the others wait for the first token, and while all of them run."""
    asking = asyncio.create_task(cluster.post(CHAT, chat_body(n=3, stream=stream)))
    submits = await submitted(cluster, 1)
    if followed:
        await cluster.decode.tokens(submits[0], ids("The"), 0)
        submits += await submitted(cluster, 2)
    asking.cancel()
    expected = {submit.work.request_id for submit in submits}
    assert await cancelled_ids(cluster, len(expected)) == expected
    assert is_idle(cluster)
    await nothing_submitted(cluster)


async def test_a_bounded_number_runs_at_once_and_the_cached_prompts_answers_go_first(
    cluster, monkeypatch
) -> None:
    monkeypatch.setattr(choices_module, "ORDERS_IN_FLIGHT_MAX", 2)
    prompts = ["The lazy", "fox", "Capital of France"]
    asking = asyncio.create_task(cluster.post(COMPLETIONS, completion(prompt=prompts, n=2)))
    order: list[int] = []
    running = await submitted(cluster, 2)
    number_of = {pack_token_ids(ids(prompt)): number for number, prompt in enumerate(prompts)}
    while running:
        await nothing_submitted(cluster)
        submit = running.pop(0)
        order.append(number_of[submit.work.prompt_token_ids])
        await cluster.decode.say(submit, ids("x"))
        if len(order) in (1, 2, 3) or (not running and len(order) < 6):
            running += await submitted(cluster, 1)
    answer = json.loads((await asking).text)
    assert len(answer["choices"]) == 6
    assert order == [0, 1, 0, 1, 2, 2]


async def test_text_that_waits_for_one_client_is_bounded_over_all_its_answers(folder) -> None:
    limits = GatewayLimits(request=RequestLimits(unsent_chars_max=100))
    async with running_cluster(folder, limits=limits) as cluster:
        room = cluster.requests.room()
        assert room.take(60)
        assert not room.take(41)
        assert room.take(40)
        room.give_back(60)
        assert room.take(60)


async def test_a_stop_string_of_one_ends_only_that_one(cluster) -> None:
    asking = asyncio.create_task(cluster.chat(n=2, stop=["END"]))
    (first,) = await submitted(cluster, 1)
    await cluster.decode.tokens(first, ids("one END two"), 0, cached_tokens=16)
    (second,) = await submitted(cluster, 1)
    await cluster.decode.say(second, ids("EN and on"))
    status, answer = await asking
    assert status == 200
    assert [choice["message"]["content"] for choice in answer["choices"]] == ["one ", "EN and on"]
    stopped_after = len(ids("one END"))
    assert answer["usage"]["completion_tokens"] == stopped_after + len(ids("EN and on")) + 1
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 16
    finish = await cluster.decode.notices.get()
    assert finish == Finish(first.work.request_id, 0, stopped_after)


async def test_cached_tokens_are_those_of_the_attempt_that_answered_first(cluster) -> None:
    """A later one finds what the earlier one has left in the pool."""
    asking = asyncio.create_task(cluster.chat())
    (submit,) = await submitted(cluster, 1)
    await cluster.prefill.tokens(submit, ids("The")[:1], 0, cached_tokens=16)
    await cluster.decode.fail(submit, retryable=True)
    (again,) = await submitted(cluster, 1)
    await cluster.decode.tokens(again, ids(" quick"), 1, cached_tokens=32)
    await cluster.decode.finish(again, 1 + len(ids(" quick")))
    _, answer = await asking
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 16


async def test_a_refused_submit_of_a_leader_asks_for_all_its_answers_again(cluster) -> None:
    refusals = [Refused]

    def refuse_once(body):
        if isinstance(body, Submit) and refusals:
            refusals.pop()
            return Refused(body.work.request_id, body.work.attempt, RefusalReason.QUEUE_FULL)
        return accept(body)

    cluster.prefill.answer = refuse_once
    asking = asyncio.create_task(cluster.chat(n=2))
    await submitted(cluster, 1)
    (again,) = await submitted(cluster, 1)
    assert [(each.attempt, each.samples, each.resumed) for each in cluster.scheduled] == [
        (0, 2, False),
        (1, 2, False),
    ]
    await cluster.decode.say(again, ids("a"))
    (second,) = await submitted(cluster, 1)
    await cluster.decode.say(second, ids("b"))
    assert (await asking)[0] == 200


async def test_what_came_before_a_failure_is_sent_before_it(cluster) -> None:
    """Both are there when the reader looks."""
    body = completion(prompt=["The lazy", "The quick"], stream=True)
    asking = asyncio.create_task(cluster.post(COMPLETIONS, body))
    one, other = await submitted(cluster, 2)
    tokens = TokensEntry(one.work.request_id, 0, 0, 0, pack_token_ids(ids("dog")))
    failed = FailedEntry(other.work.request_id, 0, False, "the engine broke")
    batch = StreamBatch(tokens=(tokens,), failed=(failed,))
    await cluster.decode.bus.publish(subjects.stream(GATEWAY), batch)
    reply = await asking
    assert reply.status == 200
    told = [line.partition("data: ")[2] for line in reply.text.split("\n\n") if line]
    *chunks, error = map(json.loads, told)
    assert "".join(choice["text"] for chunk in chunks for choice in chunk["choices"]) == "dog"
    assert error["error"]["code"] == "internal_error"
    await asyncio.wait_for(cluster.decode.notices.get(), 5.0)
    assert is_idle(cluster)
