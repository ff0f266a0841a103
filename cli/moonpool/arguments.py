"""Command-line arguments: the form of a command, one-line usage errors, and types that name their limits."""

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import NoReturn

from moonpool.errors import EXIT_USAGE

PORT_MAX = 65535
HELP_FLAGS = ("-h", "--help")


@dataclass(frozen=True, slots=True)
class Command:
    """The last word of a command: its flags and what it does.

    `run` returns the exit status and raises CommandError for a failure that has a name.
    """

    name: str
    summary: str
    add_arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], int]


@dataclass(frozen=True, slots=True)
class CommandGroup:
    """A word that needs another one after it, such as `bench`."""

    name: str
    summary: str
    commands: tuple[Command, ...]
    default: Command | None = None
    """Of `commands`, the one that is meant where a flag follows the group's own word."""


class OneLineParser(argparse.ArgumentParser):
    """An argument parser whose error is one line; `--help` tells the rest."""

    def error(self, message: str) -> NoReturn:
        print(f"{self.prog}: error: {message} (see {self.prog} --help)", file=sys.stderr)
        raise SystemExit(EXIT_USAGE)


def add_commands(parser: argparse.ArgumentParser, entries: Sequence[Command | CommandGroup]) -> None:
    """One sub-parser for each entry; parsing sets `command` to the chosen Command, `prog` to its words
    and `usage_error` to what ends the program because of bad usage of that command.
    """
    choices = parser.add_subparsers(
        title="commands", metavar="COMMAND", required=True, parser_class=OneLineParser
    )
    for entry in entries:
        chosen = choices.add_parser(entry.name, help=entry.summary, description=entry.summary)
        if isinstance(entry, CommandGroup):
            add_commands(chosen, entry.commands)
        else:
            entry.add_arguments(chosen)
            chosen.set_defaults(command=entry, prog=chosen.prog, usage_error=chosen.error)


def with_default_command(
    arguments: Sequence[str], entries: Sequence[Command | CommandGroup]
) -> Sequence[str]:
    """With the word of the group's default command where it was left out; `--help` is the group's own."""
    if len(arguments) < 2 or not arguments[1].startswith("-") or arguments[1] in HELP_FLAGS:
        return arguments
    for entry in entries:
        if isinstance(entry, CommandGroup) and entry.name == arguments[0] and entry.default is not None:
            return [arguments[0], entry.default.name, *arguments[1:]]
    return arguments


def whole_number(minimum: int, maximum: int) -> Callable[[str], int]:
    """An argparse type: an integer from `minimum` to `maximum`."""

    def parse(text: str) -> int:
        if not text.isascii() or not text.isdecimal() or not minimum <= int(text) <= maximum:
            raise argparse.ArgumentTypeError(
                f"must be a whole number from {minimum} to {maximum}, not {text!r}"
            )
        return int(text)

    return parse


def words(kind: type[StrEnum]) -> list[str]:
    """The choices of an argument: as argparse would print them, members look like code."""
    return [member.value for member in kind]


def folder(text: str) -> Path:
    """An argparse type: a folder's path. An empty one is none, though Python takes it for the current one."""
    if not text:
        raise argparse.ArgumentTypeError("must be a folder, not ''")
    return Path(text)


def positive(maximum: float, unit: str = "a number") -> Callable[[str], float]:
    """An argparse type: a number above 0 and at most `maximum`."""

    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = -1.0
        if not 0 < value <= maximum:
            raise argparse.ArgumentTypeError(f"must be {unit} above 0 and at most {maximum:g}, not {text!r}")
        return value

    return parse


def seconds(maximum: float) -> Callable[[str], float]:
    """An argparse type: a time in seconds, above 0 and at most `maximum`."""
    return positive(maximum, "seconds")
