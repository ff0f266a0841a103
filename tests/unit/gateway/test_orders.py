"""The orders of one HTTP request: numbers, leaders and seeds."""

import hashlib
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.tracing import TraceContext
from gateway.answers.orders import SEED_BITS, choices_of, seed_of
from gateway.answers.placing import Order
from gateway.text_model import Prompt
from kvhash import namespace
from policy.core import RequestId, SamplingParams

pytestmark = pytest.mark.unit

ORDER = Order(
    request_id=RequestId("r"),
    model="tiny",
    fingerprint="f",
    namespace=namespace(b"seed", "f"),
    prompt=Prompt(bytes(12), b""),
    sampling=SamplingParams(10, seed=7),
    trace=TraceContext.new(),
)


@given(seed=st.integers(0, 2**SEED_BITS - 1), number=st.integers(1, 127))
def test_seeds_are_what_is_documented_and_samplers_take_them(seed: int, number: int) -> None:
    assert seed_of(seed, 0) == seed, "so the first answer is the same whatever n is"
    both = seed.to_bytes(8, "little") + number.to_bytes(8, "little")
    digest = int.from_bytes(hashlib.blake2b(both, digest_size=8).digest(), "little")
    assert seed_of(seed, number) == digest & (2**63 - 1)


def test_seeds_of_one_request_differ() -> None:
    assert len({seed_of(5, number) for number in range(128)}) == 128


@pytest.mark.parametrize(("prompts", "answers"), [(1, 1), (3, 1), (1, 3), (2, 3)])
def test_answers_are_numbered_prompt_by_prompt(prompts: int, answers: int) -> None:
    leaders = [replace(ORDER, request_id=RequestId(f"r{place}")) for place in range(prompts)]
    choices = choices_of(leaders, answers)
    assert [choice.index for choice in choices] == list(range(prompts * answers))
    assert [choice.leader for choice in choices] == [i // answers * answers for i in range(prompts * answers)]
    assert [choice.leads for choice in choices] == [i % answers == 0 for i in range(prompts * answers)]
    assert len({choice.order.request_id for choice in choices}) == prompts * answers
    for choice in choices:
        # The cluster is asked for room for all answers to a prompt, with the first of them.
        assert choice.order.answers == (answers if choice.leads else 1)
        assert choice.order.sampling.seed == seed_of(7, choice.index % answers)
