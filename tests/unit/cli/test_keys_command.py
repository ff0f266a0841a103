"""`moonpool keys`: what is printed is what gateways take."""

import io
import json
import tomllib

import pytest

from gateway.tenants.api_keys import hash_line
from gateway.tenants.tenants import keys_in, read_table
from moonpool.__main__ import main

pytestmark = pytest.mark.unit


def test_a_new_key_is_told_once_with_what_to_write_down(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["keys", "new", "acme", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["hash"] == hash_line(told["key"])
    assert told["tenant"] == "acme"
    assert main(["keys", "new", "acme", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["key"] != told["key"]


@pytest.mark.parametrize("tenant", ["acme", "acme.eu"])
def test_what_is_to_be_written_down_is_read(tenant: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["keys", "new", tenant]) == 0
    lines = [line.strip() for line in capsys.readouterr().out.splitlines()]
    key = next(line for line in lines if line.startswith("mp-"))
    table = "\n".join(line for line in lines if line.startswith(("[", "keys =")))
    assert tomllib.loads(table)
    (known,) = keys_in(table, "printed")
    entry = next(line for line in lines if line.startswith("MOONPOOL_API_KEYS=")).partition("=")[2]
    assert read_table(None, [entry]).keys.keys() == {known.digest}
    assert known.tenant.name == tenant
    assert hash_line(key).endswith(known.digest.hex())


def test_a_key_from_standard_input_is_hashed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("mp-x\nmore\n"))
    assert main(["keys", "hash"]) == 0
    assert capsys.readouterr().out == hash_line("mp-x") + "\n"


def test_bad_usage_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["keys", "new", "a b"]) == 2
    assert "TENANT must be" in capsys.readouterr().err
    for text in ("", "\n", "x" * 600):
        monkeypatch.setattr("sys.stdin", io.StringIO(text))
        assert main(["keys", "hash"]) == 2
        assert "one line with a key" in capsys.readouterr().err


def test_the_version_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out.startswith("moonpool ")
