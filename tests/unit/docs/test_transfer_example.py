"""The example of docs/transfer.md runs as it stands there."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.unit

DOCUMENT = Path(__file__).parents[3] / "docs" / "transfer.md"
RUN_S_MAX = 60.0


def test_the_example_runs(tmp_path: Path) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", DOCUMENT.read_text(encoding="utf-8"), re.DOTALL)
    script = tmp_path / "example.py"
    script.write_text(code, encoding="utf-8")
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=RUN_S_MAX)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[0] == "arrived: b'layer 0' 8192"
    assert re.fullmatch(r"8192 bytes over (shm|rdma|tcp)", done.stdout.splitlines()[1])
    assert done.stderr == ""
