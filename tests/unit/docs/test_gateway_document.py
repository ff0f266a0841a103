"""docs/gateway.md tells every parameter and setting by the name that it has, and none that there is not."""

import re
from dataclasses import fields

import msgspec
import pytest
from tests.support.documents import code_spans, prose

from gateway.api.neutral_parameters import CHAT_NEUTRAL, COMPLETION_NEUTRAL
from gateway.api.operations import OPERATIONS
from gateway.api.request_types import ChatRequest, CompletionRequest
from gateway.config import GatewayConfig

pytestmark = pytest.mark.unit

PARAMETERS = {
    field.name for kind in (ChatRequest, CompletionRequest) for field in msgspec.structs.fields(kind)
}
NEUTRAL = CHAT_NEUTRAL.keys() | COMPLETION_NEUTRAL.keys()


def section(title: str) -> str:
    """What stands below a heading, down to the next one."""
    _, _, rest = prose("docs/gateway.md").partition(f"\n## {title}\n")
    assert rest, title
    return rest.partition("\n## ")[0]


def first_cells(text: str) -> set[str]:
    """The names in the first column of the tables."""
    rows = re.findall(r"^\| (.*?) \|", text, re.MULTILINE)
    return {span for row in rows for span in code_spans(row)}


def test_every_parameter_has_a_row() -> None:
    assert first_cells(section("Parameters")) == PARAMETERS


def test_every_parameter_that_is_not_supported_is_named() -> None:
    (told,) = re.findall(r"^Not supported, .*$", section("Parameters"), re.MULTILINE)
    assert set(code_spans(told)) >= NEUTRAL


def test_every_path_is_told() -> None:
    told = " ".join(code_spans(section("Endpoints")))
    for operation in OPERATIONS:
        assert operation.path.replace("{model:.+}", "{id}") in told


def test_the_settings_that_are_told_exist() -> None:
    settings = {field.name: field for field in fields(GatewayConfig)}
    told = first_cells(section("Settings"))
    assert told <= settings.keys()
    for row in re.findall(r"^\| `(\w+)` \| ([\d,]+) \|", section("Settings"), re.MULTILINE):
        name, default = row
        assert settings[name].default == float(default.replace(",", "")), name
