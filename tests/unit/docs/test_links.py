"""What the documents point to exists: every relative link, and every `path::symbol`."""

import ast
import re
from pathlib import Path

import pytest
from tests.support.documents import DOCUMENTS, ROOT, prose

pytestmark = pytest.mark.unit

LINK = re.compile(r"\[[^\]]*\]\(([^)#\s]+)(?:#[^)]*)?\)")
SYMBOL = re.compile(r"`([\w/.-]+\.py)::([\w.]+)`")


def links() -> list[tuple[str, str]]:
    found = [(document, target) for document in DOCUMENTS for target in LINK.findall(prose(document))]
    return [(document, target) for document, target in found if "://" not in target]


def symbols() -> list[tuple[str, str]]:
    return [pair for document in DOCUMENTS for pair in SYMBOL.findall(prose(document))]


def names_in(path: Path) -> set[str]:
    """Module-level names of a Python file, and `Class.member` of its classes."""
    names: set[str] = set()
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        for name in names_of(node):
            names.add(name)
            if isinstance(node, ast.ClassDef):
                names |= {f"{name}.{member}" for inner in node.body for member in names_of(inner)}
    return names


def names_of(node: ast.stmt) -> list[str]:
    match node:
        case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
            return [name]
        case ast.AnnAssign(target=ast.Name(id=name)):
            return [name]
        case ast.Assign(targets=targets):
            return [target.id for target in targets if isinstance(target, ast.Name)]
    return []


def test_there_is_something_to_check() -> None:
    assert len(links()) > 20
    assert len(symbols()) > 20


@pytest.mark.parametrize(("document", "target"), links())
def test_a_link_leads_to_a_file_or_folder_of_the_repository(document: str, target: str) -> None:
    path = (ROOT / document).parent / target
    assert path.exists(), f"{document} links to {target}"
    assert path.resolve().is_relative_to(ROOT)


@pytest.mark.parametrize(("path", "symbol"), symbols())
def test_a_named_symbol_stands_in_its_file(path: str, symbol: str) -> None:
    assert symbol in names_in(ROOT / path), f"{path} has no {symbol}"
