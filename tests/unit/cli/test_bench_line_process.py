"""A helper process of a few lines: what is asked and answered, and what is said when it fails."""

import sys

import pytest

from moonpool.benchmarks import line_process
from moonpool.benchmarks.line_process import LineProcess, LineProcessError

pytestmark = pytest.mark.unit

DOUBLER = """
import sys
from moonpool.benchmarks.line_process import own_the_output, serve

replies = own_the_output()
print("noise of a library")

def answer(question):
    if question["number"] == 0:
        sys.exit(3)
    return {"got": 2 * question["number"]}

serve(replies, answer)
"""


@pytest.fixture
def doubler():
    with LineProcess([sys.executable, "-c", DOUBLER]) as process:
        yield process


def test_it_answers_and_ends_with_its_input(doubler: LineProcess) -> None:
    assert [doubler.ask(number=number) for number in (1, 2)] == [{"got": 2}, {"got": 4}]
    doubler.close()
    assert doubler._process.returncode == 0


def test_an_error_is_told_and_ends_nothing(doubler: LineProcess) -> None:
    with pytest.raises(LineProcessError, match="TypeError"):
        doubler.ask(number=None)
    assert doubler.ask(number=4) == {"got": 8}


def test_one_that_ends_or_does_not_answer_is_told(
    doubler: LineProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(LineProcessError, match="ended"):
        doubler.ask(number=0)
    monkeypatch.setattr(line_process, "ANSWER_S_MAX", 0.05)
    with (
        LineProcess([sys.executable, "-c", "import sys; sys.stdin.read()"]) as silent,
        pytest.raises(LineProcessError, match="did not answer within"),
    ):
        silent.ask(number=1)
