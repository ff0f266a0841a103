"""The HTTP API on a real socket, in front of a scripted cluster: what a client sees."""

import asyncio
import json

import pytest
from tests.unit.gateway.fake_cluster import (
    DECODE,
    PREFILL,
    chat_body,
    ids,
    prompt_hash_count,
    running_cluster,
)
from tests.unit.gateway.model_files import CONTEXT_TOKENS_MAX, byte_level_tokenizer, write_model_folder

from cluster import subjects
from cluster.messages import Cancel, Finish, RefusalReason, Refused
from gateway.answers.requests import GatewayLimits
from gateway.answers.running import RequestLimits
from gateway.http_body import BodyLimits
from policy.core import FinishReason, Placement, Rejection, RejectReason
from policy.evict import SloClass

pytestmark = pytest.mark.unit

CHAT = "/v1/chat/completions"


def events(text: str) -> list[str]:
    """The data of each server-sent event."""
    blocks = [block for block in text.split("\n\n") if block]
    return [line.removeprefix("data: ") for block in blocks for line in block.split("\n") if "data: " in line]


async def test_a_chat_is_answered(cluster) -> None:
    asking = asyncio.create_task(cluster.chat(seed=5, max_tokens=20))
    submit = await cluster.prefill.submits.get()
    await cluster.prefill.tokens(submit, ids("The")[:1], 0, cached_tokens=16)
    await cluster.decode.say(submit, ids("The capital of France is Paris."), cached_tokens=16)
    status, answer = await asking
    assert status == 200
    assert answer["object"] == "chat.completion"
    assert answer["model"] == "tiny"
    assert answer["id"].startswith("chatcmpl-")
    (choice,) = answer["choices"]
    assert choice["message"]["content"] == "The capital of France is Paris."
    assert choice["message"]["role"] == "assistant"
    assert choice["finish_reason"] == "stop"
    output_tokens = len(ids("The capital of France is Paris.")) + 1
    assert answer["usage"] == {
        "prompt_tokens": submit.work.prompt_tokens,
        "completion_tokens": output_tokens,
        "total_tokens": submit.work.prompt_tokens + output_tokens,
        "prompt_tokens_details": {"cached_tokens": 16},
    }
    assert await cluster.decode.notices.get() == Finish(submit.work.request_id, 0, output_tokens)
    assert submit.work.sampling.seed == 5
    assert (submit.decode, submit.source, submit.prefix_blocks) == (DECODE, DECODE, 1)
    (question,) = cluster.scheduled
    assert question.prompt_tokens == submit.work.prompt_tokens
    assert prompt_hash_count(question) == question.prompt_tokens // 16
    assert question.fingerprint == submit.work.fingerprint == cluster.model.fingerprint


async def test_sampling_parameters_reach_the_workers_and_bad_ones_nobody(cluster) -> None:
    shaped = {"min_p": 0.1, "repetition_penalty": 1.1, "presence_penalty": 1, "frequency_penalty": -0.5}
    asking = asyncio.create_task(cluster.chat(logit_bias={"5": -100}, **shaped))
    submit = await cluster.prefill.submits.get()
    await cluster.decode.say(submit, ids("Yes."))
    assert (await asking)[0] == 200
    sampling = submit.work.sampling
    assert {name: getattr(sampling, name) for name in shaped} == shaped
    assert sampling.logit_bias == ((5, -100.0),)
    for name, limits in (("presence_penalty", "at most 2.0"), ("min_p", "at most 1.0")):
        status, answer = await cluster.chat(**{name: 3})
        assert (status, answer["error"]["param"]) == (400, name)
        assert answer["error"]["message"] == f"{name} is 3, must be {limits}"
    assert len(cluster.scheduled) == 1


async def test_a_stream_is_the_same_text_in_pieces(cluster) -> None:
    text = "The quick 🙂 fox, 你好!"
    body = chat_body(stream=True, stream_options={"include_usage": True})
    asking = asyncio.create_task(cluster.post(CHAT, body))
    await cluster.decode.say(await cluster.prefill.submits.get(), ids(text))
    reply = await asking
    assert reply.status == 200
    assert reply.headers["content-type"].startswith("text/event-stream")
    data = events(reply.text)
    assert data[-1] == "[DONE]"
    chunks = [json.loads(chunk) for chunk in data[:-1]]
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    assert len({(chunk["id"], chunk["created"], chunk["model"]) for chunk in chunks}) == 1
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    deltas = [chunk["choices"][0]["delta"].get("content", "") for chunk in chunks[:-1]]
    assert "".join(deltas) == text
    assert not any("�" in delta for delta in deltas)
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks[:-1]] == [None] * (len(chunks) - 2) + [
        "stop"
    ]
    assert all(chunk["usage"] is None for chunk in chunks[:-1])
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["completion_tokens"] == len(ids(text)) + 1


@pytest.mark.parametrize("path", [CHAT, "/v1/completions"])
async def test_usage_so_far_comes_with_every_chunk_where_it_is_wanted(cluster, path) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    asked = {"stream": True, "stream_options": options, "max_tokens": 50}
    body = chat_body(**asked) if path == CHAT else {"model": "tiny", "prompt": ids("The"), **asked}
    asking = asyncio.create_task(cluster.post(path, body))
    submit = await cluster.prefill.submits.get()
    token_ids = ids("The quick fox")
    for index, token_id in enumerate(token_ids):
        await cluster.decode.tokens(submit, [token_id], index, cached_tokens=16)
    await cluster.decode.finish(submit, len(token_ids))
    *chunks, last = [json.loads(chunk) for chunk in events((await asking).text)[:-1]]
    prompt_tokens = len(submit.work.prompt_token_ids) // 4
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts)
    assert counts[-1] == len(token_ids)
    assert all(chunk["usage"]["prompt_tokens"] == prompt_tokens for chunk in chunks)
    assert all(
        chunk["usage"]["total_tokens"] == prompt_tokens + count
        for chunk, count in zip(chunks, counts, strict=True)
    )
    assert last["choices"] == []
    assert last["usage"]["prompt_tokens_details"] == {"cached_tokens": 16}


async def test_a_text_completion_streams_without_usage_where_nobody_asked(cluster) -> None:
    body = {"model": "tiny", "prompt": ids("The lazy"), "stream": True, "max_tokens": 4}
    asking = asyncio.create_task(cluster.post("/v1/completions", body))
    submit = await cluster.prefill.submits.get()
    assert submit.work.prompt_token_ids == b"".join(i.to_bytes(4, "little") for i in ids("The lazy"))
    await cluster.decode.tokens(submit, ids(" dog"), 0)
    await cluster.decode.finish(submit, len(ids(" dog")), FinishReason.LENGTH)
    data = events((await asking).text)
    chunks = [json.loads(chunk) for chunk in data[:-1]]
    assert data[-1] == "[DONE]"
    assert all("usage" not in chunk for chunk in chunks)
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == " dog"
    assert chunks[-1]["choices"][0]["finish_reason"] == "length"
    assert {chunk["object"] for chunk in chunks} == {"text_completion"}


@pytest.mark.parametrize("stream", [False, True])
async def test_token_ids_are_told_to_who_asks(cluster, stream) -> None:
    """Every token once, those of a character that comes in several tokens included."""
    text = "The quick 🙂 fox, 你好!"
    body = {"model": "tiny", "prompt": ids("The"), "stream": stream, "return_token_ids": True}
    asking = asyncio.create_task(cluster.post("/v1/completions", body | {"max_tokens": 200}))
    submit = await cluster.prefill.submits.get()
    for index, token_id in enumerate(ids(text)):
        await cluster.decode.tokens(submit, [token_id], index)
    await cluster.decode.finish(submit, len(ids(text)), FinishReason.LENGTH)
    reply = (await asking).text
    answers = [json.loads(chunk) for chunk in events(reply)[:-1]] if stream else [json.loads(reply)]
    choices = [choice for answer in answers for choice in answer["choices"]]
    assert [i for choice in choices for i in choice.get("token_ids", [])] == ids(text)
    assert "".join(choice["text"] for choice in choices) == text


async def test_token_ids_end_where_a_stop_string_ends(cluster) -> None:
    asking = asyncio.create_task(cluster.chat(stop=["fox"], return_token_ids=True))
    token_ids = ids("The quick brown fox jumps")
    stop_tokens = next(n for n in range(len(token_ids)) if "fox" in _decoded(token_ids[:n]))
    await cluster.decode.tokens(await cluster.prefill.submits.get(), token_ids, 0)
    _, answer = await asking
    assert answer["choices"][0]["token_ids"] == token_ids[:stop_tokens]


async def test_a_stop_string_ends_the_answer_and_decode_is_told_where(cluster) -> None:
    asking = asyncio.create_task(cluster.chat(stop=["fox"]))
    submit = await cluster.prefill.submits.get()
    token_ids = ids("The quick brown fox jumps")
    stop_tokens = next(n for n in range(len(token_ids)) if "fox" in _decoded(token_ids[:n]))
    for index, token_id in enumerate(token_ids):
        await cluster.decode.tokens(submit, [token_id], index)
    status, answer = await asking
    assert status == 200
    assert answer["choices"][0]["message"]["content"] == "The quick brown "
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert answer["usage"]["completion_tokens"] == stop_tokens
    assert await cluster.decode.notices.get() == Finish(submit.work.request_id, 0, stop_tokens)
    # Tokens that come after the end are answered by a cancel.
    assert await cluster.decode.notices.get() == Cancel(submit.work.request_id, 0)


async def test_a_stop_string_in_the_last_tokens_counts_as_stop(cluster) -> None:
    asking = asyncio.create_task(cluster.chat(stop=["brown"]))
    submit = await cluster.prefill.submits.get()
    token_ids = ids("The quick brown fox jumps")
    await cluster.decode.finish(submit, len(token_ids), FinishReason.LENGTH)
    await cluster.decode.tokens(submit, token_ids, 0)
    _, answer = await asking
    assert answer["choices"][0]["message"]["content"] == "The quick "
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert answer["usage"]["completion_tokens"] < len(token_ids)


def _decoded(token_ids: list[int]) -> str:
    return byte_level_tokenizer().decode(token_ids)


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "code", "param"),
    [
        ("POST", CHAT, b"{", 400, "invalid_json", None),
        ("POST", CHAT, b"\xff", 400, "invalid_json", None),
        ("POST", "/v1/completions", b"", 400, "invalid_json", None),
        ("POST", CHAT, chat_body(model="gpt-4"), 404, "model_not_found", "model"),
        ("POST", CHAT, chat_body(max_tokens=0), 400, None, "max_tokens"),
        ("POST", CHAT, chat_body(max_tokens=-1), 400, None, "max_tokens"),
        ("POST", CHAT, chat_body(tools=[1]), 400, "invalid_type", "tools[0]"),
        (
            "POST",
            CHAT,
            chat_body(max_tokens=256),
            400,
            "context_length_exceeded",
            "max_tokens",
        ),
        (
            "POST",
            CHAT,
            chat_body(messages=[{"role": "user", "content": "1" * 300}]),
            400,
            "context_length_exceeded",
            "messages",
        ),
        (
            "POST",
            "/v1/completions",
            {"model": "tiny", "prompt": [1] * CONTEXT_TOKENS_MAX},
            400,
            "context_length_exceeded",
            "prompt",
        ),
        ("GET", CHAT, b"", 405, "method_not_allowed", None),
        ("DELETE", "/v1/models", b"", 405, "method_not_allowed", None),
        ("POST", "/metrics", b"", 405, "method_not_allowed", None),
        ("GET", "/v1/modelz", b"", 404, "not_found", None),
        ("POST", "/", b"", 404, "not_found", None),
        ("GET", "/v1/models/gpt-4", b"", 404, "model_not_found", "model"),
    ],
)
async def test_a_bad_request_has_an_openai_error_and_places_nothing(
    cluster, method, path, body, status, code, param
) -> None:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    async with cluster.session.request(method, cluster.url + path, data=data) as reply:
        answer = await reply.json()
        assert reply.status == status
        assert "x-request-id" in reply.headers
    assert set(answer) == {"error"}
    assert set(answer["error"]) == {"message", "type", "param", "code"}
    assert (answer["error"]["code"], answer["error"]["param"]) == (code, param)
    assert answer["error"]["message"]
    assert cluster.scheduled == []
    assert cluster.requests.in_progress == 0


async def test_models_are_listed(cluster) -> None:
    async with cluster.session.get(cluster.url + "/v1/models") as reply:
        listed = await reply.json()
    async with cluster.session.get(cluster.url + "/v1/models/tiny") as reply:
        model = await reply.json()
    assert listed == {"object": "list", "data": [model]}
    assert (model["id"], model["object"], model["max_model_len"]) == ("tiny", "model", CONTEXT_TOKENS_MAX)


async def test_a_model_name_may_have_slashes(folder) -> None:
    async with running_cluster(folder, model_name="org/tiny") as cluster:
        for path in ("/v1/models/org/tiny", "/v1/models/org%2Ftiny"):
            async with cluster.session.get(cluster.url + path) as reply:
                assert (await reply.json())["id"] == "org/tiny"


async def test_a_body_over_the_limit_is_413_announced_or_not(folder) -> None:
    async with running_cluster(folder, body_limits=BodyLimits(body_bytes_max=1000)) as cluster:

        async def pieces():
            for _ in range(30):
                yield b"x" * 100

        for data in (b"x" * 1001, pieces()):
            async with cluster.session.post(cluster.url + CHAT, data=data) as reply:
                assert reply.status == 413
                assert (await reply.json())["error"]["code"] == "request_too_large"


async def test_bodies_of_more_than_aiohttps_own_limit_are_taken(cluster) -> None:
    padding = " " * (3 * 1024 * 1024)
    body = json.dumps(chat_body(max_tokens=0)) + padding
    async with cluster.session.post(cluster.url + CHAT, data=body) as reply:
        assert (await reply.json())["error"]["param"] == "max_tokens"


async def test_all_bodies_together_are_bounded(folder) -> None:
    limits = BodyLimits(body_bytes_max=10_000, bodies_bytes_max=1_500)
    async with running_cluster(folder, body_limits=limits) as cluster:
        started, release = asyncio.Event(), asyncio.Event()

        async def slow():
            yield b"x" * 1000
            started.set()
            await release.wait()
            yield b"x"

        first = asyncio.create_task(_status(cluster, slow()))
        await started.wait()
        statuses = set()
        while 429 not in statuses:
            statuses.add(await _status(cluster, b"x" * 1000))
        release.set()
        assert await first == 400
        assert await _status(cluster, b"x" * 1000) == 400


async def _status(cluster, data) -> int:
    async with cluster.session.post(cluster.url + CHAT, data=data) as reply:
        await reply.read()
        return reply.status


async def test_a_body_that_does_not_come_is_408(folder) -> None:
    async with running_cluster(folder, body_limits=BodyLimits(body_timeout_s=0.05)) as cluster:
        never = asyncio.Event()

        async def stuck():
            yield b"{"
            await never.wait()

        assert await _status(cluster, stuck()) == 408


async def test_a_broken_encoding_is_400(cluster) -> None:
    headers = {"Content-Encoding": "gzip"}
    async with cluster.session.post(cluster.url + CHAT, data=b"no gzip", headers=headers) as reply:
        assert reply.status == 400
        assert (await reply.json())["error"]["code"] == "invalid_body"


@pytest.mark.parametrize(
    ("reason", "status"),
    [
        (RejectReason.OVERLOADED, 429),
        (RejectReason.TTFT, 429),
        (RejectReason.TBT, 429),
        (RejectReason.NO_INSTANCE, 503),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_a_rejection_has_its_status_even_for_a_stream(cluster, reason, status, stream) -> None:
    async def reject(request):
        return Rejection(request.request_id, request.attempt, reason, "no room", 6.2)

    cluster.place = reject
    async with cluster.session.post(cluster.url + CHAT, json=chat_body(stream=stream)) as reply:
        assert reply.status == status
        assert reply.headers["Retry-After"] == "7"
        assert reply.headers["retry-after-ms"] == "6200"
        assert reply.headers["x-moonpool-rejected-reason"] == reason.value
        error = (await reply.json())["error"]
        assert (error["message"], error["reason"]) == ("no room", reason.value)
    assert cluster.value("moonpool_gateway_rejected_requests_total", reason=reason.value) == 1


async def test_targets_and_priority_in_headers_reach_the_conductor(cluster) -> None:
    headers = {"x-slo-ttft-ms": "60000", "X-SLO-TBT-MS": "49.5", "x-priority": "-3"}
    for path, body in ((CHAT, chat_body()), ("/v1/completions", {"model": "tiny", "prompt": "Hello"})):
        asking = asyncio.create_task(cluster.post(path, body, headers))
        submit = await cluster.prefill.submits.get()
        await cluster.decode.say(submit, ids("yes"))
        assert (await asking).status == 200
        question = cluster.scheduled[-1]
        assert (question.priority, question.tbt_ms_max) == (-3, 49.5)
        # What the gateway itself took is gone from it.
        assert 0 < question.ttft_ms_max <= 60_000.0
        assert (submit.work.priority, submit.work.slo) == (-3, SloClass.TIGHT)


async def test_what_the_placement_was_admitted_by_is_handed_on(cluster) -> None:
    async def place(request):
        return Placement(request.request_id, request.attempt, PREFILL, DECODE, tbt_ms_max=55.0)

    cluster.place = place
    asking = asyncio.create_task(cluster.chat())
    submit = await cluster.prefill.submits.get()
    assert (submit.tbt_ms_max, submit.work.slo) == (55.0, SloClass.NONE)
    await cluster.decode.say(submit, ids("yes"))
    assert (await asking)[0] == 200


async def test_a_bad_header_is_a_400_that_names_it(cluster) -> None:
    reply = await cluster.post(CHAT, chat_body(), {"x-slo-ttft-ms": "soon"})
    error = json.loads(reply.text)["error"]
    assert (reply.status, error["param"]) == (400, "x-slo-ttft-ms")
    assert error["message"] == "x-slo-ttft-ms is 'soon', must be a number from 1.0 to 3600000.0"
    assert "reason" not in error


async def test_a_header_that_is_given_twice_is_nobody_s_choice(cluster) -> None:
    twice = [("x-slo-ttft-ms", "500"), ("x-slo-ttft-ms", "300")]
    async with cluster.session.post(cluster.url + CHAT, json=chat_body(), headers=twice) as reply:
        error = (await reply.json())["error"]
    assert (reply.status, error["param"]) == (400, "x-slo-ttft-ms")
    assert error["message"] == "x-slo-ttft-ms is '500, 300', must be a number from 1.0 to 3600000.0"


async def test_without_a_conductor_it_is_503(folder) -> None:
    async with running_cluster(folder, conductor=None) as cluster:
        status, answer = await cluster.chat()
        assert status == 503
        assert "conductor" in answer["error"]["message"]


async def test_a_standby_conductor_is_asked_where_no_other_answers(folder) -> None:
    async with running_cluster(folder, conductor=subjects.SCHEDULE_STANDBY) as cluster:
        asking = asyncio.create_task(cluster.chat())
        submit = await cluster.prefill.submits.get()
        await cluster.decode.say(submit, ids("yes"))
        assert (await asking)[0] == 200


async def test_a_refusal_is_placed_elsewhere(cluster) -> None:
    async def place(request):
        prefill = PREFILL if request.excluded else DECODE
        return Placement(request.request_id, request.attempt, prefill, DECODE)

    cluster.place = place
    cluster.decode.answer = lambda body: Refused("", 0, RefusalReason.QUEUE_FULL, "full", 1.0)
    asking = asyncio.create_task(cluster.chat())
    submit = await cluster.prefill.submits.get()
    assert submit.work.attempt == 1
    assert cluster.scheduled[1].excluded == (DECODE,)
    await cluster.decode.say(submit, ids("yes"))
    assert (await asking)[0] == 200


async def test_a_bad_request_found_late_is_400(cluster) -> None:
    cluster.prefill.answer = lambda body: Refused("", 0, RefusalReason.BAD_REQUEST, "too odd")
    status, answer = await cluster.chat()
    assert (status, answer["error"]["message"]) == (400, "too odd")


async def test_placements_are_tried_a_bounded_number_of_times(folder) -> None:
    limits = GatewayLimits(request=RequestLimits(placement_attempts_max=2))
    async with running_cluster(folder, limits=limits) as cluster:
        cluster.prefill.answer = lambda body: Refused("", 0, RefusalReason.NO_BLOCKS, "none", 3.0)
        reply = await cluster.post(CHAT, chat_body())
        assert reply.status == 429
        assert reply.headers["retry-after"] == "3"
        assert reply.headers["x-moonpool-rejected-reason"] == "no_blocks"
        assert len(cluster.scheduled) == 2


async def test_a_lost_placement_goes_on_without_a_repeated_or_missing_token(cluster) -> None:
    token_ids = ids("The quick brown fox jumps over the lazy dog.")
    asking = asyncio.create_task(cluster.post(CHAT, chat_body(stream=True)))
    first = await cluster.prefill.submits.get()
    await cluster.decode.tokens(first, token_ids[:5], 0)
    await cluster.decode.fail(first, retryable=True)
    again = await cluster.prefill.submits.get()
    assert again.work.attempt == 1
    assert again.work.output_token_ids == b"".join(i.to_bytes(4, "little") for i in token_ids[:5])
    question = cluster.scheduled[1]
    assert question.resumed
    assert question.excluded == (DECODE,)
    assert question.prompt_tokens == first.work.prompt_tokens + 5
    assert prompt_hash_count(question) == question.prompt_tokens // 16
    await cluster.decode.tokens(first, token_ids[5:9], 5)
    await cluster.decode.tokens(again, token_ids[3:], 3)
    await cluster.decode.finish(again, len(token_ids))
    data = events((await asking).text)
    text = "".join(json.loads(d)["choices"][0]["delta"].get("content", "") for d in data[:-1])
    assert text == "The quick brown fox jumps over the lazy dog."


async def test_a_failure_after_200_is_an_error_event(cluster) -> None:
    asking = asyncio.create_task(cluster.post(CHAT, chat_body(stream=True)))
    submit = await cluster.prefill.submits.get()
    await cluster.decode.tokens(submit, ids("The quick"), 0)
    await cluster.decode.fail(submit, retryable=False)
    reply = await asking
    text = reply.text
    assert reply.status == 200
    assert "event: error\n" in text
    last = json.loads(events(text)[-1])
    assert (last["error"]["message"], last["error"]["type"]) == ("the engine broke", "server_error")
    assert "[DONE]" not in text
    assert "The quick" in "".join(
        json.loads(d)["choices"][0]["delta"].get("content", "") for d in events(text)[:-1]
    )


@pytest.mark.parametrize("stream", [False, True])
async def test_a_deadline_is_504_and_everything_is_cancelled(folder, stream) -> None:
    limits = GatewayLimits(request=RequestLimits(request_timeout_s=0.1))
    async with running_cluster(folder, limits=limits) as cluster:
        async with cluster.session.post(cluster.url + CHAT, json=chat_body(stream=stream)) as reply:
            assert reply.status == 504
        submit = await cluster.prefill.submits.get()
        cancel = Cancel(submit.work.request_id, 0)
        assert await cluster.prefill.notices.get() == cancel
        assert await cluster.decode.notices.get() == cancel


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("tokens", [0, 2])
async def test_a_client_that_leaves_is_cancelled_everywhere(cluster, stream, tokens) -> None:
    asking = asyncio.create_task(cluster.chat(stream=stream))
    submit = await cluster.prefill.submits.get()
    if tokens:
        await cluster.decode.tokens(submit, ids("The quick")[:tokens], 0)
    asking.cancel()
    cancel = Cancel(submit.work.request_id, 0)
    async with asyncio.timeout(1):
        assert await cluster.prefill.notices.get() == cancel
        assert await cluster.decode.notices.get() == cancel
        await cluster.requests.drain(1.0)
    assert cluster.requests.in_progress == 0
    assert cluster.value("moonpool_gateway_client_gone_requests_total") == 1


async def test_a_client_that_leaves_while_placing_is_forgotten(cluster) -> None:
    placing, never = asyncio.Event(), asyncio.Event()

    async def place(request):
        placing.set()
        await never.wait()

    cluster.place = place
    asking = asyncio.create_task(cluster.chat())
    await placing.wait()
    asking.cancel()
    await cluster.requests.drain(1.0)
    assert cluster.requests.in_progress == 0
    assert cluster.prefill.submits.empty()
    never.set()


async def test_over_the_limit_of_requests_is_429(folder) -> None:
    async with running_cluster(folder, limits=GatewayLimits(requests_max=1)) as cluster:
        first = asyncio.create_task(cluster.chat())
        submit = await cluster.prefill.submits.get()
        async with cluster.session.post(cluster.url + CHAT, json=chat_body()) as reply:
            assert reply.status == 429
            assert reply.headers["Retry-After"] == "1"
            assert reply.headers["x-moonpool-rejected-reason"] == "gateway_full"
        await cluster.decode.say(submit, ids("yes"))
        assert (await first)[0] == 200
        second = asyncio.create_task(cluster.chat())
        await cluster.decode.say(await cluster.prefill.submits.get(), ids("yes"))
        assert (await second)[0] == 200


async def test_draining_waits_for_what_runs_and_takes_nothing_new(cluster) -> None:
    asking = asyncio.create_task(cluster.chat())
    submit = await cluster.prefill.submits.get()
    draining = asyncio.create_task(cluster.requests.drain(5.0))
    await asyncio.sleep(0)
    status, answer = await cluster.chat()
    assert (status, answer["error"]["message"]) == (503, "this gateway is shutting down")
    assert not draining.done()
    await cluster.decode.say(submit, ids("yes"))
    assert (await asking)[0] == 200
    await draining


async def test_draining_ends_what_does_not_end_in_time(cluster) -> None:
    asking = asyncio.create_task(cluster.chat())
    submit = await cluster.prefill.submits.get()
    await cluster.requests.drain(0.01)
    assert (await asking)[0] == 503
    assert await cluster.decode.notices.get() == Cancel(submit.work.request_id, 0)


@pytest.mark.parametrize(
    ("sent", "kept"), [("abc-123", True), ("x" * 128, True), ("x" * 129, False), ("ü", False), ("", False)]
)
async def test_request_ids_are_taken_or_made(cluster, sent, kept) -> None:
    headers = {"x-request-id": sent}
    async with cluster.session.get(cluster.url + "/v1/models", headers=headers) as reply:
        returned = reply.headers["x-request-id"]
    assert (returned == sent) is kept
    assert returned


async def test_a_trace_goes_through_and_a_clients_id_never_enters_the_bus(cluster) -> None:
    trace_id = "0af7651916cd43dd8448eb211c80319c"
    headers = {"traceparent": f"00-{trace_id}-b7ad6b7169203331-01", "x-request-id": "mine.>.*"}
    asking = asyncio.create_task(cluster.post(CHAT, chat_body(stream=True), headers))
    submit = await cluster.prefill.submits.get()
    assert submit.work.request_id != "mine.>.*"
    await cluster.decode.say(submit, ids("yes"))
    assert (await asking).headers["x-request-id"] == "mine.>.*"
    assert set(cluster.prefill.traces) == {trace_id}


async def test_long_prompts_go_in_parts(tmp_path) -> None:
    folder = write_model_folder(tmp_path)
    config = json.loads((folder / "config.json").read_text()) | {"max_position_embeddings": 1_000_000}
    (folder / "config.json").write_text(json.dumps(config))
    async with running_cluster(folder) as cluster:
        prompt = [index % 50 for index in range(600_000)]
        body = {"model": "tiny", "prompt": prompt, "max_tokens": 1}
        asking = asyncio.create_task(cluster.session.post(cluster.url + "/v1/completions", json=body))
        submit = await cluster.prefill.submits.get()
        parts = cluster.prefill.parts
        assert len(parts) == submit.work.prompt_parts > 1
        assert [part.part for part in parts] == list(range(len(parts)))
        assert b"".join(part.token_ids for part in parts) == b"".join(i.to_bytes(4, "little") for i in prompt)
        assert submit.work.prompt_token_ids == b""
        assert submit.work.prompt_tokens == 600_000
        await cluster.decode.say(submit, [])
        assert (await asking).status == 200


async def _ask_and_never_read(cluster) -> asyncio.StreamWriter:
    _, writer = await asyncio.open_connection(*_address(cluster), limit=1024)
    writer.transport.pause_reading()
    body = json.dumps(chat_body(stream=True)).encode()
    head = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
    writer.write(head.encode() + body)
    return writer


def _address(cluster) -> tuple[str, int]:
    host, port = cluster.url.removeprefix("http://").split(":")
    return host, int(port)


async def test_a_client_that_does_not_read_is_cut_off_and_memory_is_bounded(folder) -> None:
    limits = GatewayLimits(request=RequestLimits(unsent_chars_max=50_000))
    async with running_cluster(folder, limits=limits, write_timeout_s=30.0) as cluster:
        writer = await _ask_and_never_read(cluster)
        submit = await cluster.prefill.submits.get()
        word = ids("capital of France") * 500
        index = 0
        while cluster.decode.notices.empty():
            await cluster.decode.tokens(submit, word, index)
            index += len(word)
            await asyncio.sleep(0)
            assert index < 10_000_000
        assert await cluster.decode.notices.get() == Cancel(submit.work.request_id, 0)
        writer.close()
        await cluster.requests.drain(2.0)
        assert cluster.requests.in_progress == 0


async def test_a_client_that_reads_nothing_for_too_long_is_cut_off(folder) -> None:
    async with running_cluster(folder, write_timeout_s=0.1) as cluster:
        writer = await _ask_and_never_read(cluster)
        submit = await cluster.prefill.submits.get()
        word = ids("capital of France") * 2000
        index = 0
        while cluster.decode.notices.empty():
            await cluster.decode.tokens(submit, word, index)
            index += len(word)
            await asyncio.sleep(0.001)
            assert index < 10_000_000
        assert await cluster.decode.notices.get() == Cancel(submit.work.request_id, 0)
        writer.close()


async def test_what_happened_is_counted(cluster) -> None:
    asking = asyncio.create_task(cluster.chat())
    await cluster.decode.say(await cluster.prefill.submits.get(), ids("yes it is"), cached_tokens=16)
    await asking
    await cluster.chat(max_tokens=0)
    value = cluster.value
    assert value("moonpool_gateway_requests_total", route="chat_completions", status="200") == 1
    assert value("moonpool_gateway_requests_total", route="chat_completions", status="400") == 1
    assert value("moonpool_gateway_ttft_seconds_count") == 1
    assert value("moonpool_gateway_token_gap_seconds_count") == len(ids("yes it is"))
    assert value("moonpool_gateway_completion_tokens_total") == len(ids("yes it is")) + 1
    assert value("moonpool_gateway_cached_tokens_total") == 16
    assert value("moonpool_gateway_in_progress_requests") == 0


async def test_a_broken_chunk_is_400_and_the_server_lives_on(cluster) -> None:
    reader, writer = await asyncio.open_connection(*_address(cluster))
    head = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nZZ\r\nxx\r\n"
    writer.write(head.encode())
    assert b"400" in await reader.readline()
    writer.close()
    status, _ = await cluster.chat(max_tokens=0)
    assert status == 400
    assert cluster.requests.in_progress == 0


async def test_a_bug_within_a_stream_ends_it_with_an_error_event(cluster, monkeypatch) -> None:
    def broken(*_):
        raise ZeroDivisionError

    monkeypatch.setattr("gateway.answer_forms.ChatForm.closing", broken)
    asking = asyncio.create_task(cluster.post(CHAT, chat_body(stream=True)))
    await cluster.decode.say(await cluster.prefill.submits.get(), ids("yes"))
    reply = await asking
    assert reply.status == 200
    assert json.loads(events(reply.text)[-1])["error"]["type"] == "server_error"
    assert cluster.value("moonpool_gateway_requests_total", route="chat_completions", status="500") == 1


async def test_what_is_no_http_is_400_and_the_server_lives_on(cluster) -> None:
    reader, writer = await asyncio.open_connection(*_address(cluster))
    writer.write(b"NONSENSE\r\n\r\n")
    assert b"400" in await reader.readline()
    writer.close()
    async with cluster.session.get(cluster.url + "/v1/models") as reply:
        assert reply.status == 200
