"""What clients get wrong is told to them by name and limit; what peers get wrong is counted and dropped."""

import re
import urllib.request
from typing import Any

import nats
import orjson
import pytest
from tests.support.stack import RunningStack

from cluster import subjects
from cluster.bus import Received
from cluster.messages import Decision
from kvindex.core import InstanceId
from moonpool.api import ApiError
from moonpool.cluster_client import bus

pytestmark = [pytest.mark.integration, pytest.mark.timeout(180)]

CONTEXT_TOKENS = 2048
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
