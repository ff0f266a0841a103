"""Structured output through prefill and decode: valid, the same on every way, or refused at once."""

import json
import re
import threading
from dataclasses import replace
from pathlib import Path

import jsonschema
import pytest
from tests.support.engines import sampled_answer
from tests.support.structures import tokenizer
from tests.support.workers import Workers, packed, prompt, workers

from cluster.messages import Accepted, Commit, RefusalReason, Refused, Reserve, Reserved
from kvhash import BLOCK_TOKENS
from kvindex.core import InstanceId
from policy.core import FinishReason, RequestId, Role, SamplingParams, StructureKind, StructureSpec
from policy.preempt import HostCopyCost
from structures import compiler
from structures.grammar import grammar_of
from worker import structures

pytestmark = pytest.mark.unit

END = 2
COUPLED = {"w": (Role.PREFILL, Role.DECODE)}
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "size": {"enum": ["small", "medium", "large"]},
        "tags": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 99}, "maxItems": 3},
    },
    "required": ["name", "size", "tags"],
    "additionalProperties": False,
}
SPEC = StructureSpec(StructureKind.JSON_SCHEMA, json.dumps(SCHEMA))
HELD = SamplingParams(250, stop_token_ids=(END,), temperature=1.0, seed=11, structure=SPEC)


def text_of(folder: Path, token_ids: list[int]) -> str:
    assert token_ids[-1] == END
    return tokenizer(folder).decode(token_ids[:-1], skip_special_tokens=False)


def expect_valid(folder: Path, token_ids: list[int]) -> None:
    jsonschema.Draft202012Validator(SCHEMA).validate(json.loads(text_of(folder, token_ids)))


def value_of(both: Workers, name: str, instance: str, **labels: str) -> float:
    return both.apps[instance]._context.metrics.registry.get_sample_value(name, labels) or 0.0


async def test_answers_are_valid_and_what_drawing_every_token_gives(pair: Workers, tiny: Path) -> None:
    samplings = {f"r{seed}": replace(HELD, seed=seed) for seed in range(4)}
    for index, (name, sampling) in enumerate(samplings.items()):
        await pair.submit(name, prompt(20 + 15 * index), 0, sampling=sampling)
    answers = set()
    for index, (name, sampling) in enumerate(samplings.items()):
        finish = await pair.ear.wait_finish(name)
        answer = pair.ear.answer(name)
        assert finish.reason is FinishReason.STOP
        assert finish.output_tokens == len(answer)
        expect_valid(tiny, answer)
        assert answer == sampled_answer(tiny, prompt(20 + 15 * index), sampling)
        answers.add(tuple(answer))
    assert len(answers) == len(samplings)
    await pair.quiet()


async def test_forced_tokens_take_no_step_each(tiny: Path) -> None:
    text = "there is only this one answer to it"
    spec = StructureSpec(StructureKind.CHOICE, json.dumps([text, "x"]))
    bias = ((tokenizer(tiny).token_to_id("x"), -100.0),)
    sampling = SamplingParams(100, structure=spec, logit_bias=bias)
    async with workers(tiny, COUPLED) as one:
        await one.submit("r", prompt(20), 0, at=("w", "w"), sampling=sampling)
        finish = await one.ear.wait_finish("r")
        answer = one.ear.answer("r")
        assert text_of(tiny, answer) == text
        assert (finish.reason, finish.output_tokens) == (FinishReason.STOP, len(answer))
        forced = value_of(one, "moonpool_forced_tokens_total", "w")
        assert forced >= len(answer) - 1
        assert one.apps["w"]._node.steps.decode_tokens_total == 0, "the end was forced too: no step is left"
        await one.quiet()


@pytest.mark.parametrize("tokens", [1, 2, 7, 20])
async def test_cut_by_its_length_it_says_so(pair: Workers, tiny: Path, tokens: int) -> None:
    whole = sampled_answer(tiny, prompt(30), HELD)
    await pair.submit("r", prompt(30), 0, sampling=replace(HELD, output_tokens_max=tokens))
    finish = await pair.ear.wait_finish("r")
    assert (finish.reason, finish.output_tokens) == (FinishReason.LENGTH, tokens)
    assert pair.ear.answer("r") == whole[:tokens]
    await pair.quiet()


async def test_a_later_attempt_goes_on_from_any_token(pair: Workers, tiny: Path) -> None:
    whole = sampled_answer(tiny, prompt(40), HELD)
    for taken in range(1, len(whole) - 1, 5):
        output = packed(whole[:taken])
        name = f"r{taken}"
        await pair.submit(name, prompt(40), 0, sampling=HELD, attempt=1, output_token_ids=output)
        await pair.ear.wait_finish(name, attempt=1)
        assert pair.ear.answer(name, attempt=1) == whole[taken:]
    await pair.quiet()


@pytest.mark.parametrize("roles", [{"p": (Role.PREFILL,), "d": (Role.DECODE,)}, COUPLED], ids=["pair", "one"])
async def test_every_sample_has_a_state_of_its_own(roles: dict[str, tuple[Role, ...]], tiny: Path) -> None:
    sampling = replace(HELD, samples=3)
    at = ("w", "w") if "w" in roles else ("p", "d")
    async with workers(tiny, roles) as both:
        await both.submit("r", prompt(21), 0, at=at, sampling=sampling)
        answers = await both.ear.wait_answers("r", 3)
        for sample, answer in enumerate(answers):
            expect_valid(tiny, answer)
            assert answer == sampled_answer(tiny, prompt(21), sampling, sample)
        assert len({tuple(answer) for answer in answers}) == 3
        await both.quiet()


async def test_logprobs_come_with_every_token_forced_ones_too(pair: Workers, tiny: Path) -> None:
    await pair.submit("r", prompt(30), 0, sampling=replace(HELD, logprobs=1))
    finish = await pair.ear.wait_finish("r")
    assert pair.ear.answer("r") == sampled_answer(tiny, prompt(30), HELD)
    told = pair.ear.logprobs[(RequestId("r"), 0, 0)]
    assert sorted(told) == list(range(finish.output_tokens))
    assert all(one is not None for one in told.values())


@pytest.mark.parametrize(("swap_bytes", "way"), [(0, "recompute"), (8 << 20, "swap")])
async def test_short_of_blocks_answers_are_the_same(swap_bytes: int, way: str, tiny: Path) -> None:
    """Preempted and computed again the state goes on; a jump never runs over its blocks."""
    samplings = {f"r{seed}": replace(HELD, seed=seed) for seed in range(16)}
    settings = {"pool_bytes": 1 << 20, "swap_bytes": swap_bytes, "step_tokens_max": 512}
    async with workers(tiny, COUPLED, **settings) as one:
        if swap_bytes:
            preempted = one.apps["w"]._node.preempted
            preempted.costs = replace(preempted.costs, copy=HostCopyCost(0.0, 1e15))
        blocks = one.apps["w"]._node.pool.stats().blocks
        prompt_tokens = blocks // len(samplings) * BLOCK_TOKENS - 1
        prompts = {name: prompt(prompt_tokens, seed=index) for index, name in enumerate(samplings)}
        for name, sampling in samplings.items():
            await one.submit(name, prompts[name], 0, at=("w", "w"), sampling=sampling)
        for name, sampling in samplings.items():
            await one.ear.wait_finish(name)
            assert one.ear.answer(name) == sampled_answer(tiny, prompts[name], sampling)
        assert value_of(one, "moonpool_preemptions_total", "w", way=way) > 0
        await one.quiet()


@pytest.mark.parametrize(
    "other",
    [{"stop_token_ids": ()}, {"output_tokens_min": 240}, {"stop_token_ids": (), "output_tokens_min": 240}],
    ids=["ignore_eos", "min_tokens", "both"],
)
async def test_it_ends_where_nothing_can_follow(pair: Workers, tiny: Path, other: dict[str, object]) -> None:
    """A valid answer goes before a long one, and before one without an end."""
    sampling = replace(HELD, structure=StructureSpec(StructureKind.REGEX, "[a-c]{4}"), **other)
    await pair.submit("r", prompt(30), 0, sampling=sampling)
    finish = await pair.ear.wait_finish("r")
    assert finish.reason is FinishReason.STOP
    assert re.fullmatch("[a-c]{4}", text_of(tiny, pair.ear.answer("r")))


async def test_min_tokens_keeps_an_answer_from_ending_where_it_can_go_on(pair: Workers, tiny: Path) -> None:
    spec = StructureSpec(StructureKind.REGEX, "[a-c]*")
    sampling = replace(HELD, structure=spec, output_tokens_min=20, logit_bias=((END, 10.0),))
    await pair.submit("r", prompt(30), 0, sampling=sampling)
    await pair.ear.wait_finish("r")
    answer = pair.ear.answer("r")
    assert len(answer) == 21, "the model wants to end at once"
    assert re.fullmatch("[a-c]{20,}", text_of(tiny, answer))


BAD = StructureSpec(StructureKind.JSON_SCHEMA, '{"not": {}}')


async def test_a_structure_that_does_not_compile_is_refused_at_both(pair: Workers) -> None:
    sampling = replace(HELD, structure=BAD)
    work = pair.work("r", prompt(20), 0, sampling=sampling)
    for answer in (
        await pair.submit("r", prompt(20), 0, sampling=sampling),
        await pair.ear.ask("d", Reserve(work, InstanceId("p"), 5.0)),
    ):
        assert isinstance(answer, Refused)
        assert answer.reason is RefusalReason.BAD_REQUEST
        assert answer.detail.startswith("sampling.structure: json_schema: ")
        assert "not" in answer.detail
    for app in pair.apps.values():
        load = app.load()
        assert (load.queued, load.running, load.blocks_in_use) == ((), (), 0)


async def test_output_so_far_that_does_not_fit_is_refused(pair: Workers, tiny: Path) -> None:
    whole = sampled_answer(tiny, prompt(20), HELD)
    for output, what in (([whole[0], 300], "output token 1"), (whole, "complete")):
        answer = await pair.submit(
            "r", prompt(20), 0, sampling=HELD, attempt=1, output_token_ids=packed(output)
        )
        assert isinstance(answer, Refused)
        assert answer.reason is RefusalReason.BAD_REQUEST
        assert what in answer.detail
    await pair.quiet()


async def test_a_first_token_that_does_not_fit_ends_the_attempt(pair: Workers) -> None:
    work = pair.work("r", prompt(20), 0, sampling=HELD)
    reserved = await pair.ear.ask("d", Reserve(work, InstanceId("p"), 5.0))
    assert isinstance(reserved, Reserved)
    held = pair.apps["d"]._decode._held.get(RequestId("r"))
    held.hold = replace(held.hold, blocks_to_write=0, bytes_to_write=0)
    await pair.ear.ask("d", Commit(RequestId("r"), 0, reserved.generation, 0, 0, "", 300, 0))
    await pair.ear.wait(lambda: pair.ear.failed)
    assert "token 300 is not allowed" in pair.ear.failed[0].detail
    await pair.quiet()


async def test_an_answer_that_meets_a_limit_fails_alone(pair: Workers, tiny: Path) -> None:
    costly = StructureSpec(StructureKind.REGEX, r"(\w{1,1000}){1,1000}")
    await pair.submit("bad", prompt(20), 0, sampling=replace(HELD, structure=costly))
    await pair.submit("good", prompt(30), 0, sampling=HELD)
    await pair.ear.wait_finish("good")
    assert pair.ear.answer("good") == sampled_answer(tiny, prompt(30), HELD)
    await pair.ear.wait(lambda: pair.ear.failed)
    assert pair.ear.failed[0].request_id == "bad"
    failed = pair.ear.failed[0]
    assert failed.detail.startswith("sampling.structure: ")
    assert "too many expressions" in failed.detail
    assert (failed.retryable, failed.reason) == (False, RefusalReason.BAD_REQUEST)
    await pair.quiet()


async def test_who_waits_too_long_for_a_compiler_is_told_so(
    pair: Workers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What compiles slowly is refused; who waits behind it may come again, and does not hold up others."""
    entered, go_on = threading.Event(), threading.Event()

    def slow(spec: StructureSpec) -> str:
        entered.set()
        assert go_on.wait(20)
        return grammar_of(spec)

    monkeypatch.setattr(compiler, "grammar_of", slow)
    monkeypatch.setattr(structures, "COMPILE_WAIT_S_MAX", 0.2)
    first = await pair.submit("slow", prompt(20), 0, sampling=HELD)
    assert isinstance(first, Refused)
    assert first.reason is RefusalReason.BAD_REQUEST
    other = replace(HELD, structure=StructureSpec(StructureKind.CHOICE, '["a"]'))
    second = await pair.submit("behind", prompt(20), 0, sampling=other)
    assert isinstance(second, Refused)
    assert second.reason is RefusalReason.QUEUE_FULL
    assert second.retry_after_s > 0
    assert isinstance(await pair.submit("free", prompt(20), 3), Accepted)
    await pair.ear.wait_finish("free")
    assert entered.is_set()
    go_on.set()
    await pair.quiet()
