"""Keys, limits and whose cache it is, on a real socket in front of a scripted cluster."""

import asyncio
import json
from collections.abc import Mapping

import pytest
from tests.unit.gateway.fake_cluster import chat_body, ids, running_cluster

from gateway.tenants.api_keys import hash_line
from gateway.tenants.identity import Identity, salt_of
from gateway.tenants.tenants import keys_in, table_of
from policy.core import Rejection, RejectReason

pytestmark = pytest.mark.unit

CHAT = "/v1/chat/completions"
LONG = [{"role": "user", "content": "Tell me of the capital of France, of its river and its towers. " * 4}]
FILE = f"""
[tenants.acme]
keys = ["{hash_line("mp-acme")}"]
[tenants.beta]
keys = ["{hash_line("mp-beta")}"]
[tenants.left]
keys = ["{hash_line("mp-left")}"]
share_cache = "both"
[tenants.right]
keys = ["{hash_line("mp-right")}"]
share_cache = "both"
[tenants.small]
keys = ["{hash_line("mp-small")}"]
requests_per_minute = 3
tokens_per_minute = 180
concurrent_requests_max = 1
"""
SAID = "Paris."


@pytest.fixture
async def cluster(folder):
    async with running_cluster(folder, identity=Identity(table_of(keys_in(FILE, "f")))) as running:
        yield running


def key(tenant: str) -> dict[str, str]:
    return {"Authorization": f"Bearer mp-{tenant}"}


async def answered(cluster, headers: Mapping[str, str], **parameters: object):
    """The reply to a chat that is answered with SAID, and what prefill was given."""
    asking = asyncio.create_task(cluster.post(CHAT, chat_body(**parameters), dict(headers)))
    submit = await asyncio.wait_for(cluster.prefill.submits.get(), 5)
    await cluster.decode.say(submit, ids(SAID))
    return await asking, submit


async def test_without_a_key_nothing_is_asked_of_the_cluster(cluster) -> None:
    for headers in ({}, {"Authorization": "Bearer mp-wrong"}, {"Authorization": "Basic mp-acme"}):
        reply = await cluster.post(CHAT, chat_body(), headers)
        assert reply.status == 401
        assert reply.headers["www-authenticate"] == "Bearer"
        error = json.loads(reply.text)["error"]
        assert (error["type"], error["code"]) == ("invalid_request_error", "invalid_api_key")
        assert "mp-wrong" not in reply.text
    for path in ("/v1/models", "/v1/models/tiny"):
        async with cluster.session.get(cluster.url + path) as reply:
            assert reply.status == 401
        async with cluster.session.get(cluster.url + path, headers=key("acme")) as reply:
            assert reply.status == 200
    assert not cluster.scheduled
    assert cluster.requests.in_progress == 0


async def test_a_tenant_is_known_to_the_cluster_by_name(cluster) -> None:
    reply, submit = await answered(cluster, {"api-key": "mp-acme"})
    assert reply.status == 200
    assert cluster.scheduled[0].tenant == submit.work.tenant == "acme"
    assert submit.work.tenant_salt == salt_of("acme", "")
    assert cluster.value("moonpool_gateway_tenant_requests_total", tenant="acme") == 1
    tokens = submit.work.prompt_tokens + len(ids(SAID)) + 1
    assert cluster.value("moonpool_gateway_tenant_tokens_total", tenant="acme") == tokens


async def test_no_block_is_anothers_but_within_a_group_and_a_salt(cluster) -> None:
    async def hashes(tenant: str, **parameters: object) -> bytes:
        _, submit = await answered(cluster, key(tenant), messages=LONG, **parameters)
        question = cluster.scheduled[-1]
        assert len(question.block_hashes) >= 16
        assert submit.work.tenant_salt
        return question.block_hashes

    acme = await hashes("acme")
    assert acme == await hashes("acme")
    others = [
        await hashes("beta"),
        await hashes("left"),
        await hashes("acme", cache_salt="x"),
        await hashes("beta", cache_salt="x"),
    ]
    assert len({acme, *others}) == 5
    assert await hashes("left") == await hashes("right")
    assert await hashes("left", cache_salt="x") != await hashes("left")


async def test_limits_are_told_and_held(cluster) -> None:
    reply, submit = await answered(cluster, key("small"), max_tokens=100)
    used = submit.work.prompt_tokens + len(ids(SAID)) + 1
    assert reply.headers["x-ratelimit-limit-requests"] == "3"
    assert reply.headers["x-ratelimit-remaining-requests"] == "2"
    assert reply.headers["x-ratelimit-limit-tokens"] == "180"
    # As long as it ran, the longest answer that it might have had was set aside; when this is said, what it
    # took is known.
    assert int(reply.headers["x-ratelimit-remaining-tokens"]) in (180 - used, 181 - used)
    too_long = await cluster.post(CHAT, chat_body(max_tokens=170), key("small"))
    assert too_long.status == 400
    error = json.loads(too_long.text)["error"]
    assert (error["param"], error["code"]) == ("max_tokens", "tokens_per_minute_exceeded")
    await answered(cluster, key("small"), max_tokens=10)
    refused = await cluster.post(CHAT, chat_body(max_tokens=10), key("small"))
    assert refused.status == 429
    assert refused.headers["x-moonpool-rejected-reason"] == "tenant_requests"
    assert int(refused.headers["retry-after"]) >= 1
    assert refused.headers["x-ratelimit-remaining-requests"] == "0"
    assert refused.headers["x-request-id"]
    assert cluster.value(
        "moonpool_gateway_tenant_rejected_requests_total", tenant="small", reason="tenant_requests"
    )


async def test_one_at_a_time_until_the_last_byte(cluster) -> None:
    body = chat_body(stream=True, max_tokens=5)
    asking = asyncio.create_task(cluster.post(CHAT, body, key("small")))
    submit = await asyncio.wait_for(cluster.prefill.submits.get(), 5)
    refused = await cluster.post(CHAT, chat_body(), key("small"))
    assert refused.headers["x-moonpool-rejected-reason"] == "tenant_concurrency"
    await cluster.decode.say(submit, ids(SAID))
    reply = await asking
    assert reply.status == 200
    assert reply.headers["x-ratelimit-limit-tokens"] == "180"
    (await answered(cluster, key("small"), max_tokens=5))


async def test_what_the_cluster_refuses_costs_no_tokens(cluster) -> None:
    async def refuse(request) -> object:
        return Rejection(request.request_id, request.attempt, RejectReason.OVERLOADED, "full", 1.0)

    cluster.place = refuse
    reply = await cluster.post(CHAT, chat_body(max_tokens=100), key("small"))
    assert reply.status == 429
    assert reply.headers["x-ratelimit-remaining-tokens"] == "180"


async def test_a_clients_id_comes_back_whatever_happens(cluster) -> None:
    named = {"x-request-id": "mine-1"}
    for path, headers in ((CHAT, {}), ("/v1/nothing", {}), (CHAT, key("acme"))):
        reply = await cluster.post(path, {"model": 1}, {**headers, **named})
        assert reply.status in (400, 401, 404)
        assert reply.headers["x-request-id"] == "mine-1"
    for bad in ("x" * 129, "mine\tone", "müller"):
        reply = await cluster.post(CHAT, {}, {"x-request-id": bad})
        assert reply.headers["x-request-id"] != bad
        assert len(reply.headers["x-request-id"]) == 32
