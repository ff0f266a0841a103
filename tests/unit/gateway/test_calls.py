"""What is left of a call when it is over: one log line and its counts, and nothing of its contents."""

import asyncio
import io
import json

import pytest
from tests.support.eventually import eventually
from tests.unit.gateway.fake_cluster import chat_body, ids, running_cluster

from cluster.logs import Level, Logger
from policy.core import Rejection, RejectReason

pytestmark = pytest.mark.unit

CHAT = "/v1/chat/completions"
SECRET = "platypus"


@pytest.fixture
def stream():
    return io.StringIO()


@pytest.fixture
async def cluster(folder, stream):
    async with running_cluster(folder, log=Logger(Level.INFO, stream)) as running:
        yield running


def request_lines(stream: io.StringIO) -> list[dict[str, object]]:
    lines = [json.loads(line) for line in stream.getvalue().splitlines()]
    return [line for line in lines if line["message"] == "request"]


async def test_a_finished_answer_is_one_line(cluster, stream) -> None:
    headers = {"x-request-id": "mine", "traceparent": f"00-{'a' * 32}-{'b' * 16}-01"}
    asking = asyncio.create_task(cluster.post(CHAT, chat_body(), headers))
    submit = await cluster.prefill.submits.get()
    await cluster.decode.say(submit, ids("The lazy dog"), cached_tokens=16)
    assert (await asking).status == 200
    (line,) = request_lines(stream)
    output_tokens = len(ids("The lazy dog")) + 1
    assert 0 < line["ttft_s"] <= line["elapsed_s"]
    assert line | {"time": "", "elapsed_s": 0, "ttft_s": 0} == {
        "time": "",
        "level": "info",
        "message": "request",
        "route": "chat_completions",
        "status": 200,
        "request_id": submit.work.request_id,
        "client_request_id": "mine",
        "trace_id": "a" * 32,
        "tenant": "",
        "elapsed_s": 0,
        "ttft_s": 0,
        "prompt_tokens": submit.work.prompt_tokens,
        "cached_tokens": 16,
        "completion_tokens": output_tokens,
        "answers": 1,
        "finish_reason": "stop",
    }
    assert cluster.value("moonpool_gateway_requests_total", route="chat_completions", status="200") == 1
    assert cluster.value("moonpool_gateway_request_seconds_count", route="chat_completions") == 1
    assert cluster.value("moonpool_gateway_request_seconds_sum", route="chat_completions") > 0
    assert cluster.value("moonpool_gateway_prompt_tokens_total") == submit.work.prompt_tokens
    assert cluster.value("moonpool_gateway_cached_tokens_total") == 16
    assert cluster.value("moonpool_gateway_completion_tokens_total") == output_tokens
    assert cluster.value("moonpool_gateway_ttft_seconds_count") == 1
    assert cluster.value("moonpool_gateway_token_gap_seconds_count") == output_tokens - 1
    assert cluster.value("moonpool_gateway_in_progress_requests") == 0


async def test_of_a_client_that_left_it_is_known_how_far_it_came(cluster, stream) -> None:
    asking = asyncio.create_task(cluster.post(CHAT, chat_body()))
    submit = await cluster.prefill.submits.get()
    await cluster.prefill.tokens(submit, ids("The lazy dog"), 0)
    await eventually(lambda: cluster.value("moonpool_gateway_ttft_seconds_count") == 1)
    asking.cancel()
    await eventually(lambda: request_lines(stream))
    (line,) = request_lines(stream)
    assert (line["status"], line["answered_tokens"]) == (499, len(ids("The lazy dog")))
    assert "completion_tokens" not in line
    assert cluster.value("moonpool_gateway_client_gone_requests_total") == 1


async def test_a_refusal_by_the_cluster_is_told_with_its_reason(cluster, stream) -> None:
    async def reject(request) -> Rejection:
        return Rejection(request.request_id, request.attempt, RejectReason.TTFT, "too much to do", 2.0)

    cluster.place = reject
    assert (await cluster.post(CHAT, chat_body())).status == 429
    (line,) = request_lines(stream)
    assert (line["status"], line["error_code"]) == (429, "rate_limit_exceeded")
    assert (line["error"], line["reason"]) == ("too much to do", "ttft")
    assert "ttft_s" not in line
    assert cluster.value("moonpool_gateway_rejected_requests_total", reason="ttft") == 1


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, chat_body(guided_regex=f"({SECRET}")),
        (CHAT, chat_body(response_format={"type": SECRET})),
        (CHAT, chat_body(user=SECRET * 1000)),
        (CHAT, {"model": SECRET, "messages": [{"role": "user", "content": "Hi"}]}),
        (CHAT, chat_body(messages=[{"role": SECRET, "content": "Hi"}])),
        (CHAT, chat_body(messages=[{"role": "user", "content": SECRET * 1000}])),
        ("/v1/completions", {"model": "tiny", "prompt": SECRET, "n": 0}),
        ("/tokenize", {"prompt": SECRET, "messages": []}),
        (f"/{SECRET}", {}),
    ],
)
async def test_no_line_holds_what_a_client_said(cluster, stream, path: str, body: dict[str, object]) -> None:
    reply = await cluster.post(path, body, {"authorization": f"Bearer {SECRET}"})
    assert reply.status in (400, 404)
    (line,) = request_lines(stream)
    assert SECRET not in stream.getvalue()
    assert line["status"] == reply.status
    assert line["error_code"] in (json.loads(reply.text)["error"]["code"], "invalid_request_error")


async def test_nor_do_those_of_a_good_request(cluster, stream) -> None:
    asking = asyncio.create_task(cluster.chat(user=SECRET, stop=[SECRET], guided_choice=["The", SECRET]))
    await cluster.decode.say(await cluster.prefill.submits.get(), ids(f"The {SECRET}")[:-1])
    assert (await asking)[0] == 200
    assert len(request_lines(stream)) == 1
    assert SECRET not in stream.getvalue()
