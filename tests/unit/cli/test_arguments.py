import argparse
import os
import subprocess
import sys
from pathlib import Path

import pytest

from moonpool.__main__ import COMMANDS, main
from moonpool.arguments import Command, CommandGroup, seconds, whole_number, with_default_command

pytestmark = pytest.mark.unit


def leaves(entries: tuple[Command | CommandGroup, ...], words: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    found = []
    for entry in entries:
        if isinstance(entry, CommandGroup):
            found += leaves(entry.commands, (*words, entry.name))
        else:
            found.append((*words, entry.name))
    return found


def test_the_commands_are_these() -> None:
    names = (
        "prefix",
        "engine",
        "attention",
        "transfer",
        "handover",
        "hash",
        "match",
        "place",
        "decisions",
        "predict",
        "kvmeta-restart",
        "detokenize",
        "serve",
    )
    benches = [("bench", name) for name in names]
    simulations = [("simulate", name) for name in ("cache", "cluster", "decisions", "recording")]
    configs = [("config", name) for name in ("show", "set", "unset")]
    keys = [("keys", name) for name in ("new", "hash")]
    alone = [("up",), ("serve",), ("status",), ("chat",), ("replay",), ("plan",)]
    assert sorted(leaves(COMMANDS)) == sorted([*alone, *configs, *keys, *benches, *simulations])


@pytest.mark.parametrize("words", leaves(COMMANDS), ids=" ".join)
def test_every_command_explains_itself(words: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([*words, "--help"])
    assert ended.value.code == 0
    assert f"moonpool {' '.join(words)}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ([], "COMMAND"),
        (["down"], "down"),
        (["up", "--prefill", "-1"], "--prefill"),
        (["up", "--port", "65536"], "65535"),
        (["up", "--threads", "0"], "--threads"),
        (["up", "--ssd-folder", ""], "--ssd-folder"),
        (["up", "--colour", "red"], "--colour"),
        (["serve", "banana"], "banana"),
        (["chat", "--max-tokens", "0", "hello"], "--max-tokens"),
        (["status", "--timeout", "nan"], "--timeout"),
        (["bench"], "COMMAND"),
        (["bench", "prefix", "--repeats", "0"], "--repeats"),
    ],
)
def test_bad_usage_is_one_line_and_status_2(
    arguments: list[str], named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.count("\n") == 1
    assert named in printed.err


def test_an_unknown_flag_sends_to_the_help_of_its_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["bench", "prefix", "--colour", "red"])
    printed = capsys.readouterr().err
    assert printed.startswith("moonpool bench prefix: error: unrecognized arguments: --colour red")
    assert "moonpool bench prefix --help" in printed


@pytest.mark.parametrize("text", ["-1", "8", "1.5", "", "seven", "²", " 3"])
def test_whole_number_refuses_what_is_out_of_its_limits(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="from 0 to 7"):
        whole_number(0, 7)(text)


@pytest.mark.parametrize("text", ["0", "-1", "inf", "nan", "61", "soon"])
def test_seconds_refuses_what_is_out_of_its_limits(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="at most 60"):
        seconds(60)(text)


def test_numbers_at_their_limits_are_taken() -> None:
    assert whole_number(0, 7)("0") == 0
    assert whole_number(0, 7)("7") == 7
    assert seconds(60)("60") == 60.0


def test_loading_the_command_loads_no_torch() -> None:
    source = "import sys, moonpool.__main__; print({'torch', 'aiohttp', 'grpc'} & set(sys.modules) or 'none')"
    loaded = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, check=True)
    assert loaded.stdout.strip() == "none"


def command(*arguments: str, **environment: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-m", "moonpool", *arguments],
        capture_output=True,
        text=True,
        env=os.environ | environment,
        timeout=60,
    )


@pytest.mark.parametrize(
    ("arguments", "status", "named"),
    [
        (("up", "--model", "tiny", "--port", "0"), 1, "moonpool-home"),
        (("status",), 1, "moonpool-home"),
        (("status", "--nats-url", "nats://a:x", "--etcd-url", "foo"), 2, "etcd_url"),
        (("chat", "--url", "http://a:99999/v1", "hello"), 2, "--url"),
    ],
)
def test_what_goes_wrong_outside_is_one_line(
    arguments: tuple[str, ...], status: int, named: str, tmp_path: Path
) -> None:
    home = tmp_path / "moonpool-home"
    home.write_text("a file where a folder should be")
    ended = command(*arguments, MOONPOOL_HOME=str(home))
    (line,) = ended.stderr.splitlines()
    assert ended.returncode == status, line
    assert line.startswith("moonpool ")
    assert named in line


@pytest.mark.parametrize("arguments", [("--help",), ("status", "--help")])
def test_a_reader_that_goes_away_is_no_news(arguments: tuple[str, ...]) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    buffered = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    ended = subprocess.run(
        [sys.executable, "-m", "moonpool", *arguments],
        stdout=writer,
        stderr=subprocess.PIPE,
        env=buffered,
        timeout=60,
    )
    os.close(writer)
    assert (ended.returncode, ended.stderr) == (1, b"")


@pytest.mark.parametrize(
    ("words", "meant"),
    [
        (["group", "--flag"], ["group", "first", "--flag"]),
        (["group", "second", "--flag"], ["group", "second", "--flag"]),
        (["group", "--help"], ["group", "--help"]),
        (["group"], ["group"]),
        (["other", "--flag"], ["other", "--flag"]),
        ([], []),
    ],
)
def test_a_group_may_mean_one_of_its_commands(words: list[str], meant: list[str]) -> None:
    first, second = (
        Command(name, "", lambda parser: None, lambda options: 0) for name in ("first", "second")
    )
    entries = (
        CommandGroup("group", "", (first, second), default=first),
        CommandGroup("other", "", (second,)),
    )
    assert list(with_default_command(words, entries)) == meant
