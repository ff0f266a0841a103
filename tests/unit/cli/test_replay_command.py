"""`moonpool replay` against a small server: what it sends, what it prints, and what it refuses."""

import json
import os
import re
import signal
import threading
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path

import pytest
from tests.support.openai_server import OpenAiServer, openai_server

from moonpool.__main__ import main
from moonpool.commands import replay

pytestmark = pytest.mark.unit


@pytest.fixture
def server() -> Iterator[OpenAiServer]:
    with openai_server() as running:
        yield running


def write_trace(path: Path, requests: list[tuple[int, int, int, list[int]]]) -> Path:
    fields = ("timestamp", "input_length", "output_length", "hash_ids")
    path.write_text(
        "".join(json.dumps(dict(zip(fields, request, strict=True))) + "\n" for request in requests)
    )
    return path


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """The second prompt is the first one's and a block more; the third is another one; the last is too long
    for the server's context at a scale of 8."""
    return write_trace(
        tmp_path / "trace.jsonl",
        [
            (1000, 1024, 80, [0, 1]),
            (1400, 1500, 160, [0, 1, 2]),
            (1600, 512, 8, [3]),
            (1600, 17_000, 8, list(range(100, 134))),
        ],
    )


def run_json(server: OpenAiServer, trace: Path, capsys, *flags: str) -> dict:
    words = ["replay", "--trace", str(trace), "--url", server.url, "--json", *flags]
    assert main(words) == 0
    return json.loads(capsys.readouterr().out)


def test_a_trace_is_sent_as_it_is_and_told_in_one_object(server, trace, capsys):
    printed = run_json(server, trace, capsys, "--scale", "8", "--speedup", "4", "--seed", "5")
    first, second, third = server.asked
    assert [len(body["prompt"]) for body in server.asked] == [128, 187, 64]
    assert [body["max_tokens"] for body in server.asked] == [10, 20, 1]
    assert second["prompt"][:128] == first["prompt"]
    assert third["prompt"] != first["prompt"][:64]
    assert all(300 <= token_id <= 499 for body in server.asked for token_id in body["prompt"])
    del first["prompt"]
    assert first == {
        "model": "fake",
        "max_tokens": 10,
        "ignore_eos": True,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
        "return_token_ids": True,
    }
    exact = {
        "trace": str(trace),
        "url": server.url,
        "model": "fake",
        "context_tokens": 2048,
        "scale": 8.0,
        "speedup": 4.0,
        "seed": 5,
        "complete": True,
        "requests": 4,
        "too_long": 1,
        "too_long_requests": [4],
        "sent": 3,
        "served": 3,
        "good": 3,
        "ttft_met": 3,
        "tbt_met": 3,
        "rejected": 0,
        "failed": 0,
        "interrupted": 0,
        "short_answers": 0,
        "prompt_tokens": 379,
        "cached_tokens": 128,
        "output_tokens": 31,
        "hit_rate": 128 / 379,
        "reusable_rate": 128 / 379,
        "rejections": [],
        "failures": [],
    }
    assert {name: printed[name] for name in exact} == exact
    assert printed["offered_per_s"] == pytest.approx(3 / 0.15)
    assert 0.15 <= printed["span_s"] < 10
    assert printed["ttft_ms"]["n"] == printed["late_ms"]["n"] == 3
    assert (printed["tbt_ms"]["n"], printed["gap_ms"]["n"]) == (2, 9 + 19)


def test_priorities_are_sent_and_targets_where_that_is_asked_for(server, tmp_path, capsys):
    path = tmp_path / "trace.jsonl"
    line = {"input_length": 64, "output_length": 2}
    priorities = [{"priority": 7}, {}, {"priority": -3}, {"priority": 0}]
    path.write_text(
        "".join(
            json.dumps(line | {"timestamp": 100 * number, "hash_ids": [number]} | priority) + "\n"
            for number, priority in enumerate(priorities)
        )
    )
    assert run_json(server, path, capsys)["targets_sent"] is False
    assert [body.get("priority", "none") for body in server.asked] == [7, "none", -3, "none"]
    assert not {"ttft_ms_max", "tbt_ms_max"} & {key for body in server.asked for key in body}
    server.asked.clear()
    flags = ("--send-targets", "--ttft-ms", "1500.5", "--tbt-ms", "70")
    assert run_json(server, path, capsys, *flags)["targets_sent"] is True
    assert [(body["ttft_ms_max"], body["tbt_ms_max"]) for body in server.asked] == [(1500.5, 70.0)] * 4
    assert main(["replay", "--trace", str(path), "--url", server.url, *flags]) == 0
    assert ", which requests carried)" in capsys.readouterr().out


def test_the_keys_are_those_that_are_documented(server, trace, capsys):
    printed = run_json(server, trace, capsys, "--scale", "8", "--speedup", "1000")
    documented = set(re.findall(r"[a-z0-9_]+", (replay.__doc__ or "").partition("`--json`")[2]))
    assert printed.keys() <= documented


def test_another_run_has_other_prompts_unless_the_seed_is_the_same(server, trace, capsys):
    flags = ("--scale", "8", "--speedup", "1000", "--limit", "1")
    seed = run_json(server, trace, capsys, *flags)["seed"]
    assert run_json(server, trace, capsys, *flags)["hit_rate"] == 0.0
    assert run_json(server, trace, capsys, *flags, "--seed", str(seed))["hit_rate"] == 112 / 128


def test_rejections_and_failures_are_told_by_kind(server, trace, capsys):
    error = json.dumps({"error": {"message": "no room", "code": "rate_limit_exceeded"}}).encode()
    server.script.refusals = [
        (429, {"x-moonpool-rejected-reason": "ttft"}, error),
        (503, {}, error),
        (500, {}, b"oh"),
    ]
    assert main(["replay", "--trace", str(trace), "--url", server.url, "--scale", "8", "--speedup", "9"]) == 1
    printed = capsys.readouterr()
    lines = printed.out.splitlines()
    assert "rejected: 1 × 429 ttft: no room" in lines
    assert "rejected: 1 × 503 rate_limit_exceeded: no room" in lines
    assert "failed: 1 × 500 http_500" in lines
    (too_long,) = (line for line in lines if line.startswith("not sent"))
    assert "requests 4 (2125 + 1 tokens)" in too_long
    assert "context of 2048" in too_long
    (line,) = printed.err.splitlines()
    assert line == "moonpool replay: error: nothing was served; 500 http_500"


def test_rejected_alone_is_a_result_and_no_failure(server, trace, capsys):
    server.script.refusals = [(429, {}, b"{}")] * 3
    printed = run_json(server, trace, capsys, "--scale", "8", "--speedup", "1000")
    assert (printed["served"], printed["rejected"], printed["goodput_per_s"]) == (0, 3, 0.0)
    assert printed["rejections"] == [{"status": 429, "reason": "http_429", "requests": 3, "example": ""}]


@pytest.mark.parametrize(
    ("cut_after", "error_event", "reason"),
    [(3, None, "stream_cut_off"), (3, {"message": "m", "code": "instance_lost"}, "instance_lost")],
)
def test_streams_that_break_off_have_failed(server, trace, capsys, cut_after, error_event, reason):
    server.script.cut_after, server.script.error_event = cut_after, error_event
    words = [
        "replay",
        "--trace",
        str(trace),
        "--url",
        server.url,
        "--scale",
        "8",
        "--speedup",
        "99",
        "--json",
    ]
    assert main(words) == 1
    printed = json.loads(capsys.readouterr().out)
    assert [(each["reason"], each["requests"]) for each in printed["failures"]] == [(reason, 3)]


def test_targets_divide_the_good_from_the_served(server, trace, capsys):
    server.script.token_s = 0.02
    flags = ("--scale", "8", "--speedup", "1000", "--ttft-ms", "10000")
    printed = run_json(server, trace, capsys, *flags, "--tbt-ms", "10")
    # The third has one token, so no gap.
    assert (printed["served"], printed["ttft_met"], printed["tbt_met"], printed["good"]) == (3, 3, 1, 1)
    assert printed["tbt_ms"]["p50"] >= 19


def test_no_more_are_open_than_allowed_and_the_others_are_late(server, tmp_path, capsys):
    trace = write_trace(tmp_path / "burst.jsonl", [(0, 512, 5, [number]) for number in range(12)])
    server.script.token_s = 0.01
    printed = run_json(server, trace, capsys, "--in-flight-max", "3")
    assert (printed["served"], server.open_max) == (12, 3)
    assert printed["late_ms"]["max"] > 100
    assert printed["offered_per_s"] is None


def test_a_burst_is_open_at_once(server, tmp_path, capsys):
    trace = write_trace(tmp_path / "burst.jsonl", [(0, 512, 5, [number]) for number in range(40)])
    server.script.held = True
    released = threading.Thread(target=lambda: server.wait_asked(40) and server.release())
    released.start()
    printed = run_json(server, trace, capsys)
    released.join()
    assert (printed["served"], server.open_max) == (40, 40)


def test_silence_is_a_failure(server, trace, capsys):
    server.script.held = True
    words = ["replay", "--trace", str(trace), "--url", server.url, "--limit", "1", "--scale", "8"]
    assert main([*words, "--timeout", "0.2"]) == 1
    assert "failed: 1 × silent" in capsys.readouterr().out


def test_ctrl_c_tells_what_was_done(server, tmp_path, capsys):
    trace = write_trace(
        tmp_path / "long.jsonl", [(0, 512, 1, [1]), (0, 512, 1, [2]), (3_600_000, 512, 1, [3])]
    )
    server.script.held = True

    def interrupt() -> None:
        assert server.wait_asked(2)
        os.kill(os.getpid(), signal.SIGINT)

    interrupting = threading.Thread(target=interrupt)
    interrupting.start()
    assert main(["replay", "--trace", str(trace), "--url", server.url, "--json"]) == 130
    interrupting.join()
    printed = json.loads(capsys.readouterr().out)
    assert (printed["complete"], printed["sent"], printed["interrupted"]) == (False, 2, 2)


class Page(HTMLParser):
    """Whether all elements are closed, and what stands in a page."""

    VOID = frozenset({"meta"})

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.elements: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.text = ""

    def handle_starttag(self, tag, attributes):
        self.elements.append(tag)
        self.attributes += attributes
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.elements.append(tag)
        self.attributes += attributes

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data


def test_the_page_is_whole_and_needs_nothing_else(server, trace, tmp_path, capsys):
    error = json.dumps({"error": {"message": "<script>alert(1)</script>", "code": "<b>"}}).encode()
    server.script.refusals = [(429, {}, error)]
    server.script.models = [{"id": 'fake"><img src=x>', "max_model_len": 2048}]
    target = tmp_path / "page.html"
    run_json(server, trace, capsys, "--scale", "8", "--speedup", "50", "--html", str(target))
    page = Page()
    page.feed(target.read_text(encoding="utf-8"))
    assert page.open == []
    assert page.elements.count("svg") == 4
    assert page.elements.count("table") == 2
    assert not {"script", "img", "link", "b"} & set(page.elements)
    assert not {"src", "href"} & {name for name, _ in page.attributes}
    assert "<script>alert(1)</script>" in page.text
    assert "http" not in re.sub(re.escape(server.url), "", target.read_text(encoding="utf-8"))


def test_a_page_that_cannot_be_written_is_known_before_anything_is_sent(server, trace, tmp_path, capsys):
    words = ["replay", "--trace", str(trace), "--url", server.url, "--html", str(tmp_path / "no" / "page")]
    assert main(words) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert "no/page" in line
    assert server.asked == []


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["--scale", "0"], "--scale"),
        (["--scale", "-1"], "--scale"),
        (["--scale", "nan"], "--scale"),
        (["--scale", "513"], "at most 512"),
        (["--speedup", "0"], "--speedup"),
        (["--speedup", "fast"], "fast"),
        (["--limit", "0"], "--limit"),
        (["--in-flight-max", "0"], "--in-flight-max"),
        (["--ttft-ms", "-5"], "--ttft-ms"),
        (["--tbt-ms", "0"], "--tbt-ms"),
        (["--token-ids", "9"], "300-499"),
        (["--token-ids", "9-9"], "--token-ids"),
        (["--token-ids", "1-2147483648"], "2147483647"),
        (["--context-tokens", "1"], "--context-tokens"),
        (["--seed", "-1"], "--seed"),
    ],
)
def test_bad_usage_is_one_line_and_status_2(trace, flags, named, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["replay", "--trace", str(trace), *flags])
    assert ended.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert named in line


@pytest.mark.parametrize(
    ("content", "named"),
    [(None, "No such file"), ("", "no request"), ('{"timestamp": 0}\n', ":1: "), ("\n\nnonsense", ":3: ")],
)
def test_a_trace_that_cannot_be_used_is_one_line_and_status_1(tmp_path, content, named, capsys):
    path = tmp_path / "bad.jsonl"
    if content is not None:
        path.write_text(content)
    assert main(["replay", "--trace", str(path), "--url", "http://127.0.0.1:1/v1"]) == 1
    printed = capsys.readouterr()
    (line,) = printed.err.splitlines()
    assert (printed.out, named in line, "bad.jsonl" in line) == ("", True, True)


@pytest.mark.parametrize(
    ("url", "status", "named"),
    [("http://127.0.0.1:1/v1", 1, "cannot talk to"), ("127.0.0.1:8000", 2, "--url"), ("ftp://a", 2, "--url")],
)
def test_a_url_that_leads_nowhere_is_one_line(trace, url, status, named, capsys):
    assert main(["replay", "--trace", str(trace), "--url", url]) == status
    (line,) = capsys.readouterr().err.splitlines()
    assert named in line


@pytest.mark.parametrize(
    ("models", "flags", "status", "named"),
    [
        ([{"id": "fake"}], [], 2, "--context-tokens"),
        ([{"id": "fake", "max_model_len": 2048}], ["--model", "mine"], 1, "does not serve 'mine', but fake"),
        ([], [], 1, "no model"),
        ([3], [], 1, "no list of models"),
        ([{"id": "fake", "max_model_len": 10}], [], 1, "none of the 4 requests fits"),
    ],
)
def test_a_model_that_cannot_be_asked_is_one_line(server, trace, models, flags, status, named, capsys):
    server.script.models = models
    assert main(["replay", "--trace", str(trace), "--url", server.url, *flags]) == status
    (line,) = capsys.readouterr().err.splitlines()
    assert named in line
    assert server.asked == []


def test_a_model_and_its_context_can_be_named(server, trace, capsys):
    flags = ("--model", "other", "--context-tokens", "65", "--scale", "8", "--speedup", "1000")
    printed = run_json(server, trace, capsys, *flags)
    assert (printed["model"], printed["context_tokens"], printed["sent"]) == ("other", 65, 1)
    assert server.asked[0]["model"] == "other"
    assert printed["too_long_requests"] == [1, 2, 4]
