"""What could never fit is refused at the gateway, by the very rule by which workers refuse it."""

import asyncio
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.contexts import deregister, register
from tests.unit.gateway.fake_cluster import running_cluster
from tests.unit.gateway.model_files import write_model_folder

from cluster.logs import Level, Logger
from cluster.messages import InstanceRecord, ModelInfo, Work
from cluster.metrics import ServiceMetrics
from cluster.registry import Registry
from cluster.testing import FakeStore
from gateway.api.api_errors import ApiError
from gateway.api.model_limits import ModelLimits
from gateway.api.request_body import decode_chat
from gateway.api.validate import Generation, check_chat, sampling
from gateway.capacity import Capacity, KnownCapacity, capacity_of, limits_within
from kvhash import BLOCK_TOKENS
from kvindex.core import InstanceId
from policy.core import RequestId, Role, SamplingParams
from policy.load_sums import reserved_blocks
from worker.intake import WorkError, WorkLimits, _check_size

pytestmark = pytest.mark.unit

LIMITS = ModelLimits(name="tiny", context_tokens_max=1000, vocabulary_tokens=50, end_token_ids=(2,))


def generation(**parameters: object) -> Generation:
    messages = [{"role": "user", "content": "hello"}]
    body = {"model": "tiny", "messages": messages} | parameters
    return check_chat(decode_chat(json.dumps(body).encode()), LIMITS)


def record(name: str, blocks: int, *roles: Role, fingerprint: str = "ours") -> InstanceRecord:
    model = ModelInfo("tiny", fingerprint, 1000, BLOCK_TOKENS, 4096, 2, "float32")
    return InstanceRecord(InstanceId(name), 1, roles, "h", "http://h", model=model, blocks=blocks)


def workers_take(blocks: int, prompt_tokens: int, output_tokens_max: int) -> bool:
    work = Work(
        request_id=RequestId("r"),
        attempt=0,
        gateway=InstanceId("g"),
        fingerprint="ours",
        sampling=SamplingParams(output_tokens_max),
        prompt_tokens=prompt_tokens,
        prompt_token_ids=bytes(4 * prompt_tokens),
        prompt_parts=0,
        output_token_ids=b"",
        deadline_s=1.0,
    )
    try:
        _check_size(work, WorkLimits("ours", 50, LIMITS.context_tokens_max, blocks))
    except WorkError:
        return False
    return True


def refused(blocks: int, prompt_tokens: int, asked: Generation) -> ApiError | None:
    try:
        sampling(
            asked, prompt_tokens, limits_within(Capacity(blocks), LIMITS, asked, prompt_tokens), drawn_seed=0
        )
    except ApiError as error:
        return error
    return None


@given(blocks=st.integers(1, 80), prompt_tokens=st.integers(1, 1100), output_tokens_max=st.integers(1, 1100))
def test_what_passes_workers_take_and_what_does_not_they_refuse(
    blocks: int, prompt_tokens: int, output_tokens_max: int
) -> None:
    refusal = refused(blocks, prompt_tokens, generation(max_tokens=output_tokens_max))
    taken = workers_take(blocks, prompt_tokens, output_tokens_max)
    taken = taken and reserved_blocks(prompt_tokens, BLOCK_TOKENS) <= blocks
    if refusal is None:
        assert taken
        return
    assert (refusal.kind.status, refusal.code) == (400, "context_length_exceeded")
    # Workers cut an answer at the context; the gateway refuses it, as it says in so many words.
    over = prompt_tokens + output_tokens_max > LIMITS.context_tokens_max
    assert over or not taken


@given(blocks=st.integers(2, 80), prompt_tokens=st.integers(1, 1100))
def test_an_answer_of_no_given_length_is_cut_to_what_the_largest_holds(
    blocks: int, prompt_tokens: int
) -> None:
    asked = generation()
    try:
        limits = limits_within(Capacity(blocks), LIMITS, asked, prompt_tokens)
        output_tokens_max = sampling(asked, prompt_tokens, limits, 0).output_tokens_max
    except ApiError:
        assert not workers_take(blocks, prompt_tokens, 1) or prompt_tokens > 16 * (blocks - 1)
        return
    assert workers_take(blocks, prompt_tokens, output_tokens_max)
    whole = prompt_tokens + output_tokens_max == LIMITS.context_tokens_max
    assert whole or not workers_take(blocks, prompt_tokens, output_tokens_max + 1)


def test_the_message_names_the_limit_and_the_parameter() -> None:
    for asked, prompt_tokens, param, words in (
        (
            generation(),
            49,
            "messages",
            "prompt is too long: it has 49 tokens, must have at most the 48 that the largest instance of "
            "this cluster holds",
        ),
        (
            generation(max_completion_tokens=30),
            40,
            "max_completion_tokens",
            "max_completion_tokens is too large: 30, which with the 40 tokens of the prompt exceeds the 63 "
            "tokens that the largest instance of this cluster holds",
        ),
    ):
        with pytest.raises(ApiError) as caught:
            limits_within(Capacity(4), LIMITS, asked, prompt_tokens)
        assert caught.value.param == param
        assert caught.value.message == words


def test_several_answers_need_a_block_each_at_the_beginning() -> None:
    limits_within(Capacity(10), LIMITS, generation(n=6, max_tokens=1), 64)
    with pytest.raises(ApiError, match="n is 7, must be at most 6 for a prompt of 64 tokens") as caught:
        limits_within(Capacity(10), LIMITS, generation(n=7, max_tokens=1), 64)
    assert (caught.value.param, caught.value.kind.status) == ("n", 400)


def test_the_largest_of_each_role_counts_and_the_smaller_of_the_two() -> None:
    prefill, decode = record("p", 100, Role.PREFILL), record("d", 50, Role.DECODE)
    larger = record("d2", 70, Role.DECODE)
    assert capacity_of([prefill, decode, larger], "ours") == Capacity(70)
    assert capacity_of([prefill, record("c", 60, Role.PREFILL, Role.DECODE)], "ours") == Capacity(60)
    assert capacity_of([prefill, record("d3", 900, Role.DECODE, fingerprint="other")], "ours") is None
    assert capacity_of([decode], "ours") is None
    assert capacity_of([], "ours") is None
    assert limits_within(None, LIMITS, generation(n=100, max_tokens=5000), 999) is LIMITS


async def test_through_the_api_it_is_named_and_nothing_is_placed(tmp_path) -> None:
    async with running_cluster(write_model_folder(tmp_path), capacity=Capacity(4)) as cluster:
        for parameters, param in (
            ({"prompt": [5] * 49}, "prompt"),
            ({"prompt": [[5] * 8, [5] * 49]}, "prompt[1]"),
            ({"prompt": [5] * 40, "max_tokens": 24}, "max_tokens"),
            ({"prompt": [5] * 33, "max_tokens": 8, "n": 2}, "n"),
        ):
            reply = await cluster.post("/v1/completions", {"model": "tiny"} | parameters)
            error = json.loads(reply.text)["error"]
            assert (reply.status, error["code"], error["param"]) == (400, "context_length_exceeded", param)
        assert cluster.scheduled == []
        asking = asyncio.create_task(cluster.post("/v1/completions", {"model": "tiny", "prompt": [5] * 48}))
        submit = await cluster.prefill.submits.get()
        assert submit.work.sampling.output_tokens_max == 15
        await cluster.decode.say(submit, [7])
        assert (await asking).status == 200


async def test_it_follows_the_registry() -> None:
    store = FakeStore()
    register(store, record("p", 100, Role.PREFILL), record("d", 50, Role.DECODE))
    registry = Registry(store.control(), ServiceMetrics(), Logger(Level.ERROR), grace_s=1.0)
    await registry.start(timeout_s=5)
    known = KnownCapacity(registry, "ours")
    assert known() == Capacity(50)
    register(store, record("d2", 80, Role.DECODE))
    await registry.wait_for(lambda instances: len(instances) == 3, 5)
    assert known() == Capacity(80)
    deregister(store, "p")
    await registry.wait_for(lambda instances: len(instances) == 2, 5)
    assert known() is None
    await registry.close()
