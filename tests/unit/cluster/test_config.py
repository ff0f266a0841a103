"""Settings: which source wins, and that nothing wrong goes through in silence."""

from dataclasses import dataclass, field
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.config import HelpRequested, load_config
from cluster.context import ServiceConfig
from cluster.errors import ConfigError

pytestmark = pytest.mark.unit


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    model_folder: str = field(default="", metadata={"help": "where the model is"})
    threads: int = field(default=1, metadata={"help": "threads", "min": 1, "max": 64})
    ttl_s: float = field(default=5.0, metadata={"help": "seconds to live", "min": 0.5})
    share: float = field(default=0.5, metadata={"max": 1.0})
    standby: bool = field(default=False, metadata={"help": "only when nobody else answers"})
    checksums: bool = field(default=True, metadata={"help": "check"})
    level: str = field(default="info", metadata={"help": "level", "choices": ("info", "debug")})
    names: tuple[str, ...] = field(default=(), metadata={"help": "some names"})


def load(*argv: str, environ: dict[str, str] | None = None, toml: Path | None = None) -> Example:
    return load_config(Example, argv, environ or {}, role="decode", toml_path=toml)


def written(folder: Path, text: str) -> Path:
    path = folder / "moonpool.toml"
    path.write_text(text)
    return path


def test_defaults() -> None:
    assert load() == Example()


def test_every_type_from_flags() -> None:
    given_flags = ["--model-folder", "/m", "--threads=4", "--ttl-s", "2", "--standby", "--no-checksums"]
    assert load(*given_flags, "--level", "debug", "--names", "a, b,c") == Example(
        model_folder="/m",
        threads=4,
        ttl_s=2.0,
        standby=True,
        checksums=False,
        level="debug",
        names=("a", "b", "c"),
    )


def test_every_type_from_the_environment() -> None:
    environ = {
        "MOONPOOL_MODEL_FOLDER": "/m",
        "MOONPOOL_THREADS": "4",
        "MOONPOOL_TTL_S": "2.5",
        "MOONPOOL_STANDBY": "true",
        "MOONPOOL_CHECKSUMS": "0",
        "MOONPOOL_NAMES": "a",
        "MOONPOOL_SOMETHING_OF_ANOTHER_ROLE": "1",
    }
    expected = Example(model_folder="/m", threads=4, ttl_s=2.5, standby=True, checksums=False, names=("a",))
    assert load(environ=environ) == expected


def test_every_type_from_a_file(tmp_path: Path) -> None:
    path = written(
        tmp_path,
        '[common]\nmodel_folder = "/m"\nthreads = 2\n'
        '[decode]\nthreads = 4\nttl_s = 2\nstandby = true\nnames = ["a", "b"]\n'
        "[gateway]\nunknown_here = 1\n",
    )
    expected = Example(model_folder="/m", threads=4, ttl_s=2.0, standby=True, names=("a", "b"))
    assert load(toml=path) == expected
    assert load("--config", str(path)) == expected
    assert load(environ={"MOONPOOL_CONFIG": str(path)}) == expected


def test_flag_before_environment_before_file_before_default(tmp_path: Path) -> None:
    path = written(tmp_path, "[common]\nthreads = 2\nttl_s = 2.0\nshare = 0.2\n")
    environ = {"MOONPOOL_THREADS": "3", "MOONPOOL_TTL_S": "3"}
    assert load("--threads", "4", environ=environ, toml=path) == Example(threads=4, ttl_s=3.0, share=0.2)


def test_the_named_file_goes_before_the_given_one(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    given_path = written(tmp_path, "[common]\nthreads = 2\n")
    named = written(tmp_path / "other", "[common]\nthreads = 3\n")
    assert load("--config", str(named), toml=given_path).threads == 3


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--thread", "1"], ["--thread", "did you mean --threads"]),
        (["--nonsense"], ["--nonsense", "decode"]),
        (["stray"], ["stray"]),
        (["-t", "1"], ["-t"]),
        (["threads", "1"], ["threads"]),
        (["--threads"], ["--threads", "needs a value"]),
        (["--threads", "many"], ["--threads", "'many'", "an integer"]),
        (["--threads", "1.5"], ["--threads", "an integer"]),
        (["--threads", "0"], ["--threads", "0", "from 1 to 64"]),
        (["--threads", "65"], ["--threads", "from 1 to 64"]),
        (["--ttl-s", "0.1"], ["--ttl-s", "at least 0.5"]),
        (["--ttl-s", "nan"], ["--ttl-s", "nan"]),
        (["--ttl-s", "inf"], ["--ttl-s", "inf"]),
        (["--share", "1.1"], ["--share", "at most 1.0"]),
        (["--level", "loud"], ["--level", "'loud'", "info, debug"]),
        (["--standby=perhaps"], ["--standby", "'perhaps'", "true or false"]),
        (["--no-threads"], ["--no-threads"]),
        (["--config"], ["--config", "needs a value"]),
        (["--config", "/nowhere/at/all"], ["/nowhere/at/all", "No such file"]),
    ],
)
def test_a_wrong_flag_fails_by_name(argv: list[str], words: list[str]) -> None:
    with pytest.raises(ConfigError) as failure:
        load(*argv)
    message = str(failure.value)
    assert all(word in message for word in words), message
    assert "\n" not in message


@pytest.mark.parametrize(
    ("name", "value"),
    [("MOONPOOL_THREADS", "x"), ("MOONPOOL_THREADS", "0"), ("MOONPOOL_STANDBY", ""), ("MOONPOOL_LEVEL", "x")],
)
def test_a_wrong_variable_fails_by_name(name: str, value: str) -> None:
    with pytest.raises(ConfigError, match=name):
        load(environ={name: value})


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[decode]\nthread = 1\n", ["[decode] thread", "unknown", "did you mean threads"]),
        ("[common]\nnonsense = 1\n", ["[common] nonsense", "unknown"]),
        ("[decod]\nthreads = 1\n", ["decod", "tables"]),
        ("threads = 1\n", ["threads", "outside", "[common]"]),
        ("decode = 1\n", ["decode", "tables"]),
        ('[decode]\nthreads = "4"\n', ["threads", "an integer"]),
        ("[decode]\nthreads = true\n", ["threads", "an integer"]),
        ("[decode]\nthreads = 1000\n", ["threads", "from 1 to 64"]),
        ("[decode]\nstandby = 1\n", ["standby", "true or false"]),
        ('[decode]\nnames = "a"\n', ["names", "list of strings"]),
        ("[decode]\nnames = [1]\n", ["names", "list of strings"]),
        ("[decode]\nmodel_folder = 1\n", ["model_folder", "text"]),
        ("[decode\n", ["moonpool.toml"]),
    ],
)
def test_a_wrong_file_fails_by_name(tmp_path: Path, text: str, words: list[str]) -> None:
    with pytest.raises(ConfigError) as failure:
        load(toml=written(tmp_path, text))
    assert all(word in str(failure.value) for word in words), str(failure.value)


def test_a_required_setting_that_is_missing() -> None:
    @dataclass(frozen=True)
    class Strict:
        port: int = field(metadata={"help": "port"})

    with pytest.raises(ConfigError, match="--port is required"):
        load_config(Strict, [], {}, role="decode")
    assert load_config(Strict, ["--port", "1"], {}, role="decode") == Strict(port=1)


def test_a_setting_of_a_type_that_no_flag_spells_is_our_own_mistake() -> None:
    @dataclass(frozen=True)
    class Wrong:
        table: dict[str, int] = field(default_factory=dict)

    with pytest.raises(TypeError, match="table"):
        load_config(Wrong, [], {}, role="decode")


def test_help_lists_every_setting_with_default_limits_and_variable() -> None:
    with pytest.raises(HelpRequested) as asked:
        load("--threads", "wrong", "--help")
    text = str(asked.value)
    for name in Example.__dataclass_fields__:
        assert f"--{name.replace('_', '-')}" in text
        assert f"MOONPOOL_{name.upper()}" in text
    assert "threads [default: 1; from 1 to 64; environment: MOONPOOL_THREADS]" in text
    assert "--standby | --no-standby" in text
    assert "default: true" in text
    assert "--config PATH" in text


def test_the_services_own_settings_all_have_a_help() -> None:
    assert load_config(ServiceConfig, [], {}, role="decode") == ServiceConfig()
    for declared in ServiceConfig.__dataclass_fields__.values():
        assert declared.metadata["help"]


@given(
    st.lists(st.text(max_size=12) | st.sampled_from(["--threads", "--standby", "--ttl-s=1", "4"]), max_size=6)
)
def test_any_command_line_is_taken_or_refused_in_one_line(argv: list[str]) -> None:
    outcome = ""
    try:
        load(*argv)
    except HelpRequested:
        outcome = "help"
    except ConfigError as error:
        outcome = str(error)
    assert len(outcome.splitlines()) <= 1
