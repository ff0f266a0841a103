"""Stacks that several modules share, started once, and their logs where a test fails."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support.loose_stack import LooseStack
from tests.support.soak_reference import SoakReference
from tests.support.stack import RunningStack, running_stack

from engine.tiny import make_tiny_model


@pytest.fixture(scope="session")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """$MOONPOOL_HOME of all stacks of this run: nothing of an earlier one is found there."""
    return tmp_path_factory.mktemp("moonpool-home")


@pytest.fixture(scope="session")
def tiny_stack(home: Path) -> Iterator[RunningStack]:
    """Two prefill and two decode instances with a tiny random model."""
    with running_stack(home, "tiny", "--model", "tiny", "--prefill", "2", "--decode", "2") as stack:
        yield stack


@pytest.fixture(scope="session")
def smollm2_stack(home: Path) -> Iterator[RunningStack]:
    """One prefill and one decode instance with the default model."""
    with running_stack(home, "smollm2", "--model", "smollm2") as stack:
        yield stack


@pytest.fixture(scope="session")
def small_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model so much larger than `tiny` that to move a block is quicker than to compute it, as with
    real ones."""
    folder = tmp_path_factory.mktemp("models") / "small"
    make_tiny_model(folder, hidden_size=256, intermediate_size=512, layers=6)
    return folder


@pytest.fixture(scope="session")
def small_reference(small_folder: Path) -> SoakReference:
    return SoakReference(small_folder)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    """Add the logs of the stacks that a failed test used to its report."""
    report = yield
    if report.failed and isinstance(item, pytest.Function):
        for value in item.funcargs.values():
            if isinstance(value, RunningStack):
                report.sections.append((f"logs of stack {value.name}", value.logs()))
            elif isinstance(value, LooseStack):
                report.sections.append(("logs of the stack", value.logs()))
    return report
