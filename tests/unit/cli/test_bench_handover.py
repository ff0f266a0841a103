"""The benchmark with the tiny model, and what is made of its samples."""

import pytest
from tests.support.models import tiny_folder

from engine.model_folder import ModelConfig
from moonpool.benchmarks.handover import CASES, Case, measure, summarise
from moonpool.benchmarks.handover_under_test import HandoverUnderTest, Mode, Run, WrongBytes
from moonpool.errors import CommandError
from worker.handover import Handover

pytestmark = pytest.mark.unit

PROMPT = list(range(5, 45))
"""Two full blocks and one of 8 tokens."""


def under_test(transport: str = "tcp"):
    return HandoverUnderTest.running(
        tiny_folder(), threads=1, backend="torch", tokens_max=64, step_tokens=16, transport=transport
    )


def test_cases_are_named_by_the_length_of_the_prompt() -> None:
    assert [case.name for case in CASES] == ["prompt_1024", "prompt_4096"]


async def test_decode_gets_every_block_once_in_both_ways() -> None:
    async with under_test() as tested:
        for mode in (Mode.STREAMED, Mode.AT_END, Mode.STREAMED):
            run = await tested.run([token + 1 for token in PROMPT], mode)
            assert run.handed_over_bytes == 3 * tested.layout.block_bytes
            assert 0 < run.computed_s <= run.done_s
        assert (await tested.run(PROMPT, Mode.NONE)).handed_over_bytes == 0
        assert tested.carriers() == ["tcp"]


async def test_a_layer_that_is_not_handed_over_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = Handover.layer_done

    def all_but_one(self: Handover, layer: int, computed_tokens: int, last_layer: bool) -> None:
        if layer != 1:
            whole(self, layer, computed_tokens, last_layer)

    monkeypatch.setattr(Handover, "layer_done", all_but_one)
    async with under_test() as tested:
        with pytest.raises(WrongBytes):
            await tested.run(PROMPT, Mode.STREAMED)


async def test_every_way_gives_lines() -> None:
    results = await measure(
        str(tiny_folder()), [Case(40)], threads=1, backend="torch", transport=None, repeats=2
    )
    assert [(r.case, r.metric) for r in results] == [
        ("prompt_40/none", "ttft"),
        ("prompt_40/streamed", "ttft"),
        ("prompt_40/streamed", "extra_ttft"),
        ("prompt_40/streamed", "after_prefill"),
        ("prompt_40/at_end", "ttft"),
        ("prompt_40/at_end", "extra_ttft"),
        ("prompt_40/at_end", "after_prefill"),
    ]
    assert all(r.n == 2 and r.unit == "ms" for r in results)
    assert len(results[0].context["transports"]) == 1, "without a choice the pair takes one and stays with it"


async def test_a_prompt_that_the_model_does_not_take_is_told_in_one_line() -> None:
    tokens = ModelConfig.load(tiny_folder()).context_tokens_max + 1
    with pytest.raises(CommandError, match=f"the case has {tokens}"):
        await measure(
            str(tiny_folder()), [Case(tokens)], threads=1, backend="torch", transport=None, repeats=1
        )


def test_what_is_extra_is_taken_within_a_round() -> None:
    rounds = [
        {Mode.NONE: Run(1.0, 1.0, 0), Mode.STREAMED: Run(1.1, 1.25, 96), Mode.AT_END: Run(1.0, 2.0, 96)},
        {Mode.NONE: Run(3.0, 3.0, 0), Mode.STREAMED: Run(3.0, 3.5, 96), Mode.AT_END: Run(2.0, 4.0, 96)},
    ]
    found = {(r.case, r.metric): r for r in summarise(Case(7), rounds, {"threads": 1})}
    assert found["prompt_7/none", "ttft"].value == 2000.0
    streamed = found["prompt_7/streamed", "extra_ttft"]
    assert (streamed.min, streamed.max) == (250.0, 500.0)
    after = found["prompt_7/at_end", "after_prefill"]
    assert (after.min, after.max) == (1000.0, 2000.0)
    assert after.context == {"threads": 1, "tokens": 7, "bytes": 96}
