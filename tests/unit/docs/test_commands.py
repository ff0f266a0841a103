"""Commands, flags and make targets that the documents name are those there are."""

import argparse
import re

import pytest
from tests.support.documents import DOCUMENTS, ROOT, code_spans, prose

from moonpool.__main__ import COMMANDS
from moonpool.arguments import Command

pytestmark = pytest.mark.unit

FLAG = re.compile(r"--[a-z][a-z-]*")
BY_WORDS: dict[str, Command] = {}
"""By all words after `moonpool`."""
for entry in COMMANDS:
    if isinstance(entry, Command):
        BY_WORDS[entry.name] = entry
    else:
        BY_WORDS |= {f"{entry.name} {command.name}": command for command in entry.commands}


def command_of(span: str) -> str | None:
    """The words of the command that a code span begins with, where there is such a command."""
    words = span.split()[1:]
    return next((name for name in (" ".join(words[:2]), " ".join(words[:1])) if name in BY_WORDS), None)


def flags(name: str) -> set[str]:
    parser = argparse.ArgumentParser()
    BY_WORDS[name].add_arguments(parser)
    return set(FLAG.findall(parser.format_help()))


def spans() -> list[tuple[str, str]]:
    """(document, code span) of every command."""
    found = [(document, span) for document in DOCUMENTS for span in code_spans(prose(document))]
    return [(document, span) for document, span in found if span.startswith("moonpool ")]


def rows() -> list[tuple[str | None, str]]:
    """(command, row) of the README's table of commands."""
    lines = [line for line in prose("README.md").splitlines() if line.startswith("| `moonpool ")]
    return [(command_of(code_spans(line)[0]), line) for line in lines]


@pytest.mark.parametrize(("document", "span"), spans())
def test_a_command_exists_and_takes_its_flags(document: str, span: str) -> None:
    name = command_of(span)
    assert name is not None, f"{document}: {span}"
    assert set(FLAG.findall(span)) <= flags(name), f"{document}: {span}"


def test_the_flags_of_a_row_are_those_of_its_command() -> None:
    for name, row in rows():
        assert name is not None, row
        assert set(FLAG.findall(" ".join(code_spans(row)))) <= flags(name), row


def test_every_command_has_a_row() -> None:
    assert {name for name, _ in rows()} == BY_WORDS.keys()


def test_every_make_target_exists() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    (phony,) = re.findall(r"^\.PHONY: (.*)$", makefile, re.MULTILINE)
    named = {
        match[1]
        for document in DOCUMENTS
        for span in code_spans(prose(document))
        if (match := re.match(r"make ([a-z]+)", span))
    }
    assert {"up", "soak", "check"} <= named <= set(phony.split())
