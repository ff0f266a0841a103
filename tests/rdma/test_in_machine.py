"""The contract suite over rdma, and the tests of `device`, in a virtual machine that has Soft-RoCE.

The machine is started once. What ran in it is compared with what there is to run: nothing passes because it
was not there.
"""

import os
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from dataclasses import dataclass
from pathlib import Path

import pytest
from tests.rdma.machine import DEVICE_TESTS_VARIABLE, REQUIRED_VARIABLE, RUN, missing

MACHINE_S_MAX = 900
"""Some four minutes where emulation has two processors to itself."""
ROOT = Path(__file__).parents[2]
SUITES = ("tests/contract", "tests/rdma/device")
SELECTION = ("-k", "rdma", "-p", "no:cacheprovider", "-q", *SUITES)
ENVIRONMENT = {"MOONPOOL_TRANSFER_TRANSPORTS": "rdma", DEVICE_TESTS_VARIABLE: "1"}

pytestmark = [pytest.mark.integration, pytest.mark.timeout(MACHINE_S_MAX + 60)]


@dataclass(frozen=True, slots=True)
class MachineRun:
    """What there was to run, outcomes by name of test ("passed" or what went wrong), and what was printed."""

    expected: set[str]
    outcomes: dict[str, str]
    output: str


@pytest.fixture(scope="module")
def machine_run(tmp_path_factory: pytest.TempPathFactory) -> MachineRun:
    lacking = missing()
    if lacking and os.environ.get(REQUIRED_VARIABLE):
        pytest.fail(f"{REQUIRED_VARIABLE} is set, but {lacking}")
    if lacking:
        pytest.skip(lacking)
    expected = _collected()
    shared = tmp_path_factory.mktemp("rdma")
    report = shared / "report.xml"
    options = [option for name in ENVIRONMENT for option in ("--env", name)]
    pytest_command = (sys.executable, "-m", "pytest", f"--junitxml={report}", "--durations=15", *SELECTION)
    finished = subprocess.run(
        [str(RUN), "--rw", str(shared), "--timeout", str(MACHINE_S_MAX), *options, "--", *pytest_command],
        cwd=ROOT,
        env={**os.environ, **ENVIRONMENT, "MOONPOOL_RDMA_VM_TIMES": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    output = f"{finished.stdout}\n{finished.stderr}\nexit status {finished.returncode}"
    print(output)
    return MachineRun(expected, _outcomes(report) if report.exists() else {}, output)


def _outcomes(report: Path) -> dict[str, str]:
    found = {}
    for case in ElementTree.parse(report).iter("testcase"):
        wrong = [
            f"{part.tag}: {part.get('message', '')}"
            for part in case
            if part.tag in ("failure", "error", "skipped")
        ]
        found[f"{case.get('classname')}.{case.get('name')}"] = "; ".join(wrong) or "passed"
    return found


def _collected() -> set[str]:
    """The names of all tests that the machine should run, as a report writes them."""
    listed = subprocess.run(
        [sys.executable, "-m", "pytest", "--collect-only", *SELECTION],
        cwd=ROOT,
        env={**os.environ, **ENVIRONMENT},
        capture_output=True,
        text=True,
        check=False,
    )
    assert listed.returncode == 0, listed.stdout + listed.stderr
    names = set()
    for line in listed.stdout.splitlines():
        file, separator, test = line.partition("::")
        if separator:
            names.add(f"{file.removesuffix('.py').replace('/', '.')}.{test.replace('::', '.')}")
    return names


def test_all_of_the_suites_ran_in_the_machine(machine_run: MachineRun) -> None:
    for suite in SUITES:
        assert any(name.startswith(suite.replace("/", ".")) for name in machine_run.expected)
    assert set(machine_run.outcomes) == machine_run.expected, machine_run.output


def test_all_that_ran_in_the_machine_passed(machine_run: MachineRun) -> None:
    failed = {name: outcome for name, outcome in machine_run.outcomes.items() if outcome != "passed"}
    assert machine_run.outcomes
    assert not failed, machine_run.output
