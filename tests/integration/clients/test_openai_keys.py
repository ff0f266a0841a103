"""OpenAI's own client where a gateway asks for keys and a tenant has limits: its typed errors, and its
retries that wait for room."""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest
from tests.support.loopback import only_loopback
from tests.support.loose_stack import LooseStack
from tests.support.openai_clients import ANSWER_S_MAX
from tests.support.timed_stack import timed_stack

from gateway.tenants.api_keys import hash_line

pytestmark = [pytest.mark.integration, pytest.mark.timeout(120)]

SERVICES = ("kvmeta-0", "conductor-0", "prefill-0", "decode-0")
KEYS = f"""
[tenants.acme]
keys = ["{hash_line("mp-acme")}"]
[tenants.small]
keys = ["{hash_line("mp-small")}"]
concurrent_requests_max = 1
"""
PROMPT = list(range(300, 340))


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LooseStack]:
    folder = tmp_path_factory.mktemp("keys")
    keys = folder / "keys.toml"
    keys.write_text(KEYS)
    with timed_stack(folder) as stack, only_loopback():
        for name in SERVICES:
            stack.launch(name)
        stack.launch("gateway-0", "--api-keys-file", str(keys))
        for name in (*SERVICES, "gateway-0"):
            stack.wait_ready(name)
        yield stack


def client_of(stack: LooseStack, key: str, **settings: Any) -> openai.OpenAI:
    return openai.OpenAI(
        base_url=f"{stack.url('gateway-0')}/v1",
        api_key=key,
        **{"max_retries": 0, "timeout": ANSWER_S_MAX} | settings,
    )


def ask(client: openai.OpenAI, **parameters: Any) -> Any:
    asked = {"model": "tiny", "prompt": PROMPT, "max_tokens": 4, "extra_body": {"ignore_eos": True}}
    return client.completions.create(**asked | parameters)


def test_without_a_key_that_is_known_nobody_is_let_in(stack: LooseStack) -> None:
    with client_of(stack, "mp-nobody") as client:
        for refused in (lambda: ask(client), lambda: client.models.list(), lambda: ask(client, stream=True)):
            with pytest.raises(openai.AuthenticationError) as raised:
                refused()
            assert raised.value.code == "invalid_api_key"
            assert "mp-nobody" not in raised.value.message


def test_with_its_key_a_tenant_is_answered(stack: LooseStack) -> None:
    with client_of(stack, "mp-acme") as client:
        assert [model.id for model in client.models.list()] == ["tiny"]
        assert ask(client).choices[0].finish_reason == "length"


def test_the_client_waits_for_its_tenants_room(stack: LooseStack) -> None:
    refused = threading.Event()

    def see(response: Any) -> None:
        if response.status_code == 429:
            assert response.headers["x-moonpool-rejected-reason"] == "tenant_concurrency"
            refused.set()

    with (
        openai.DefaultHttpx2Client(event_hooks={"response": [see]}) as http_client,
        client_of(stack, "mp-small", max_retries=20, http_client=http_client) as patient,
        client_of(stack, "mp-small") as client,
        ThreadPoolExecutor(max_workers=1) as waiting,
    ):
        stream = ask(client, max_tokens=2000, stream=True)
        next(iter(stream))
        with pytest.raises(openai.RateLimitError):
            ask(client)
        answer = waiting.submit(ask, patient)
        assert refused.wait(ANSWER_S_MAX)
        stream.close()
        assert answer.result(ANSWER_S_MAX).choices[0].finish_reason == "length"
