"""The published request traces, which are not part of the repository, and small ones made up."""

import os
from collections.abc import Sequence
from pathlib import Path

import pytest

from simulator.trace import TRACE_BLOCK_TOKENS, TracedRequest

TRACES_FOLDER = Path(
    os.environ.get("MOONPOOL_TRACES") or Path(__file__).resolve().parents[2].parent / "shared" / "traces"
)
"""Where `conversation_trace.jsonl` and `synthetic_trace.jsonl` of the Mooncake paper lie."""


def published_trace(name: str) -> Path:
    """Skips the test where the trace is not on this machine."""
    path = TRACES_FOLDER / f"{name}_trace.jsonl"
    if not path.is_file():
        pytest.skip(f"no {path} (MOONPOOL_TRACES names the folder of the published traces)")
    return path


def trace_of(prompts: Sequence[Sequence[int]], output_tokens: Sequence[int] = ()) -> list[TracedRequest]:
    """Requests with these words, one a block: the same words from the start on are the same blocks."""
    ids: dict[tuple[int, ...], int] = {}
    return [
        TracedRequest(
            arrived_ms=place,
            input_tokens=len(words) * TRACE_BLOCK_TOKENS,
            output_tokens=output_tokens[place] if output_tokens else 1,
            block_ids=tuple(ids.setdefault(tuple(words[: end + 1]), len(ids)) for end in range(len(words))),
        )
        for place, words in enumerate(prompts)
    ]
