"""`moonpool bench prefix`: what a cached prefix saves.

Time to first token of a request with a fresh prefix, then of a second request with the same prefix and
another end. Both are sent one after the other to an otherwise idle stack.
"""

import argparse
import asyncio
import random
import sys
import time
from dataclasses import dataclass

from moonpool.api import Api, Json
from moonpool.arguments import Command, whole_number
from moonpool.benchmarks.command_line import add_json_argument, print_results
from moonpool.errors import EXIT_OK, CommandError
from moonpool.find_stack import add_stack_arguments, gateway_api
from moonpool.measurement import Measurement, measurement

NAME = "prefix"
ANSWER_TOKENS = 4
PREFIX_TOKENS_MAX = 1_000_000
REPEATS_MAX = 10_000
OWN_STACK_NAME = "bench"

WORDS = """
time year people way day man thing woman life child world school state family student group country
problem hand part place case week company system program question work government number night point
home water room mother area money story fact month lot right study book eye job word business issue
side kind head house service friend father power hour game line end member law car city community name
"""
"""Common words, one token each in the usual vocabularies, and never less than one in any."""

ENDINGS = ("In short, this means that", "The next word of this list is")


@dataclass(frozen=True, slots=True)
class Answer:
    """What the benchmark needs to know of one streamed answer."""

    ttft_s: float
    prompt_tokens: int
    cached_tokens: int


@dataclass(frozen=True, slots=True)
class Pair:
    """Two requests with one prefix of their own: the first fills the cache, the second uses it."""

    fresh: Answer
    shared: Answer


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_json_argument(parser)
    parser.add_argument(
        "--prefix-tokens",
        type=whole_number(1, PREFIX_TOKENS_MAX),
        default=1000,
        metavar="N",
        help="length of the shared prefix, at least (default 1000)",
    )
    parser.add_argument(
        "--repeats",
        type=whole_number(1, REPEATS_MAX),
        default=5,
        metavar="N",
        help="pairs of requests (default 5)",
    )
    parser.add_argument("--model", help="measure on a stack of its own with this model")
    add_stack_arguments(parser)


def run(options: argparse.Namespace) -> int:
    if options.model is None:
        results = measure(gateway_api(options), options.prefix_tokens, options.repeats)
    else:
        results = asyncio.run(_measure_own_stack(options))
    print_results(results, as_json=options.json)
    return EXIT_OK


async def _measure_own_stack(options: argparse.Namespace) -> list[Measurement]:
    from moonpool.stack import running_stack
    from moonpool.stack_plan import StackConfig

    def report(text: str) -> None:
        print(text, file=sys.stderr)

    config = StackConfig(name=OWN_STACK_NAME, model=options.model)
    async with running_stack(config, report) as stack:
        api = Api(stack.state().url)
        return await asyncio.to_thread(measure, api, options.prefix_tokens, options.repeats)


def measure(api: Api, prefix_tokens: int, repeats: int) -> list[Measurement]:
    """Measure `repeats` pairs, after one that is not counted."""
    model = api.model()
    # Other words in every run: a second one against the same stack must not find the first one's prefixes.
    words = random.Random()
    pairs = []
    for _ in range(1 + repeats):
        prefix = " ".join(words.choices(WORDS.split(), k=prefix_tokens)) + ". "
        pairs.append(Pair(_ask(api, model, prefix + ENDINGS[0]), _ask(api, model, prefix + ENDINGS[1])))
    return summarise(pairs[1:], model, prefix_tokens)


def summarise(pairs: list[Pair], model: str, prefix_tokens: int) -> list[Measurement]:
    """Three measurements: both times to first token, and how many times faster the second is."""
    context: Json = {
        "model": model,
        "prefix_tokens": prefix_tokens,
        "prompt_tokens_min": min(pair.fresh.prompt_tokens for pair in pairs),
        "cached_tokens_min": min(pair.shared.cached_tokens for pair in pairs),
        "cached_tokens_fresh_max": max(pair.fresh.cached_tokens for pair in pairs),
    }
    fresh_ms = [pair.fresh.ttft_s * 1e3 for pair in pairs]
    shared_ms = [pair.shared.ttft_s * 1e3 for pair in pairs]
    speedups = [fresh / shared for fresh, shared in zip(fresh_ms, shared_ms, strict=True)]
    return [
        measurement(NAME, "fresh", "ttft", "ms", fresh_ms, context),
        measurement(NAME, "shared", "ttft", "ms", shared_ms, context),
        measurement(NAME, "fresh/shared", "ttft_ratio", "x", speedups, context),
    ]


def _ask(api: Api, model: str, prompt: str) -> Answer:
    body = {
        "model": model,
        "prompt": prompt,
        "max_tokens": ANSWER_TOKENS,
        "temperature": 0,
        "stream_options": {"include_usage": True},
    }
    started_s = time.perf_counter()
    ttft_s: float | None = None
    usage: Json = {}
    for event in api.stream("/completions", body):
        if ttft_s is None and any(choice.get("text") for choice in event.get("choices", ())):
            ttft_s = time.perf_counter() - started_s
        usage = event.get("usage") or usage
    if ttft_s is None or not usage:
        raise CommandError("the answer had no text or no usage; is this a Moonpool gateway?")
    cached_tokens = usage.get("prompt_tokens_details", {}).get("cached_tokens", 0)
    return Answer(ttft_s, usage["prompt_tokens"], cached_tokens)


COMMAND = Command(NAME, "time to first token with a fresh and with a cached prefix", add_arguments, run)
