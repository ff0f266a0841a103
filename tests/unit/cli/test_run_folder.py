import dataclasses
import os
import subprocess
import sys
from pathlib import Path

import pytest

from moonpool.errors import CommandError
from moonpool.run_folder import (
    ProcessState,
    StackState,
    locked,
    read_state,
    remove_state,
    run_folder,
    write_state,
)

pytestmark = pytest.mark.unit

STATE = StackState(
    name="default",
    pid=os.getpid(),
    model="tiny",
    model_folder="/models/tiny",
    url="http://127.0.0.1:8000/v1",
    nats_url="nats://127.0.0.1:4222",
    etcd_url="http://127.0.0.1:2379",
    processes=(ProcessState("gateway-0", 42, "/logs/gateway-0.log"),),
)


def test_what_is_written_is_read_back_until_it_is_removed(tmp_path: Path) -> None:
    assert read_state(tmp_path) is None
    write_state(tmp_path, STATE)
    assert read_state(tmp_path) == STATE
    remove_state(tmp_path)
    assert read_state(tmp_path) is None
    remove_state(tmp_path)


def test_the_state_of_a_dead_stack_counts_for_nothing(tmp_path: Path) -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    write_state(tmp_path, dataclasses.replace(STATE, pid=gone.pid))
    assert read_state(tmp_path) is None


@pytest.mark.parametrize("text", ["", "[]", '{"name": "default"}'])
def test_a_broken_state_file_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "stack.json").write_text(text)
    with pytest.raises(CommandError, match=r"stack\.json"):
        read_state(tmp_path)


def test_a_folder_is_held_by_one_stack_at_a_time(tmp_path: Path) -> None:
    folder = tmp_path / "mine"
    with locked(folder), pytest.raises(CommandError, match="'mine' is already running"), locked(folder):
        pass
    with locked(folder):
        pass


def test_the_home_can_be_moved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOONPOOL_HOME", str(tmp_path))
    assert run_folder("a") == tmp_path / "run" / "a"
    monkeypatch.delenv("MOONPOOL_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert run_folder("a") == tmp_path / ".cache" / "moonpool" / "run" / "a"
