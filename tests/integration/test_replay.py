"""A trace replayed on a live stack: all is served, and prefixes are shared as in the trace."""

import json
import random
from pathlib import Path

import pytest
from tests.support.stack import RunningStack

from kvhash import BLOCK_TOKENS

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]

REQUESTS = 40
FAMILIES = 4
SCALE = 32
"""A block of the trace is one of the cluster's."""
SPEEDUP = 20
"""40 requests in 4 s: two prefill instances are not the bound."""


def conversations(path: Path) -> None:
    """Requests of four families, each with a long prefix of its own, the same for all requests of it."""
    numbers, fresh = random.Random(6), iter(range(10_000, 20_000))
    lines = []
    for number in range(REQUESTS):
        family = number % FAMILIES
        prefix_blocks, own_blocks = 20 + family, numbers.randint(1, 6)
        ids = [family * 100 + block for block in range(prefix_blocks)] + [
            next(fresh) for _ in range(own_blocks)
        ]
        lines.append(
            {
                "timestamp": number * 2_000,
                "input_length": len(ids) * 512 - numbers.randint(0, 400),
                "output_length": numbers.randint(SCALE, 20 * SCALE),
                "hash_ids": ids,
            }
        )
    # Longer than the context of the model, which is 2,048.
    lines.append(
        {"timestamp": 0, "input_length": 70_000, "output_length": 1, "hash_ids": list(range(30_000, 30_137))}
    )
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_a_trace_on_the_live_stack(tiny_stack: RunningStack, tmp_path: Path) -> None:
    trace, page = tmp_path / "trace.jsonl", tmp_path / "page.html"
    conversations(trace)
    flags = ["--trace", str(trace), "--scale", str(SCALE), "--speedup", str(SPEEDUP), "--html", str(page)]
    done = tiny_stack.command("replay", "--json", "--name", tiny_stack.name, *flags, timeout_s=240)
    assert done.returncode == 0, done.stderr
    printed = json.loads(done.stdout)
    print(done.stdout)
    assert (printed["sent"], printed["served"], printed["short_answers"]) == (REQUESTS, REQUESTS, 0)
    assert printed["too_long_requests"] == [REQUESTS + 1]
    requests = [json.loads(line) for line in trace.read_text().splitlines()][:REQUESTS]
    assert printed["output_tokens"] == sum(request["output_length"] // SCALE for request in requests)
    assert printed["prompt_tokens"] == sum(request["input_length"] // SCALE for request in requests)
    # Each family's first has nothing, and the others, of the same tokens, have all of their prefix.
    prefix_tokens = sum((20 + number % FAMILIES) * BLOCK_TOKENS for number in range(FAMILIES, REQUESTS))
    assert printed["reusable_rate"] * printed["prompt_tokens"] == pytest.approx(prefix_tokens)
    # Some compute it again: where prefill is idle that may well be quicker than to fetch it.
    assert 0.5 * printed["reusable_rate"] < printed["hit_rate"] <= printed["reusable_rate"]
    assert printed["ttft_ms"]["n"] == REQUESTS
    assert 0 < printed["ttft_ms"]["p50"] <= printed["e2e_ms"]["p50"]
    assert printed["gap_ms"]["n"] == printed["output_tokens"] - REQUESTS
    assert page.read_text(encoding="utf-8").count("<svg") == 4
