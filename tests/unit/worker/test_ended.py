"""What ended is in the load snapshots: that is how a conductor hears of requests too quick to be listed."""

from pathlib import Path

import pytest
from tests.support.eventually import eventually
from tests.support.workers import TOKENS, Workers, packed, prompt, workers

from cluster.messages import Cancel, Finish
from kvhash import HASH_BYTES
from policy.core import ENDED_LISTED_MAX, LoadSnapshot, RequestId, Role

pytestmark = pytest.mark.unit


def lengths(load: LoadSnapshot) -> list[tuple[str, int | None]]:
    return [(str(ended.request_id), ended.output_tokens) for ended in load.ended]


async def test_a_whole_answer_ends_at_decode_with_its_length(pair: Workers) -> None:
    await pair.submit("a", prompt(40), TOKENS)
    await pair.ear.wait_finish("a")
    load = pair.apps["d"].load()
    assert lengths(load) == [("a", TOKENS)]
    assert load.ended_total == 1
    assert len(load.ended[0].family) == HASH_BYTES
    assert lengths(pair.apps["p"].load()) == []
    await pair.ear.ask("d", Finish(RequestId("a"), 0, TOKENS))
    assert pair.apps["d"].load().ended_total == 1


async def test_prompts_that_begin_alike_are_one_family(pair: Workers) -> None:
    shared = prompt(16)
    for name, ids in (("a", [*shared, 7]), ("b", [*shared, 9, 9]), ("c", [8, *shared]), ("d", [5])):
        await pair.submit(name, ids, 2)
        await pair.ear.wait_finish(name)
    first, second, other, short = (ended.family for ended in pair.apps["d"].load().ended)
    assert first == second != other
    assert short == b""


async def test_an_answer_of_one_token_ends_at_prefill(pair: Workers) -> None:
    await pair.submit("a", prompt(40), 1)
    await pair.ear.wait_finish("a")
    await pair.quiet()
    assert lengths(pair.apps["p"].load()) == [("a", 1)]
    assert lengths(pair.apps["d"].load()) == [("a", None)]


async def test_a_cancelled_request_has_no_length(pair: Workers) -> None:
    await pair.submit("a", prompt(40), 200)
    await pair.ear.wait(lambda: len(pair.ear.answer("a")) >= 2)
    await pair.ear.ask("d", Cancel(RequestId("a"), 0))
    await eventually(lambda: pair.apps["d"].load().ended)
    assert lengths(pair.apps["d"].load()) == [("a", None)]


async def test_only_the_last_are_listed_and_all_are_counted(tiny: Path) -> None:
    async with workers(tiny, {"w": (Role.PREFILL, Role.DECODE)}) as one:
        for i in range(ENDED_LISTED_MAX + 6):
            await one.submit(f"r{i}", prompt(3), 1, at=("w", "w"))
            await one.ear.wait_finish(f"r{i}")
        await one.quiet()
        load = one.apps["w"].load()
        assert load.ended_total == ENDED_LISTED_MAX + 6
        assert [str(ended.request_id) for ended in load.ended] == [
            f"r{i}" for i in range(6, ENDED_LISTED_MAX + 6)
        ]


async def test_what_its_placement_expects_is_told_in_the_load(pair: Workers) -> None:
    """Of the answer as a whole: an attempt that goes on after a loss expects what is left."""
    await pair.submit("a", prompt(40), 300, output_tokens_expected=9, priority=-1)
    queued = pair.apps["p"].load().queued[0]
    assert (queued.output_tokens_expected, queued.priority, queued.samples) == (9, -1, 1)
    await pair.submit("b", prompt(20), 300, output_token_ids=packed([5, 6, 7]), output_tokens_expected=9)
    await pair.ear.wait(lambda: pair.ear.answer("a") and pair.ear.answer("b"))
    await eventually(lambda: len(pair.apps["d"].load().running) == 2)
    told = {str(r.request_id): r for r in pair.apps["d"].load().running}
    assert (told["a"].output_tokens_expected, told["a"].priority) == (9, -1)
    assert told["b"].output_tokens_expected == 12
    for name in "ab":
        await pair.ear.ask("d", Cancel(RequestId(name), 0))
