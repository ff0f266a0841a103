"""Moonpool's gateway under other people's load tools: aiperf and guidellm, as their users run them.

Drives a server that runs already. Each tool stands in an environment of its own; each case is one run of
one tool, one after the other. benchmarks/README.md says how to set them up.
"""

import argparse
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.comparison import now, say
from benchmarks.load_systems import aiperf_tool, guidellm_tool
from benchmarks.load_systems.inputs import make_hub_cache, tokenizer_name, tool_requests, write_trace
from benchmarks.load_systems.tool_run import (
    Load,
    Replayed,
    Synthetic,
    Target,
    ToolError,
    ToolRun,
    run_tool,
)

from moonpool.api import API_ROOT, Api
from moonpool.errors import CommandError
from moonpool.measurement import Measurement, as_json_line, as_table, measurement
from simulator.trace import TRACE_BLOCK_TOKENS, TraceError, read_trace

BENCH = "load_tools"
MODELS_TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True)
class Tool:
    command: Callable[[Path, Target, Load, Path], list[str]]
    results: Callable[[Path], ToolRun]
    timestamps_a_second: int


TOOLS = {
    "aiperf": Tool(aiperf_tool.command, aiperf_tool.results, aiperf_tool.TIMESTAMPS_A_SECOND),
    "guidellm": Tool(guidellm_tool.command, guidellm_tool.results, guidellm_tool.TIMESTAMPS_A_SECOND),
}


def main() -> int:
    options = _arguments()
    pythons = {
        # Not resolved: an environment's python is a link, and runs what it is called by.
        name: Path(python).expanduser().absolute()
        for name, python in (("aiperf", options.aiperf_python), ("guidellm", options.guidellm_python))
        if python is not None
    }
    folder = Path(tempfile.mkdtemp(prefix="load_tools_"))
    say(f"logs and the tools' own files are in {folder}")
    target, context_tokens_max = _target(options.url)
    environment = make_hub_cache(options.model_folder, folder / "hfcache", target.model)
    results: list[Measurement] = []
    with options.output.open("w", encoding="utf-8") as output:
        for name, python in pythons.items():
            for kind, load in _loads(options, name, folder, context_tokens_max).items():
                run = _measure(name, python, target, load, environment, folder / f"{name}_{kind}", options)
                about = {**now(), "url": target.url, "model": target.model, **_about(load)}
                lines = summarise(f"{name}/{kind}", run, about)
                results += lines
                print("\n".join(map(as_json_line, lines)), file=output, flush=True)
    print(as_table(results))
    return 1 if any(one.metric == "failed" and one.value for one in results) else 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Load a running server with aiperf and guidellm.")
    parser.add_argument("--url", required=True, help="as `moonpool up` prints it, http://127.0.0.1:8000/v1")
    parser.add_argument("--model-folder", type=Path, required=True, help="where its tokenizer.json is")
    parser.add_argument("--aiperf-python", metavar="PYTHON", help="python of aiperf's environment")
    parser.add_argument("--guidellm-python", metavar="PYTHON", help="python of guidellm's environment")
    parser.add_argument("--output", type=Path, required=True, help="file for the results, an object a line")
    parser.add_argument("--requests", type=_count, default=20, help="of each run (default 20)")
    parser.add_argument("--concurrency", type=_count, default=2, help="requests at a time (default 2)")
    parser.add_argument("--prompt-tokens", type=_count, default=256, help="of random prompts (default 256)")
    parser.add_argument("--output-tokens", type=_count, default=32, help="of each answer to one (default 32)")
    parser.add_argument("--trace", type=Path, help="replay this trace too, in the Mooncake paper's form")
    parser.add_argument(
        "--block-tokens",
        type=_count,
        default=32,
        help=f"tokens for each block of {TRACE_BLOCK_TOKENS} of the trace (default 32)",
    )
    parser.add_argument("--speedup", type=_positive, default=1.0, help="of the trace's arrivals (default 1)")
    parser.add_argument("--timeout-s", type=_positive, default=300.0, help="of each run (default 300)")
    options = parser.parse_args()
    if options.block_tokens > TRACE_BLOCK_TOKENS:
        parser.error(f"--block-tokens must be at most {TRACE_BLOCK_TOKENS}")
    if options.aiperf_python is None and options.guidellm_python is None:
        parser.error("give --aiperf-python, --guidellm-python or both")
    return options


def _count(text: str) -> int:
    if (count := int(text)) < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return count


def _positive(text: str) -> float:
    # Not `<= 0`: what is no number is not above 0 either.
    if not (value := float(text)) > 0:
        raise argparse.ArgumentTypeError("must be above 0")
    return value


def _target(url: str) -> tuple[Target, int]:
    """Whom the tools ask, and the context of its model. CommandError where nobody answers."""
    api = Api(url, timeout_s=MODELS_TIMEOUT_S)
    model = api.model()
    context_tokens_max = int(api.get(f"/models/{model}")["max_model_len"])
    # Tools add /v1 by themselves.
    return Target(api.address("").removesuffix(API_ROOT), model, tokenizer_name(model)), context_tokens_max


def _loads(
    options: argparse.Namespace, tool: str, folder: Path, context_tokens_max: int
) -> Mapping[str, Load]:
    loads: dict[str, Load] = {
        "synthetic": Synthetic(
            options.requests, options.concurrency, options.prompt_tokens, options.output_tokens
        )
    }
    if options.trace is not None:
        requests = tool_requests(
            read_trace(options.trace),
            block_tokens=options.block_tokens,
            speedup=options.speedup,
            context_tokens_max=context_tokens_max,
            requests_max=options.requests,
        )
        if not requests:
            raise TraceError(f"{options.trace}: no request fits into {context_tokens_max} tokens")
        path = folder / f"{tool}_trace.jsonl"
        write_trace(requests, path, timestamps_a_second=TOOLS[tool].timestamps_a_second)
        loads["trace"] = Replayed(path, len(requests), options.block_tokens)
    return loads


def _measure(
    name: str,
    python: Path,
    target: Target,
    load: Load,
    environment: Mapping[str, str],
    folder: Path,
    options: argparse.Namespace,
) -> ToolRun:
    folder.mkdir()
    say(f"{folder.name}: {load}")
    tool = TOOLS[name]
    run_tool(name, tool.command(python, target, load, folder), environment, folder, options.timeout_s)
    return tool.results(folder)


def _about(load: Load) -> dict[str, object]:
    about = asdict(load)
    return about | {"trace": about["trace"].name} if isinstance(load, Replayed) else about


def summarise(case: str, run: ToolRun, context: Mapping[str, object]) -> list[Measurement]:
    """Over requests: times and tokens; of the run: rates, and how many failed."""
    answered = run.answered
    samples: dict[tuple[str, str], Sequence[float]] = {
        ("time_to_first_token", "ms"): [one.first_token_ms for one in answered],
        ("time_between_tokens", "ms"): [one.gap_ms for one in answered if one.gap_ms is not None],
        ("whole_answer", "ms"): [one.whole_ms for one in answered],
        ("prompt", "tokens"): [one.prompt_tokens for one in answered],
        ("cached", "tokens"): [one.cached_tokens for one in answered if one.cached_tokens is not None],
        ("answer", "tokens"): [one.output_tokens for one in answered],
        ("rate", "requests/s"): [len(answered) / run.duration_s] if run.duration_s > 0 else [],
        ("output_rate", "tokens/s"): (
            [sum(one.output_tokens for one in answered) / run.duration_s] if run.duration_s > 0 else []
        ),
        ("answered", "requests"): [len(answered)],
        ("failed", "requests"): [run.failed],
    }
    return [
        measurement(BENCH, case, metric, unit, values, context)
        for (metric, unit), values in samples.items()
        if values
    ]


if __name__ == "__main__":
    try:
        sys.exit(main())
    except (CommandError, ToolError, TraceError, OSError) as error:
        sys.exit(f"load_tools: error: {error}")
