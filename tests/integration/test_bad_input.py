"""What clients get wrong is told to them by name and limit; what peers get wrong is counted and dropped."""

import asyncio
import random
import re
import urllib.request
from typing import Any

import nats
import orjson
import pytest
from tests.support.bad_requests import BadRequest, bad_requests
from tests.support.raw_http import RawClient, post
from tests.support.scrape import metrics
from tests.support.stack import RunningStack

from cluster import subjects
from cluster.bus import Received
from cluster.messages import Decision
from kvindex.core import InstanceId
from moonpool.api import ApiError
from moonpool.cluster_client import bus

pytestmark = [pytest.mark.integration, pytest.mark.timeout(180)]

CONTEXT_TOKENS = 2048
CLIENTS = 12
ERROR_BYTES_MAX = 2000
"""Whatever was sent, little of it comes back."""
GOOD_CHAT = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 4}
GOOD_TEXT = {"prompt": "hello", "max_tokens": 4}

BAD_REQUESTS = [
    ("/chat/completions", {**GOOD_CHAT, "model": "gpt-5"}, 404, "model_not_found", "gpt-5"),
    ("/chat/completions", {**GOOD_CHAT, "max_tokens": 0}, 400, None, "max_tokens"),
    ("/chat/completions", {**GOOD_CHAT, "max_tokens": -1}, 400, None, "max_tokens"),
    ("/completions", {**GOOD_TEXT, "max_tokens": 0}, 400, None, "max_tokens"),
    ("/completions", {**GOOD_TEXT, "max_tokens": "many"}, 400, "invalid_type", "max_tokens"),
    ("/completions", {**GOOD_TEXT, "temperature": 9}, 400, None, "temperature"),
    ("/completions", {**GOOD_TEXT, "prompt": [1, 512]}, 400, None, "511"),
    ("/completions", {"max_tokens": 4}, 400, "missing_required_parameter", "prompt"),
    (
        "/completions",
        {**GOOD_TEXT, "prompt": [5] * CONTEXT_TOKENS},
        400,
        "context_length_exceeded",
        str(CONTEXT_TOKENS),
    ),
    (
        "/completions",
        {"prompt": [5] * 2000, "max_tokens": 100},
        400,
        "context_length_exceeded",
        str(CONTEXT_TOKENS),
    ),
    (
        "/chat/completions",
        {"messages": [{"role": "user", "content": "word " * 3000}]},
        400,
        "context_length_exceeded",
        str(CONTEXT_TOKENS),
    ),
]

BAD_PAYLOADS = [
    b"",
    b"not json",
    b"\xff\xfe",
    b"[]",
    b"{}",
    b"[" * 5000,
    b'{"v": 1, "kind": "submit"}',
    b'{"v":1,"kind":"no such kind","sender":"x","incarnation":1,"seq":1,"sent_at_s":0.0,"body":{}}',
    b'{"v":1,"kind":"load","sender":"x","incarnation":1,"seq":1,"sent_at_s":0.0,"body":{"instance":7}}',
    b'{"v":"one","kind":"describe","sender":"x","incarnation":1,"seq":1,"sent_at_s":0.0,"body":{}}',
]

DROPPED = re.compile(
    r'^moonpool_bus_dropped_messages_total\{family="(\w+)",reason="\w+"\} (\S+)$', re.MULTILINE
)


@pytest.mark.parametrize(("path", "body", "status", "code", "named"), BAD_REQUESTS)
def test_a_bad_request_is_refused_by_name(
    tiny_stack: RunningStack, path: str, body: dict[str, object], status: int, code: str | None, named: str
) -> None:
    with pytest.raises(ApiError) as refused:
        tiny_stack.api.post(path, {"model": tiny_stack.state.model, **body})
    assert refused.value.status == status
    assert named in str(refused.value)
    if code is not None:
        assert refused.value.code == code


def test_malformed_json_is_a_400(tiny_stack: RunningStack) -> None:
    request = urllib.request.Request(
        f"{tiny_stack.state.url}/chat/completions",
        data=b'{"model": ',
        headers={"Content-Type": "application/json"},
    )
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(request, timeout=30)
    with refused.value as answer:
        assert answer.status == 400
        assert orjson.loads(answer.read())["error"]["code"] == "invalid_json"


async def test_a_prompt_over_the_context_is_never_placed(tiny_stack: RunningStack) -> None:
    decisions: list[Decision] = []

    async def note(received: Received) -> None:
        assert isinstance(received.body, Decision)
        decisions.append(received.body)

    model = tiny_stack.state.model
    async with bus(tiny_stack.state.nats_url, timeout_s=5) as connection:
        subscription = await connection.subscribe(subjects.DECISION, note)
        await connection.flush(timeout_s=5)
        with pytest.raises(ApiError, match="context"):
            tiny_stack.api.post("/completions", {"model": model, "prompt": [5] * 3000, "max_tokens": 1})
        tiny_stack.api.post("/completions", {"model": model, "prompt": [5] * 33, "max_tokens": 1})
        await connection.flush(timeout_s=5)
        await subscription.unsubscribe()
    assert [decision.prompt_tokens for decision in decisions] == [33]


@pytest.mark.parametrize("seed", range(2))
async def test_bad_requests_among_good_ones(tiny_stack: RunningStack, seed: int) -> None:
    """Each is refused by name and with OpenAI's error body, every good one is served, and nothing but good
    ones was ever placed or reached an instance."""
    bad, numbers = list(bad_requests()), random.Random(seed)
    numbers.shuffle(bad)
    assert len(bad) >= 50
    url, before = tiny_stack.state.url, instance_counts(tiny_stack)
    placed: list[str] = []
    troubles: list[str] = []
    names: dict[str, str] = {}

    async def note(received: Received) -> None:
        assert isinstance(received.body, Decision)
        placed.append(received.body.request_id)

    async with bus(tiny_stack.state.nats_url, timeout_s=5) as connection:
        subscription = await connection.subscribe(subjects.DECISION, note)
        await connection.flush(timeout_s=5)
        room = asyncio.Semaphore(CLIENTS)

        async def one(request: BadRequest | None) -> str | None:
            async with room:
                if request is not None:
                    troubles.append(await trouble_with(url, request, names))
                    return None
                return await good_answer(url, tiny_stack.state.model)

        mixed = [each for request in bad for each in (request, None)]
        ids = [one_id for one_id in await asyncio.gather(*map(one, mixed)) if one_id is not None]
        ids += [await good_answer(url, tiny_stack.state.model) for _ in range(5)]
        await connection.flush(timeout_s=5)
        await subscription.unsubscribe()
    assert "\n".join(filter(None, troubles)) == ""
    assert len(ids) == len(bad) + 5
    assert [names.get(one_id, one_id) for one_id in placed if one_id not in ids] == []
    # A conductor that is slow to answer is asked twice, and each decides.
    assert set(placed) == set(ids)
    tiny_stack.wait_status(lambda status: status["totals"]["requests"] == 0)
    after = instance_counts(tiny_stack)
    assert after["prefills"] - before["prefills"] == len(ids)
    assert after["reservations"] - before["reservations"] == len(ids)
    assert after["given_up"] == before["given_up"]


async def trouble_with(url: str, request: BadRequest, names: dict[str, str]) -> str:
    """What is wrong with how a bad request was answered; empty where nothing is. Its name is noted under the
    gateway's id of it."""
    client = await RawClient.connect(url)
    try:
        await client.send(request.data)
        if request.status is None:
            return ""
        answer = await client.answer()
        names[answer.headers.get("x-request-id", "")] = request.name
    except (ConnectionError, asyncio.IncompleteReadError, TimeoutError) as error:
        return f"{request.name}: no answer: {error!r}"
    finally:
        await client.hang_up()
    right = (
        answer.status == request.status
        and answer.headers["content-type"].startswith("application/json")
        and answer.json["error"].keys() >= {"message", "type", "param", "code"}
        and request.named in answer.json["error"]["message"]
        and len(answer.body) < ERROR_BYTES_MAX
    )
    return "" if right else f"{request.name}: {answer.status} {answer.body[:ERROR_BYTES_MAX]!r}"


async def good_answer(url: str, model: str) -> str:
    """The gateway's own id of a request that is served."""
    answer = await post(url, "/v1/completions", {"model": model, **GOOD_TEXT, "ignore_eos": True})
    assert answer.status == 200, answer.body
    assert answer.json["usage"]["completion_tokens"] == GOOD_TEXT["max_tokens"]
    return str(answer.json["id"]).removeprefix("cmpl-")


def instance_counts(stack: RunningStack) -> dict[str, float]:
    """What instances and gateway have counted, all together."""
    seen = [metrics(row["http_url"]) for row in stack.status()["instances"]]
    names = {
        "prefills": "moonpool_prefills_total",
        "reservations": "moonpool_reservations_total",
        "given_up": "moonpool_gateway_given_up_notices_total",
    }
    return {name: sum(one.value(metric) for one in seen) for name, metric in names.items()}


async def test_bad_messages_on_every_subject_are_counted_and_dropped(tiny_stack: RunningStack) -> None:
    before = tiny_stack.status()
    dropped_before = dropped_by_family(before)
    names = [InstanceId(instance["instance"]) for instance in before["instances"]]
    targets = [subjects.SCHEDULE, subjects.SCHEDULE_STANDBY, subjects.DECISION, subjects.KVMETA_MATCH]
    for name in [*names, InstanceId("nobody")]:
        targets += [subjects.load(name), subjects.kv_events(name), subjects.kv_inventory(name)]
        targets += [subjects.instance(name), subjects.stream(name)]
    await publish_all(tiny_stack.state.nats_url, targets, BAD_PAYLOADS)

    answer = tiny_stack.api.post(
        "/completions", {"model": tiny_stack.state.model, **GOOD_TEXT, "temperature": 0}
    )
    assert answer["usage"]["completion_tokens"] == 4
    after = tiny_stack.wait_status(lambda status: all_dropped(dropped_before, dropped_by_family(status)))
    # The same processes, and none of them took anything for real.
    assert [(i["instance"], i["incarnation"]) for i in after["instances"]] == [
        (i["instance"], i["incarnation"]) for i in before["instances"]
    ]
    assert after["totals"]["unreachable"] == 0


LISTENED_FAMILIES = ("schedule", "load", "kv", "kv_inventory", "kvmeta", "instance", "stream")


def all_dropped(before: dict[str, float], after: dict[str, float]) -> bool:
    """Every bad message was counted by somebody, on each subject that somebody listens to."""
    return all(
        after.get(family, 0) - before.get(family, 0) >= len(BAD_PAYLOADS) for family in LISTENED_FAMILIES
    )


def dropped_by_family(status: dict[str, Any]) -> dict[str, float]:
    """Messages that the services have dropped, all of them together."""
    totals: dict[str, float] = {}
    for instance in status["instances"]:
        with urllib.request.urlopen(f"{instance['http_url']}/metrics", timeout=30) as answer:
            for family, count in DROPPED.findall(answer.read().decode()):
                totals[family] = totals.get(family, 0) + float(count)
    return totals


async def publish_all(nats_url: str, targets: list[str], payloads: list[bytes]) -> None:
    """Without Moonpool's own bus, which would not send such things."""
    client = await nats.connect(nats_url)
    try:
        for subject in targets:
            for payload in payloads:
                await client.publish(subject, payload)
        await client.flush()
    finally:
        await client.close()
