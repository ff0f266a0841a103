"""What the benchmarks of hash chain and directory measure and say, in sizes that take no time."""

import json

import pytest

from kvhash import HASH_BYTES
from kvindex.directory import Directory
from moonpool.__main__ import main
from moonpool.benchmarks import hash as hash_chain
from moonpool.benchmarks import match
from moonpool.benchmarks.directories import (
    ALL,
    FRESH,
    ONE,
    SHAPES,
    STAGGERED,
    TIERED,
    Size,
    apply_all,
    filled,
)
from moonpool.errors import CommandError

pytestmark = pytest.mark.unit

TINY = Size(instances=8, blocks=1024, prompt_blocks=32)


def test_hash_says_times_of_all_cases_and_ratios_to_the_walk() -> None:
    results = hash_chain.measure(1024, hash_chain.CASES, repeats=3, calls=2)
    assert [(result.case, result.metric) for result in results] == [
        ("int32_array", "time"),
        ("list", "time"),
        ("xxh3_walk", "time"),
        ("int32_array", "time_over_walk"),
        ("list", "time_over_walk"),
    ]
    assert all(result.n == 3 and 0 < result.min <= result.value <= result.max for result in results)
    assert results[0].context["blocks"] == 64
    (alone,) = hash_chain.measure(1024, ("list",), repeats=1, calls=1)
    assert alone.unit == "ms"


def test_hash_prints_one_json_object_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        main(["bench", "hash", "--json", "--case", "int32_array", "--repeats", "2", "--tokens", "160"]) == 0
    )
    (line,) = capsys.readouterr().out.splitlines()
    said = json.loads(line)
    assert (said["bench"], said["case"], said["n"], said["context"]["tokens"]) == (
        "hash",
        "int32_array",
        2,
        160,
    )


@pytest.mark.parametrize("shape", SHAPES)
def test_a_directory_of_each_shape_has_its_size_and_depths(shape: str) -> None:
    contents = filled(shape, TINY, seed=1)
    directory = Directory()
    apply_all(directory, contents.events)
    assert TINY.blocks <= directory.blocks() <= TINY.blocks + TINY.instances * TINY.prompt_blocks
    for prompt in contents.prompts:
        found = {m.instance: m.prefix_blocks for m in directory.match(prompt.packed)}
        assert found == prompt.depths
        depths = sorted(found.values())
        expected = {
            ALL: [32] * 8,
            STAGGERED: [4, 8, 12, 16, 20, 24, 28, 32],
            TIERED: [4, 8, 12, 16, 20, 24, 28, 32],
            FRESH: [4, 8, 12, 16, 20, 24, 28, 32],
            ONE: [1] * 7 + [32],
        }
        assert depths == expected[shape]
        tiers = 2 if shape == TIERED else 1
        assert all(len(match.runs) == tiers for match in directory.match(prompt.packed))
    assert (len(contents.prompts) > 1) == (shape == FRESH)


def test_match_says_latencies_rates_and_nothing_twice() -> None:
    cases = (*SHAPES, match.EVENTS)
    results = match.measure(TINY, cases, repeats=2, chains=10, calls=3)
    said = [(result.case, result.metric) for result in results]
    assert len(set(said)) == len(said)
    assert {case for case, _ in said} == {
        *SHAPES,
        "events/stored",
        "events/stored_shared",
        "events/moved",
        "events/removed",
    }
    assert all(result.value > 0 and result.n == 2 for result in results)


def test_a_wrong_match_is_no_result() -> None:
    contents = filled(ALL, TINY, seed=1)
    directory = Directory()
    apply_all(directory, contents.events)
    directory.drop(TINY.names[3])
    with pytest.raises(CommandError, match="7 instances, 8 hold"):
        match._check(directory, contents.prompts[0])


def test_churn_keeps_what_it_found() -> None:
    churn = match.churned(TINY, chains=100)
    assert 0 < churn.full <= churn.after * 2
    assert churn.taken_s > 0
    assert match.bytes_of_a_block(TINY) >= 0


def test_match_counts_memory_in_a_process_of_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--case", "memory", "--blocks", "200000", "--instances", "4", "--prompt-blocks", "512"]
    assert main(["bench", "match", "--json", *arguments]) == 0
    (said,) = map(json.loads, capsys.readouterr().out.splitlines())
    assert said["metric"] == "resident_bytes_per_block"
    assert HASH_BYTES < said["value"] < 400
