import pytest

from cluster.cluster_config import SETTINGS
from moonpool.__main__ import main
from moonpool.commands.config import PASSED_OVER, as_object, as_table, assignments_of
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


def test_the_object_says_what_is_allowed_and_what_it_means() -> None:
    told = as_object({"strategy": "joint", "of_a_newer_version": [1]}, 7)
    assert (told["revision"], told["not_valid"]) == (7, {})
    known = told["known"]
    assert isinstance(known, dict)
    assert list(known) == list(SETTINGS)
    assert known["ttft_ms_default"]["allowed"] == "from 0.0 to 3600000.0"
    assert known["adaptive"]["allowed"] == "true or false"
    assert all(one["allowed"] and one["meaning"] for one in known.values())


def test_what_services_pass_over_is_marked() -> None:
    document = {"tbt_ms_default": True, "strategy": "best", "admission": "none", "adaptive": None}
    not_valid = as_object(document, 1)["not_valid"]
    assert isinstance(not_valid, dict)
    assert list(not_valid) == ["tbt_ms_default", "strategy"]
    assert not_valid["strategy"].startswith("'best' is not one of random, ")
    lines = as_table(document).splitlines()
    marked = [line.split()[0] for line in lines if "not valid: " in line]
    assert sorted(marked) == ["strategy", "tbt_ms_default"]
    assert lines[-1] == PASSED_OVER
    assert PASSED_OVER not in as_table({"admission": "none"})


def test_bad_usage_says_the_word_of_the_command_once(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "set", "strategy"]) == 2
    assert capsys.readouterr().err == "moonpool config set: error: 'strategy' must have the form NAME=VALUE\n"
    assert main(["config", "unset"]) == 2
    assert capsys.readouterr().err == "moonpool config unset: error: give names of settings, or --all\n"
