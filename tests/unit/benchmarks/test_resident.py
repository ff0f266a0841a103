"""A compared system of a few lines of Python: what the driver does to it, and when it fails."""

import os
import sys
from pathlib import Path

import pytest
from benchmarks import resident
from benchmarks.resident import Resident, ResidentError

pytestmark = pytest.mark.unit

ECHO = """
import json, sys
print(json.dumps({"about": {"kind": "echo"}}), flush=True)
for line in sys.stdin:
    print("told on standard error", file=sys.stderr, flush=True)
    question = json.loads(line)
    if question["do"] == "end":
        sys.exit("no more")
    if question["do"] == "answer":
        print(json.dumps({"got": question["number"]}), flush=True)
"""


@pytest.fixture
def echo(tmp_path: Path):
    system = Resident.start("echo", [sys.executable, "-c", ECHO], {}, tmp_path)
    yield system
    system.close()


def state(system: Resident) -> str:
    return Path(f"/proc/{system._process.pid}/stat").read_text().rpartition(")")[2].split()[0]


def wait_until_stopped(system: Resident) -> None:
    """A stop signal is carried out before the next instruction: the kernel tells us here when it was."""
    os.waitid(os.P_PID, system._process.pid, os.WSTOPPED | os.WNOWAIT)


def test_it_answers_and_is_stopped_in_between(echo: Resident) -> None:
    assert echo.about == {"kind": "echo"}
    for number in range(3):
        wait_until_stopped(echo)
        assert state(echo) == "T"
        assert echo.ask(do="answer", number=number) == {"got": number}


def test_one_that_ends_is_told_with_the_end_of_its_log(echo: Resident) -> None:
    with pytest.raises(ResidentError, match=r"(?s)echo ended.*told on standard error\nno more"):
        echo.ask(do="end")


def test_one_that_does_not_start_is_told_too(tmp_path: Path) -> None:
    with pytest.raises(ResidentError, match=r"(?s)broken ended.*ModuleNotFoundError"):
        Resident.start("broken", [sys.executable, "-c", "import no_such_module"], {}, tmp_path)


def test_one_that_does_not_answer_is_given_up_and_closing_ends_it(
    echo: Resident, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resident, "ANSWER_S_MAX", 0.05)
    with pytest.raises(ResidentError, match="echo did not answer within"):
        echo.ask(do="nothing")
    echo.close()
    assert echo._process.returncode == -9
