"""The scheduler of examples/ says how it is called. At work: tests/integration/test_external_scheduler.py."""

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.unit

EXAMPLE = Path(__file__).parents[3] / "examples" / "external_scheduler.py"
ANSWER_S_MAX = 30.0


def test_without_an_address_it_says_how_it_is_called() -> None:
    ended = subprocess.run(
        [sys.executable, str(EXAMPLE)], capture_output=True, text=True, timeout=ANSWER_S_MAX, check=False
    )
    assert ended.returncode == 2
    assert ended.stderr.startswith("usage: external_scheduler.py [-h] nats_url\n")
    assert "Traceback" not in ended.stderr
