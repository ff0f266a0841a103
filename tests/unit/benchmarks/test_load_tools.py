"""What load tools are given and what of theirs is read; the tools themselves are in no test."""

import json
import sys
from pathlib import Path

import pytest
from benchmarks.load_systems import aiperf_tool, guidellm_tool
from benchmarks.load_systems.inputs import (
    CHAT_TOKENS_MAX,
    make_hub_cache,
    tokenizer_name,
    tool_requests,
    write_trace,
)
from benchmarks.load_systems.tool_run import (
    Answered,
    Replayed,
    Synthetic,
    Target,
    ToolError,
    ToolRun,
    run_tool,
)
from benchmarks.load_tools import summarise
from huggingface_hub import snapshot_download

from simulator.trace import TracedRequest

pytestmark = pytest.mark.unit

TARGET = Target("http://127.0.0.1:8000", "tiny", "local/tiny")
SYNTHETIC = Synthetic(requests=10, concurrency=2, prompt_tokens=64, output_tokens=8)
ANSWERED = Answered(20.0, 5.0, 55.0, prompt_tokens=94, output_tokens=8, cached_tokens=16)


def test_the_cache_is_laid_out_as_a_download_leaves_it(tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    (model / "tokenizer.json").write_text("{}")
    environment = make_hub_cache(model, tmp_path / "cache", "tiny")
    repository = Path(environment["HF_HOME"]) / "hub" / "models--local--tiny"
    revision = (repository / "refs" / "main").read_text()
    assert len(revision) == 40
    assert [path.name for path in (repository / "snapshots" / revision).iterdir()] == ["tokenizer.json"]
    assert environment["HF_HUB_OFFLINE"] == "1"
    assert tokenizer_name("tiny") == "local/tiny"
    with pytest.raises(FileNotFoundError, match=r"no tokenizer\.json"):
        make_hub_cache(tmp_path, tmp_path / "other", "tiny")


def test_the_library_itself_finds_the_tokenizer_there(tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    (model / "tokenizer.json").write_text("{}")
    make_hub_cache(model, tmp_path / "cache", "tiny")
    folder = snapshot_download("local/tiny", cache_dir=tmp_path / "cache" / "hub", local_files_only=True)
    assert (Path(folder) / "tokenizer.json").read_text() == "{}"


def test_a_trace_keeps_its_blocks_and_loses_what_does_not_fit() -> None:
    trace = [
        TracedRequest(5000, 1025, 100, (0, 1, 2)),
        TracedRequest(4000, 512, 1, (0,)),
        TracedRequest(4500, 512 * 100, 1, tuple(range(10, 110))),
        TracedRequest(9000, 512, 1, (0,)),
    ]
    context_tokens_max = 100 * 16 + CHAT_TOKENS_MAX
    found = tool_requests(
        trace, block_tokens=16, speedup=2.0, context_tokens_max=context_tokens_max, requests_max=2
    )
    assert [(one.due_s, one.prompt_tokens, one.output_tokens) for one in found] == [
        (0.0, 16, 1),
        (0.5, 33, 4),
    ]
    assert found[1].block_ids == (0, 1, 2)


@pytest.mark.parametrize("input_tokens", [1, 511, 512, 513, 5119, 5120])
@pytest.mark.parametrize("block_tokens", [1, 3, 32, 512])
def test_a_prompt_has_as_many_blocks_as_its_length_says(input_tokens: int, block_tokens: int) -> None:
    """Tools refuse a line where it is otherwise."""
    blocks = -(-input_tokens // 512)
    (found,) = tool_requests(
        [TracedRequest(0, input_tokens, 1, tuple(range(blocks)))],
        block_tokens=block_tokens,
        speedup=1.0,
        context_tokens_max=10_000,
        requests_max=1,
    )
    assert -(-found.prompt_tokens // block_tokens) == blocks


def test_traces_are_written_in_the_unit_of_each_tool(tmp_path: Path) -> None:
    requests = tool_requests(
        [TracedRequest(0, 512, 1, (0,)), TracedRequest(1500, 512, 1, (0,))],
        block_tokens=16,
        speedup=1.0,
        context_tokens_max=1000,
        requests_max=9,
    )
    for tool, due in ((aiperf_tool, 1500), (guidellm_tool, 1.5)):
        path = tmp_path / "trace.jsonl"
        write_trace(requests, path, timestamps_a_second=tool.TIMESTAMPS_A_SECOND)
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        assert lines[1] == {"timestamp": due, "input_length": 16, "output_length": 1, "hash_ids": [0]}


def test_command_lines_name_the_load(tmp_path: Path) -> None:
    replayed = Replayed(tmp_path / "trace.jsonl", 3, 32)
    for tool in (aiperf_tool, guidellm_tool):
        python = Path("/env/bin/python")
        synthetic = " ".join(tool.command(python, TARGET, SYNTHETIC, tmp_path))
        assert synthetic.startswith("/env/bin/python -m ")
        assert TARGET.url in synthetic
        assert TARGET.tokenizer in synthetic
        assert str(SYNTHETIC.prompt_tokens) in synthetic
        trace = " ".join(tool.command(python, TARGET, replayed, tmp_path))
        assert str(replayed.trace) in trace
        assert "32" in trace
        assert "64" not in trace


def test_aiperfs_results(tmp_path: Path) -> None:
    metrics = {
        "time_to_first_token": {"value": 20.0, "unit": "ms"},
        "inter_token_latency": {"value": 5.0, "unit": "ms"},
        "request_latency": {"value": 55.0, "unit": "ms"},
        "usage_prompt_tokens": {"value": 94, "unit": "tokens"},
        "usage_completion_tokens": {"value": 8, "unit": "tokens"},
        "usage_prompt_cache_read_tokens": {"value": 16, "unit": "tokens"},
    }
    records = [{"metrics": metrics}, {"metrics": {}, "error": {"code": 429}}]
    (tmp_path / aiperf_tool.RECORDS).write_text("".join(json.dumps(one) + "\n" for one in records))
    (tmp_path / aiperf_tool.SUMMARY).write_text(json.dumps({"benchmark_duration": {"avg": 2.0}}))
    assert aiperf_tool.results(tmp_path) == ToolRun((ANSWERED,), 1, 2.0)
    (tmp_path / aiperf_tool.RECORDS).write_text('{"metrics": {}}\n')
    with pytest.raises(ToolError, match="not of the form we know"):
        aiperf_tool.results(tmp_path)


def test_guidellms_results(tmp_path: Path) -> None:
    request = {
        "time_to_first_token_ms": 20.0,
        "inter_token_latency_ms": 5.0,
        "request_latency": 0.055,
        "input_metrics": {"text_tokens": 94, "cached_tokens": 16},
        "output_metrics": {"text_tokens": 8},
    }
    requests = {"successful": [request], "errored": [{}], "incomplete": [{}]}
    report = {"benchmarks": [{"requests": requests, "duration": 2.0}]}
    (tmp_path / guidellm_tool.REPORT).write_text(json.dumps(report))
    assert guidellm_tool.results(tmp_path) == ToolRun((ANSWERED,), 2, 2.0)
    with pytest.raises(ToolError, match="not of the form we know"):
        guidellm_tool.results(tmp_path / "nowhere")


def test_a_run_in_the_form_of_every_benchmark() -> None:
    slower = Answered(40.0, None, 40.0, prompt_tokens=94, output_tokens=1, cached_tokens=None)
    lines = summarise("aiperf/synthetic", ToolRun((ANSWERED, slower), 1, 2.0), {"model": "tiny"})
    found = {line.metric: line for line in lines}
    first = found["time_to_first_token"]
    assert (first.value, first.unit, first.n, first.min, first.max) == (30.0, "ms", 2, 20.0, 40.0)
    assert found["time_between_tokens"].n == 1
    assert found["rate"].value == 1.0
    assert found["output_rate"].value == 4.5
    assert (found["answered"].value, found["failed"].value) == (2, 1)
    assert {line.context["model"] for line in lines} == {"tiny"}


def test_a_run_without_an_answer_says_what_failed() -> None:
    lines = summarise("aiperf/synthetic", ToolRun((), 3, 1.0), {})
    assert {(line.metric, line.value) for line in lines} == {
        ("rate", 0.0),
        ("output_rate", 0.0),
        ("answered", 0),
        ("failed", 3),
    }


def test_a_tool_that_fails_is_told_with_the_end_of_its_log(tmp_path: Path) -> None:
    failing = [sys.executable, "-c", "import os, sys; print(os.environ['WHO']); sys.exit('no server')"]
    with pytest.raises(ToolError, match=r"(?s)aiperf ended with status 1.*me\nno server"):
        run_tool("aiperf", failing, {"WHO": "me"}, tmp_path, 30.0)
    with pytest.raises(ToolError, match="aiperf does not start"):
        run_tool("aiperf", [str(tmp_path / "nowhere")], {}, tmp_path, 30.0)
    endless = [sys.executable, "-c", "import threading; threading.Event().wait()"]
    with pytest.raises(ToolError, match=r"longer than 0\.2 s"):
        run_tool("aiperf", endless, {}, tmp_path, 0.2)
