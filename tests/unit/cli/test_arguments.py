import argparse
import subprocess
import sys

import pytest

from moonpool.__main__ import COMMANDS, main
from moonpool.arguments import Command, CommandGroup, seconds, whole_number

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
    assert leaves(COMMANDS) == [("up",), ("serve",), ("status",), ("chat",), ("bench", "prefix")]


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
