"""aiperf 0.13: its command line, and its results per request."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.load_systems.tool_run import Answered, Load, Synthetic, Target, ToolError, ToolRun

TIMESTAMPS_A_SECOND = 1000
"""Its traces count milliseconds."""
RECORDS = "profile_export.jsonl"
SUMMARY = "profile_export_aiperf.json"
SEED = 1


def command(python: Path, target: Target, load: Load, folder: Path) -> list[str]:
    return [
        *(str(python), "-m", "aiperf", "profile"),
        *("--url", target.url, "--model", target.model, "--tokenizer", target.tokenizer),
        *("--endpoint-type", "chat", "--streaming"),
        # Lengths are to be those asked for, and to be counted as the server counts them.
        *("--extra-inputs", "ignore_eos:true", "--use-server-token-count"),
        *("--random-seed", str(SEED), "--ui", "none", "--no-gpu-telemetry"),
        *("--output-artifact-dir", str(folder)),
        *_load(load),
    ]


def _load(load: Load) -> list[str]:
    if isinstance(load, Synthetic):
        return [
            *("--request-count", str(load.requests), "--concurrency", str(load.concurrency)),
            *("--isl", str(load.prompt_tokens), "--isl-stddev", "0"),
            *("--osl", str(load.output_tokens), "--osl-stddev", "0"),
        ]
    return [
        *("--input-file", str(load.trace), "--custom-dataset-type", "mooncake_trace"),
        *("--isl-block-size", str(load.block_tokens), "--fixed-schedule"),
    ]


def results(folder: Path) -> ToolRun:
    """Raises ToolError where its files are missing or lack what we read."""
    try:
        summary = json.loads((folder / SUMMARY).read_text(encoding="utf-8"))
        records = [json.loads(line) for line in (folder / RECORDS).read_text(encoding="utf-8").splitlines()]
        answered = tuple(_answered(record["metrics"]) for record in records if not record.get("error"))
        duration_s = float(summary["benchmark_duration"]["avg"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ToolError(f"aiperf's results in {folder} are not of the form we know: {error!r}") from error
    return ToolRun(answered, len(records) - len(answered), duration_s)


def _answered(metrics: Mapping[str, Any]) -> Answered:
    gap = metrics.get("inter_token_latency")
    cached = metrics.get("usage_prompt_cache_read_tokens")
    return Answered(
        first_token_ms=float(metrics["time_to_first_token"]["value"]),
        gap_ms=None if gap is None else float(gap["value"]),
        whole_ms=float(metrics["request_latency"]["value"]),
        prompt_tokens=int(metrics["usage_prompt_tokens"]["value"]),
        output_tokens=int(metrics["usage_completion_tokens"]["value"]),
        cached_tokens=None if cached is None else int(cached["value"]),
    )
