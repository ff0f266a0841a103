"""guidellm 0.8: its command line, and its results per request."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.load_systems.tool_run import Answered, Load, Synthetic, Target, ToolError, ToolRun

TIMESTAMPS_A_SECOND = 1
"""Its traces count seconds."""
REPORT = "report.json"
SEED = 1


def command(python: Path, target: Target, load: Load, folder: Path) -> list[str]:
    return [
        *(str(python), "-m", "guidellm", "run"),
        *("--backend", f"kind=openai_http,target={target.url},model={target.model}"),
        *("--tokenizer", f"kind=huggingface_auto,model={target.tokenizer}"),
        *("--seed", f"kind=static,value={SEED}"),
        *("--output", f"kind=json,path={folder / REPORT}", "--disable-progress"),
        *_load(load),
    ]


def _load(load: Load) -> list[str]:
    if isinstance(load, Synthetic):
        lengths = f"prompt_tokens={load.prompt_tokens},output_tokens={load.output_tokens}"
        return [
            *("--constraint", f"kind=max_requests,count={load.requests}"),
            *("--profile", f"kind=concurrent,streams={load.concurrency}"),
            *("--data", f"kind=synthetic_text,{lengths}"),
        ]
    source = {"kind": "json_file", "path": str(load.trace)}
    data = {"kind": "mooncake", "source": source, "hash_id_block_size": load.block_tokens}
    return [
        *("--profile", "kind=replay,schedule_turn=timestamp"),
        *("--data", json.dumps(data)),
    ]


def results(folder: Path) -> ToolRun:
    """Raises ToolError where its report is missing or lacks what we read."""
    try:
        (benchmark,) = json.loads((folder / REPORT).read_text(encoding="utf-8"))["benchmarks"]
        requests = benchmark["requests"]
        answered = tuple(map(_answered, requests["successful"]))
        failed = len(requests["errored"]) + len(requests["incomplete"])
        duration_s = float(benchmark["duration"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ToolError(f"guidellm's report in {folder} is not of the form we know: {error!r}") from error
    return ToolRun(answered, failed, duration_s)


def _answered(request: Mapping[str, Any]) -> Answered:
    gap_ms = request["inter_token_latency_ms"]
    prompt, output = request["input_metrics"], request["output_metrics"]
    return Answered(
        first_token_ms=float(request["time_to_first_token_ms"]),
        gap_ms=None if gap_ms is None else float(gap_ms),
        whole_ms=float(request["request_latency"]) * 1e3,
        prompt_tokens=int(prompt["text_tokens"]),
        output_tokens=int(output["text_tokens"]),
        cached_tokens=None if prompt["cached_tokens"] is None else int(prompt["cached_tokens"]),
    )
