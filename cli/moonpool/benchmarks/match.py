"""`moonpool bench match`: what kvmeta's directory does in one process: lookups, events, memory.

Lookups are of a prompt whose blocks all instances hold, each to another depth (in one tier, or in two), or
one alone; the same prompt again and again, as others measure it. `staggered_fresh` asks each prompt once, so
nothing that the directory remembers helps. Memory is what the process grew by, in a process of its own.
"""

import argparse
import multiprocessing
import random
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace

from kvhash import HASH_BYTES
from kvindex.core import BlockAction, BlockEvent, InstanceId, Tier
from kvindex.directory import Directory
from moonpool.arguments import Command
from moonpool.benchmarks.command_line import (
    add_case_arguments,
    add_json_argument,
    add_number_arguments,
    print_results,
    say,
)
from moonpool.benchmarks.directories import (
    FRESH,
    SHAPES,
    Filled,
    Prompt,
    Size,
    add_chains,
    apply_all,
    filled,
    stored,
)
from moonpool.benchmarks.resident import resident_bytes
from moonpool.benchmarks.transfer_plan import percentile
from moonpool.errors import EXIT_OK, CommandError
from moonpool.machine import machine_context
from moonpool.measurement import Measurement, measurement

NAME = "match"
EVENTS, MEMORY, CHURN = "events", "memory", "churn"
CASES = (*SHAPES, EVENTS, MEMORY, CHURN)
REPEATS_MAX = 1000
BLOCKS_MAX = 100_000_000
CHAINS_MAX = 1_000_000_000
CALLS = 1000
"""Lookups in one sample."""
CHURN_BATCH_CHAINS = 512
"""Chains that are held at once while they come and go: as many as one message tells of."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_json_argument(parser)
    add_case_arguments(parser, CASES, REPEATS_MAX)
    add_number_arguments(
        parser,
        (
            ("--instances", 1, 1024, 64, "instances in the directory"),
            ("--blocks", 1, BLOCKS_MAX, 1_000_000, "blocks that they hold altogether"),
            ("--prompt-blocks", 1, 16_384, 2048, "blocks of a prompt, and of an event"),
            ("--chains", 1, CHAINS_MAX, 2_000_000, "chains stored and removed by the case churn"),
        ),
    )


def run(options: argparse.Namespace) -> int:
    size = Size(options.instances, options.blocks, options.prompt_blocks)
    results = measure(size, options.cases or CASES, options.repeats, options.chains)
    print_results(results, as_json=options.json)
    return EXIT_OK


def measure(
    size: Size, cases: Sequence[str], repeats: int, chains: int, calls: int = CALLS
) -> list[Measurement]:
    """CommandError where a lookup is answered wrongly."""
    context = {
        **machine_context(),
        "instances": size.instances,
        "blocks": size.blocks,
        "prompt_blocks": size.prompt_blocks,
    }
    results: list[Measurement] = []
    for case in cases:
        say(case)
        if case in SHAPES:
            results += _lookups(case, size, repeats, calls, context)
        elif case == EVENTS:
            results += _events(size, repeats, context)
        else:
            results += _in_a_process_of_its_own(case, size, chains, context)
    return results


def _lookups(
    shape: str, size: Size, repeats: int, calls: int, context: Mapping[str, object]
) -> list[Measurement]:
    taken_us: list[list[float]] = []
    filled_directory: tuple[Directory, Filled] | None = None
    for number in range(repeats):
        if filled_directory is None or shape == FRESH:
            contents = filled(shape, size, seed=number)
            directory = Directory()
            apply_all(directory, contents.events)
            filled_directory = directory, contents
        directory, contents = filled_directory
        if shape == FRESH:
            asked = contents.prompts
        else:
            asked = contents.prompts * calls
            _check(directory, contents.prompts[0])
        taken_us.append([_lookup_us(directory, prompt.packed) for prompt in asked])
        for prompt in contents.prompts:
            _check(directory, prompt)
    context = {**context, "calls": len(taken_us[0])}
    return [
        measurement(
            NAME, shape, f"latency_{label}", "us", [percentile(taken, share) for taken in taken_us], context
        )
        for label, share in (("p50", 0.5), ("p99", 0.99))
    ]


def _lookup_us(directory: Directory, packed: bytes) -> float:
    started_ns = time.perf_counter_ns()
    directory.match(packed)
    return (time.perf_counter_ns() - started_ns) / 1e3


def _check(directory: Directory, prompt: Prompt) -> None:
    found = {match.instance: match.prefix_blocks for match in directory.match(prompt.packed)}
    if found != prompt.depths:
        raise CommandError(f"wrong matches: {len(found)} instances, {len(prompt.depths)} hold the prompt")


def _events(size: Size, repeats: int, context: Mapping[str, object]) -> list[Measurement]:
    """Blocks a second, in a directory of the full size: chains that are new, and that others hold already;
    then all of them moved, and removed."""
    rates: dict[str, list[float]] = {}
    rng = random.Random(1)
    for _ in range(repeats):
        directory = Directory()
        contents = Filled()
        add_chains(contents, rng, size, size.blocks)
        rates.setdefault("stored", []).append(_rate(directory, contents.events))
        next_of = dict(zip(size.names, (*size.names[1:], InstanceId("decode-next")), strict=True))
        shared = [(next_of[instance], event) for instance, event in contents.events]
        rates.setdefault("stored_shared", []).append(_rate(directory, shared))
        for action, tier in ((BlockAction.MOVED, Tier.SSD), (BlockAction.REMOVED, Tier.SSD)):
            changes = [
                (instance, BlockEvent(action, event.block_hashes, tier))
                for instance, event in contents.events
            ]
            rates.setdefault(action, []).append(_rate(directory, changes))
    return [
        measurement(NAME, f"{EVENTS}/{name}", "rate", "blocks/s", samples, context)
        for name, samples in rates.items()
    ]


def _rate(directory: Directory, events: Sequence[tuple[InstanceId, BlockEvent]]) -> float:
    started_s = time.perf_counter()
    apply_all(directory, events)
    taken_s = time.perf_counter() - started_s
    return sum(len(event.block_hashes) // HASH_BYTES for _, event in events) / taken_s


def _in_a_process_of_its_own(
    case: str, size: Size, chains: int, context: Mapping[str, object]
) -> list[Measurement]:
    """What was freed before would hide what is taken now."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
        if case == MEMORY:
            bytes_per_block = process.submit(bytes_of_a_block, size).result()
            return [measurement(NAME, MEMORY, "resident_bytes_per_block", "B", [bytes_per_block], context)]
        churn = process.submit(churned, size, chains).result()
    context = {**context, "chains": chains, "seconds": round(churn.taken_s, 1)}
    return [
        measurement(NAME, CHURN, metric, unit, [value], context)
        for metric, unit, value in (
            ("resident_full", "MB", churn.full / 1e6),
            ("resident_half_way", "MB", churn.half / 1e6),
            ("resident_after", "MB", churn.after / 1e6),
            ("growth_second_half", "x", churn.after / churn.half),
        )
    ]


def bytes_of_a_block(size: Size) -> float:
    """Resident memory that a directory of distinct blocks takes, for each block."""
    before = resident_bytes()
    directory = Directory()
    rng = random.Random(1)
    for number in range(-(-size.blocks // size.prompt_blocks)):
        one = Filled()
        add_chains(one, rng, replace(size, blocks=size.prompt_blocks), size.prompt_blocks)
        directory.apply(size.names[number % size.instances], one.events[0][1])
    return (resident_bytes() - before) / directory.blocks()


@dataclass(frozen=True, slots=True)
class Churn:
    """Resident bytes: with a directory of the full size; after half of the chains; after all of them."""

    full: int
    half: int
    after: int
    taken_s: float


def churned(size: Size, chains: int) -> Churn:
    """Store `chains` chains of one block behind a prefix that is kept, and remove them.

    In the first half the table may grow once: it makes room for what is removed beside what is held.
    """
    directory = Directory()
    contents = Filled()
    rng = random.Random(1)
    add_chains(contents, rng, size, size.blocks)
    apply_all(directory, contents.events)
    instance, kept = contents.events[0][0], contents.events[0][1].block_hashes[-HASH_BYTES:]
    contents.events.clear()

    def churn(count: int) -> int:
        for first in range(0, count, CHURN_BATCH_CHAINS):
            _store_and_remove(directory, instance, kept, rng, min(CHURN_BATCH_CHAINS, count - first))
        return resident_bytes()

    full, started_s = resident_bytes(), time.perf_counter()
    half = churn(chains // 2)
    after = churn(chains - chains // 2)
    return Churn(full, half, after, time.perf_counter() - started_s)


def _store_and_remove(
    directory: Directory, instance: InstanceId, parent: bytes, rng: random.Random, chains: int
) -> None:
    hashes = [rng.randbytes(HASH_BYTES) for _ in range(chains)]
    for block_hash in hashes:
        directory.apply(instance, stored(block_hash, parent))
    for block_hash in hashes:
        directory.apply(instance, BlockEvent(BlockAction.REMOVED, block_hash, Tier.DRAM))


COMMAND = Command(NAME, "lookups, events and memory of the directory that kvmeta serves", add_arguments, run)
