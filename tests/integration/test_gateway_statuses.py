"""What a client is told while the cluster has nobody, too little, or no time: each with its own status."""

import json
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from http.client import HTTPResponse
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import pytest
from tests.support.eventually import soon
from tests.support.loose_stack import LooseStack, loose_stack

from engine.layout import KVLayout
from engine.model_folder import ModelConfig
from engine.tiny import make_tiny_model

pytestmark = [pytest.mark.integration, pytest.mark.timeout(240)]

CONTEXT_TOKENS = 4096
PREFILL_BLOCKS, DECODE_BLOCKS = 192, 128
"""The smaller one holds 2,047 tokens."""
ANSWER_S_MAX = 30.0
SETTLES_S_MAX = 15.0


@dataclass(frozen=True)
class Told:
    status: int
    headers: dict[str, str]
    body: dict[str, Any]

    @property
    def error(self) -> dict[str, Any]:
        return self.body["error"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "tiny"
    make_tiny_model(folder, context=CONTEXT_TOKENS)
    return folder


@pytest.fixture
def stack(tmp_path: Path, model: Path) -> Iterator[LooseStack]:
    # A registration outlasts what is paused here.
    with loose_stack(tmp_path, model, lease_ttl_s=30.0) as running:
        yield running


def pool(model: Path, blocks: int) -> tuple[str, str]:
    return "--pool-bytes", str(blocks * KVLayout.of(ModelConfig.load(model)).block_bytes)


def start_workers(stack: LooseStack, model: Path) -> None:
    stack.launch("prefill-0", *pool(model, PREFILL_BLOCKS))
    stack.launch("decode-0", *pool(model, DECODE_BLOCKS))
    stack.wait_ready("prefill-0")
    stack.wait_ready("decode-0")


def ask(stack: LooseStack, gateway: str = "gateway-0", **parameters: object) -> Told:
    try:
        with urlopen(asked(stack, gateway, parameters), timeout=ANSWER_S_MAX) as answer:
            return Told(answer.status, lowered(answer.headers), json.load(answer))
    except HTTPError as error:
        return Told(error.code, lowered(error.headers), json.load(error))


def streaming(stack: LooseStack, **parameters: object) -> HTTPResponse:
    request = asked(stack, "gateway-0", {"stream": True} | parameters)
    response: HTTPResponse = urlopen(request, timeout=ANSWER_S_MAX)
    return response


def asked(stack: LooseStack, gateway: str, parameters: dict[str, object]) -> Request:
    body = {"model": "tiny", "prompt": [5, 6, 7], "max_tokens": 4, "ignore_eos": True} | parameters
    url, headers = stack.url(gateway) + "/v1/completions", {"content-type": "application/json"}
    return Request(url, json.dumps(body).encode(), headers)


def value(stack: LooseStack, gateway: str, metric: str) -> float:
    with urlopen(stack.url(gateway) + "/metrics", timeout=ANSWER_S_MAX) as answer:
        lines = answer.read().decode().splitlines()
    (line,) = (line for line in lines if line.startswith(metric + " "))
    return float(line.split()[1])


def lowered(headers: Any) -> dict[str, str]:
    return {name.lower(): value for name, value in headers.items()}


def settled(stack: LooseStack, **parameters: object) -> Told:
    """The answer once conductors know all that has just been started."""
    ends_at_s = time.monotonic() + SETTLES_S_MAX
    while (told := ask(stack, **parameters)).status == 503 and time.monotonic() < ends_at_s:
        time.sleep(0.1)
    return told


def expect_unavailable(told: Told, reason: str) -> None:
    assert told.status == 503, told
    assert int(told.headers["retry-after"]) >= 1
    assert told.headers["x-moonpool-rejected-reason"] == told.error["reason"] == reason
    assert (told.error["type"], told.error["code"]) == ("service_unavailable_error", "service_unavailable")
    assert told.headers["x-request-id"]


def expect_decided_at_the_gateway(stack: LooseStack) -> None:
    """Whatever the cluster has."""
    for parameters, status, code, param in (
        ({"model": "other"}, 404, "model_not_found", "model"),
        ({"guided_regex": "(a"}, 400, None, "guided_regex"),
        ({"guided_json": {"type": "objct"}}, 400, None, "guided_json"),
        ({"prompt": [5] * CONTEXT_TOKENS}, 400, "context_length_exceeded", "prompt"),
        ({"prompt": "Hi", "max_tokens": CONTEXT_TOKENS}, 400, "context_length_exceeded", "max_tokens"),
    ):
        told = ask(stack, **parameters)
        assert (told.status, told.error["code"], told.error["param"]) == (status, code, param)


def test_while_somebody_is_missing(stack: LooseStack, model: Path) -> None:
    stack.start("gateway-0")
    expect_unavailable(ask(stack), "no_conductor")
    expect_decided_at_the_gateway(stack)
    stack.start("kvmeta-0", "conductor-0")
    expect_unavailable(ask(stack), "no_instance")
    expect_decided_at_the_gateway(stack)
    stack.launch("prefill-0", *pool(model, PREFILL_BLOCKS))
    stack.wait_ready("prefill-0")
    expect_unavailable(ask(stack), "no_instance")
    stack.launch("decode-0", *pool(model, DECODE_BLOCKS))
    stack.wait_ready("decode-0")
    assert settled(stack).status == 200
    stack.kill("conductor-0")
    expect_unavailable(ask(stack), "no_conductor")


def test_what_no_instance_holds_and_what_it_just_holds(stack: LooseStack, model: Path) -> None:
    """The limit is that of the smaller of the two, to the token; nothing is placed for what exceeds it."""
    stack.start("kvmeta-0", "conductor-0", "gateway-0")
    start_workers(stack, model)
    assert settled(stack).status == 200
    most, longest_prompt = DECODE_BLOCKS * 16 - 1, (DECODE_BLOCKS - 1) * 16
    placed = placements(stack)
    for parameters, param in (
        ({"prompt": [5] * (longest_prompt + 1)}, "prompt"),
        ({"prompt": [5] * 2000, "max_tokens": most - 2000 + 1}, "max_tokens"),
        ({"prompt": [5] * 2000, "n": 4}, "n"),
    ):
        told = ask(stack, **parameters)
        assert (told.status, told.error["code"]) == (400, "context_length_exceeded"), told
        assert told.error["param"] == param
    assert placements(stack) == placed
    for prompt_tokens in (longest_prompt, 2020):
        told = ask(stack, prompt=[5] * prompt_tokens, max_tokens=most - prompt_tokens)
        assert told.status == 200, told
        assert told.body["usage"]["completion_tokens"] == most - prompt_tokens
        assert told.body["choices"][0]["finish_reason"] == "length"
    assert placements(stack) == placed + 2, "each fitted where it was placed first"


def placements(stack: LooseStack) -> float:
    return value(stack, "gateway-0", "moonpool_gateway_placements_total")


def test_overload_deadlines_and_what_drains(stack: LooseStack, model: Path) -> None:
    stack.start("kvmeta-0", "conductor-0", "gateway-0")
    stack.start("gateway-1", flags=("--request-timeout-s", "4.0", "--requests-max", "1"))
    start_workers(stack, model)
    assert settled(stack).status == 200

    told = ask(stack, prompt=[7] * 2000, ttft_ms_max=1)
    assert (told.status, told.headers["x-moonpool-rejected-reason"]) == (429, "ttft"), told
    assert told.error["type"] == "rate_limit_error"
    assert int(told.headers["retry-after"]) >= 1

    stack.pause("prefill-0")
    answers: list[Told] = []
    waiting = threading.Thread(target=lambda: answers.append(ask(stack, gateway="gateway-1")))
    waiting.start()
    soon(
        lambda: value(stack, "gateway-1", "moonpool_gateway_in_progress_requests") == 1,
        SETTLES_S_MAX,
        look_s=0.01,
    )
    told = ask(stack, gateway="gateway-1")
    assert (told.status, told.headers["x-moonpool-rejected-reason"]) == (429, "gateway_full"), told
    assert int(told.headers["retry-after"]) >= 1
    waiting.join(ANSWER_S_MAX)
    assert answers[0].status == 504, answers
    assert (answers[0].error["type"], answers[0].error["code"]) == ("timeout_error", "deadline_exceeded")
    stack.signal("prefill-0", signal.SIGCONT)
    assert settled(stack).status == 200

    with streaming(stack, max_tokens=1000) as stream:
        assert stream.readline().startswith(b"data: {")
        stack.signal("decode-0", signal.SIGTERM)
        soon(
            lambda: any(line.get("message") == "draining" for line in stack.log_lines("decode-0")),
            SETTLES_S_MAX,
            look_s=0.01,
        )
        told = ask(stack)
        assert told.status == 503, told
        assert int(told.headers["retry-after"]) >= 1
        assert stream.read().rstrip().endswith(b"data: [DONE]"), "who was there before is served to the end"
    assert stack.wait_end("decode-0") == 0
    expect_unavailable(ask(stack), "no_instance")
