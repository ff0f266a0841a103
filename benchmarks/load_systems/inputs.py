"""What load tools need and this project has in another form: a tokenizer by name, and traces in their units.

Knows no tool's command line. Files are made in a folder of the caller's.
"""

import json
import math
import shutil
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from simulator.trace import TRACE_BLOCK_TOKENS, TracedRequest

TOKENIZER_OWNER = "local"
"""Tools take a tokenizer by a Hugging Face name, `local/NAME`, and find it in a cache made here."""
REVISION = "0" * 40
TOKENIZER_FILES = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json")
CHAT_TOKENS_MAX = 128
"""What a chat template adds to a prompt, at most."""


@dataclass(frozen=True, slots=True)
class ToolRequest:
    """One request of a trace as tools send it: its blocks are all of the same number of tokens."""

    due_s: float
    prompt_tokens: int
    output_tokens: int
    block_ids: tuple[int, ...]


def make_hub_cache(model_folder: Path, cache: Path, name: str) -> dict[str, str]:
    """Lay the tokenizer of `model_folder` into `cache` as Hugging Face's client would have it after a
    download of `local/NAME`; the environment in which tools then find it and ask nobody.

    Raises FileNotFoundError where the folder has no tokenizer.json.
    """
    if not (model_folder / "tokenizer.json").is_file():
        raise FileNotFoundError(f"{model_folder} has no tokenizer.json")
    repository = cache / "hub" / f"models--{TOKENIZER_OWNER}--{name}"
    snapshot = repository / "snapshots" / REVISION
    snapshot.mkdir(parents=True)
    for file in TOKENIZER_FILES:
        if (model_folder / file).is_file():
            shutil.copyfile(model_folder / file, snapshot / file)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(REVISION, encoding="ascii")
    return {"HF_HOME": str(cache), "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}


def tokenizer_name(name: str) -> str:
    return f"{TOKENIZER_OWNER}/{name}"


def tool_requests(
    trace: Iterable[TracedRequest],
    *,
    block_tokens: int,
    speedup: float,
    context_tokens_max: int,
    requests_max: int,
) -> list[ToolRequest]:
    """The first requests of `trace` that fit into the context, with `block_tokens` tokens for each block of
    the trace and as much less of everything else, `speedup` times as fast, the first of them at once."""
    found: list[ToolRequest] = []
    first_ms: int | None = None
    for traced in sorted(trace, key=lambda one: one.arrived_ms):
        # Rounded up: a prompt keeps its number of blocks, which tools check.
        prompt_tokens = _scaled_up(traced.input_tokens, block_tokens)
        output_tokens = max(1, _scaled_up(traced.output_tokens, block_tokens))
        if prompt_tokens + output_tokens + CHAT_TOKENS_MAX > context_tokens_max:
            continue
        first_ms = traced.arrived_ms if first_ms is None else first_ms
        due_s = (traced.arrived_ms - first_ms) / 1e3 / speedup
        found.append(ToolRequest(due_s, prompt_tokens, output_tokens, traced.block_ids))
        if len(found) == requests_max:
            break
    return found


def write_trace(requests: Sequence[ToolRequest], path: Path, *, timestamps_a_second: int) -> None:
    """In the form of the Mooncake paper; tools differ in the unit of its timestamps."""
    lines = [
        {
            "timestamp": round(one.due_s * timestamps_a_second, 3),
            "input_length": one.prompt_tokens,
            "output_length": one.output_tokens,
            "hash_ids": one.block_ids,
        }
        for one in requests
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")


def _scaled_up(trace_tokens: int, block_tokens: int) -> int:
    return math.ceil(trace_tokens * block_tokens / TRACE_BLOCK_TOKENS)
