"""`moonpool bench hash`: the hash chain of a prompt, from an int32 array and from a list.

Beside it the plain walk over the same bytes with xxh3, which is as fast as one call for each block can be
in Python: no packing, no checks, and its 64-bit hash takes the one before it as its seed, so that nothing
is copied.
"""

import argparse
import random
import time
from collections.abc import Callable, Sequence
from statistics import median

from kvhash import BLOCK_TOKENS, HASH_BYTES, block_hashes, namespace
from moonpool.arguments import Command, whole_number
from moonpool.benchmarks.command_line import add_case_arguments, add_json_argument, print_results
from moonpool.errors import EXIT_OK
from moonpool.machine import machine_context
from moonpool.measurement import Measurement, measurement

NAME = "hash"
TOKENS_MAX = 16_777_216
REPEATS_MAX = 10_000
CALLS = 50
"""Calls in one sample, whose median it is."""
VOCABULARY_TOKENS = 128_000

ARRAY, LIST, WALK = "int32_array", "list", "xxh3_walk"
CASES = (ARRAY, LIST, WALK)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_json_argument(parser)
    add_case_arguments(parser, CASES, REPEATS_MAX)
    parser.add_argument(
        "--tokens",
        type=whole_number(BLOCK_TOKENS, TOKENS_MAX),
        default=32_768,
        metavar="N",
        help="length of the prompt (default 32768)",
    )


def run(options: argparse.Namespace) -> int:
    print_results(measure(options.tokens, options.cases or CASES, options.repeats), as_json=options.json)
    return EXIT_OK


def measure(tokens: int, cases: Sequence[str], repeats: int, calls: int = CALLS) -> list[Measurement]:
    """The cases in turn, `repeats` times: milliseconds of one chain."""
    chains = {name: chain for name, chain in _chains(tokens).items() if name in cases}
    samples: dict[str, list[float]] = {name: [] for name in chains}
    for chain in chains.values():
        chain()
    for _ in range(repeats):
        for name, chain in chains.items():
            samples[name].append(median(_timed_ms(chain) for _ in range(calls)))
    context = {
        **machine_context(),
        "tokens": tokens,
        "block_tokens": BLOCK_TOKENS,
        "blocks": tokens // BLOCK_TOKENS,
        "calls": calls,
    }
    results = [measurement(NAME, name, "time", "ms", taken, context) for name, taken in samples.items()]
    if WALK in samples:
        for name in chains:
            if name != WALK:
                ratios = [ours / walk for ours, walk in zip(samples[name], samples[WALK], strict=True)]
                results.append(measurement(NAME, name, "time_over_walk", "x", ratios, context))
    return results


def _chains(tokens: int) -> dict[str, Callable[[], object]]:
    # Here, and not above: other commands need neither.
    import numpy as np
    import xxhash

    space = namespace(b"bench", "model")
    token_ids = random.Random(1).choices(range(VOCABULARY_TOKENS), k=tokens)
    array = np.array(token_ids, np.int32)
    packed = array.tobytes()
    block_bytes = BLOCK_TOKENS * array.itemsize
    end = len(packed) - len(packed) % block_bytes
    assert len(block_hashes(space, array)) == tokens // BLOCK_TOKENS * HASH_BYTES

    def walk() -> list[int]:
        digest = xxhash.xxh3_64_intdigest
        block_hash, hashes = 0, []
        for start in range(0, end, block_bytes):
            block_hash = digest(packed[start : start + block_bytes], block_hash)
            hashes.append(block_hash)
        return hashes

    return {
        ARRAY: lambda: block_hashes(space, array),
        LIST: lambda: block_hashes(space, token_ids),
        WALK: walk,
    }


def _timed_ms(call: Callable[[], object]) -> float:
    started_s = time.perf_counter()
    call()
    return (time.perf_counter() - started_s) * 1e3


COMMAND = Command(NAME, "the hash chain of a prompt, beside a plain walk with xxh3", add_arguments, run)
