import pytest

from cluster.cluster_config import SETTINGS
from moonpool.__main__ import main
from moonpool.commands.config import as_table, assignments_of
from moonpool.errors import UsageError

pytestmark = pytest.mark.unit


def test_assignments_are_names_and_texts() -> None:
    assert assignments_of(["strategy=joint", "ttft_ms_default=", "admission=a=b"]) == {
        "strategy": "joint",
        "ttft_ms_default": "",
        "admission": "a=b",
    }


@pytest.mark.parametrize("arguments", [["strategy"], ["=joint"], [""], ["strategy=a", "strategy=b"]])
def test_what_is_no_assignment_is_refused(arguments: list[str]) -> None:
    with pytest.raises(UsageError, match=r"NAME=VALUE|strategy is given twice"):
        assignments_of(arguments)


def test_the_table_shows_every_setting_with_its_limits_and_what_it_does_not_know() -> None:
    lines = as_table({"ttft_ms_default": 500.0, "of_a_newer_version": [1]}).splitlines()
    assert len(lines) == 1 + len(SETTINGS) + 1
    (ttft,) = [line.split() for line in lines if line.startswith("ttft_ms_default")]
    assert ttft[1:6] == ["500.0", "from", "0.0", "to", "3600000.0"]
    (strategy,) = [line.split() for line in lines if line.startswith("strategy")]
    assert strategy[1:4] == ["-", "one", "of"]
    assert lines[-1].split() == ["of_a_newer_version", "[1]", "unknown", "to", "this", "version"]


def test_bad_usage_says_the_word_of_the_command_once(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "set", "strategy"]) == 2
    assert capsys.readouterr().err == "moonpool config set: error: 'strategy' must have the form NAME=VALUE\n"
    assert main(["config", "unset"]) == 2
    assert capsys.readouterr().err == "moonpool config unset: error: give names of settings, or --all\n"
