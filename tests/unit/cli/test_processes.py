import asyncio
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from moonpool import child
from moonpool.processes import COMPLAINT_CHARS_MAX, Child, ProcessSpec, ending

pytestmark = pytest.mark.unit

ANSWER_S_MAX = 20.0

SAY_READY_THEN_WAIT = """
import signal, sys
{setup}
print("ready", flush=True)
while True:
    signal.pause()
"""


def python(source: str, *, name: str = "child", stop_s_max: float = ANSWER_S_MAX) -> ProcessSpec:
    return ProcessSpec(
        name=name,
        program=(sys.executable, "-c", textwrap.dedent(source)),
        environment={"MOONPOOL_TEST_VALUE": "told"},
        stop_s_max=stop_s_max,
    )


async def logged(child: Child, text: str) -> None:
    async with asyncio.timeout(ANSWER_S_MAX):
        while True:
            if text in child.log_tail():
                return
            await asyncio.sleep(0.01)


async def test_a_child_runs_in_its_own_session_with_its_environment_and_log(tmp_path: Path) -> None:
    running = await Child.start(
        python("import os; print(os.environ['MOONPOOL_TEST_VALUE'], os.getsid(0) == os.getpid())"), tmp_path
    )
    assert await running.wait() == 0
    assert running.log_tail() == "told True"


async def test_a_child_that_heeds_the_signal_is_not_killed(tmp_path: Path) -> None:
    setup = "signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))"
    running = await Child.start(python(SAY_READY_THEN_WAIT.format(setup=setup)), tmp_path)
    await logged(running, "ready")
    assert await running.stop()
    assert running.exit_status == 7


async def test_a_child_that_ignores_the_signal_is_killed_after_its_time(tmp_path: Path) -> None:
    setup = "signal.signal(signal.SIGTERM, signal.SIG_IGN)"
    running = await Child.start(python(SAY_READY_THEN_WAIT.format(setup=setup), stop_s_max=0.2), tmp_path)
    await logged(running, "ready")
    assert not await running.stop()
    assert running.exit_status == -signal.SIGKILL


async def test_stopping_a_child_that_is_gone_does_nothing(tmp_path: Path) -> None:
    running = await Child.start(python("raise SystemExit(3)"), tmp_path)
    assert await running.wait() == 3
    assert await running.stop()
    await running.kill()
    assert running.exit_status == 3


async def test_the_log_tail_is_bounded_and_the_newest(tmp_path: Path) -> None:
    running = await Child.start(python("print('\\n'.join(f'line {i}' for i in range(5000)))"), tmp_path)
    await running.wait()
    lines = running.log_tail().splitlines()
    assert lines[-1] == "line 4999"
    assert len(lines) == 15


async def test_a_child_that_ended_is_told_with_its_last_words(tmp_path: Path) -> None:
    running = await Child.start(python("raise SystemExit('x' * 5000 + 'too small')"), tmp_path)
    await running.wait()
    assert running.ending() == "ended with status 1: " + "x" * COMPLAINT_CHARS_MAX


@pytest.mark.parametrize(
    ("status", "log", "told"),
    [
        (0, [], "ended with status 0"),
        (
            2,
            ['{"level":"info","message":"starting"}', "prefill: no room", ""],
            "ended with status 2: prefill: no room",
        ),
        (
            1,
            [
                "an older line",
                '{"level":"error","message":"service failed","reason":"another process took the name a"}',
                '{"level":"warning","message":"not drained in time"}',
                '{"level":"info","message":"draining"}',
            ],
            "ended with status 1: service failed: another process took the name a",
        ),
        (
            1,
            ['{"level":"fatal","msg":"discovery failed","error":"no disk"}'],
            "ended with status 1: discovery failed: no disk",
        ),
        (1, ['{"level":"error","message":"cut'], "ended with status 1"),
        (-signal.SIGKILL, ["what it said before"], "was killed by SIGKILL"),
        (-50, [], "was killed by signal 50"),
    ],
)
def test_how_and_why_a_process_ended(status: int, log: list[str], told: str) -> None:
    assert ending(status, log) == told


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's parent-death signal is Linux's")
def test_a_child_dies_with_its_parent_even_where_that_is_killed() -> None:
    # parent → child.py → sleeper; the pipe's read end sees end-of-file once both are gone.
    parent = subprocess.Popen(
        [
            sys.executable,
            "-c",
            textwrap.dedent(
                """
                import os, subprocess, sys, time
                launcher, pid = sys.argv[1], str(os.getpid())
                sleeper = "import os, time; print(os.getpid(), flush=True); time.sleep(600)"
                subprocess.Popen([sys.executable, launcher, pid, sys.executable, "-c", sleeper]).wait()
                """
            ),
            str(Path(child.__file__)),
        ],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert parent.stdout is not None
    sleeper_pid = int(parent.stdout.readline())
    os.kill(sleeper_pid, 0)
    parent.kill()
    parent.wait(ANSWER_S_MAX)
    assert parent.stdout.read() == ""
