"""`moonpool config` against a real etcd: what it prints, what it refuses, and with which status."""

import asyncio
import json

import pytest
from tests.support.control_worlds import connected

from cluster import keys
from cluster.cluster_config import SETTINGS
from moonpool.__main__ import main
from moonpool.servers import ServerProcess

pytestmark = pytest.mark.contract


class Typed:
    def __init__(self, url: str, capsys: pytest.CaptureFixture[str]) -> None:
        self.url = url
        self.capsys = capsys

    def __call__(self, *arguments: str) -> tuple[int, str, str]:
        """Exit status, output, error."""
        status = main(["config", *arguments, "--etcd-url", self.url])
        captured = self.capsys.readouterr()
        return status, captured.out, captured.err


@pytest.fixture
def config(etcd: ServerProcess, capsys: pytest.CaptureFixture[str]) -> Typed:
    typed = Typed(etcd.url, capsys)
    assert typed("unset", "--all")[0] == 0
    return typed


def test_what_is_set_is_shown_until_it_is_unset(config: Typed) -> None:
    status, text, _ = config("show", "--json")
    told = json.loads(text)
    assert (status, told["revision"], told["settings"], told["not_valid"]) == (0, 0, {}, {})
    assert list(told["known"]) == list(SETTINGS)
    status, text, _ = config("set", "ttft_ms_default=500", "strategy=joint", "--json")
    told = json.loads(text)
    assert (status, told["settings"]) == (0, {"ttft_ms_default": 500.0, "strategy": "joint"})
    assert told["revision"] > 0
    assert json.loads(config("show", "--json")[1]) == told
    assert "500.0" in config("show")[1]
    told = json.loads(config("unset", "ttft_ms_default", "admission", "--json")[1])
    assert told["settings"] == {"strategy": "joint"}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("set", "ttft_ms_default=-1"), "ttft_ms_default: -1.0 is not from 0.0 to 3600000.0"),
        (("set", "strategy=best"), "strategy: 'best' is not one of random, "),
        (("set", "admission=none", "colour=red"), "colour: no such setting"),
        (("set", "admission"), "'admission' must have the form NAME=VALUE"),
        (("unset", "colour"), "colour: no such setting"),
        (("unset",), "give names of settings, or --all"),
        (("unset", "strategy", "--all"), "give names of settings, or --all"),
    ],
)
def test_what_makes_no_sense_is_refused_in_one_line(
    config: Typed, arguments: tuple[str, ...], said: str
) -> None:
    status, text, error = config(*arguments)
    assert (status, text) == (2, "")
    assert said in error
    assert len(error.splitlines()) == 1
    assert json.loads(config("show", "--json")[1])["settings"] == {}


async def _put(url: str, value: bytes) -> None:
    control = await connected(url)
    await control.put(keys.CONFIG, value)
    await control.close()


async def test_what_another_broke_is_named_and_can_be_cleared(config: Typed) -> None:
    await _put(config.url, b"{")
    status, _, error = await asyncio.to_thread(config, "show")
    assert (status, len(error.splitlines())) == (1, 1)
    assert "configuration: no JSON" in error
    assert "`moonpool config unset --all` clears it" in error
    status, text, _ = await asyncio.to_thread(config, "unset", "--all", "--json")
    assert (status, json.loads(text)["settings"]) == (0, {})
    status, text, _ = await asyncio.to_thread(config, "show", "--json")
    assert (status, json.loads(text)["settings"]) == (0, {})


async def test_what_services_pass_over_is_marked(config: Typed) -> None:
    await _put(config.url, b'{"tbt_ms_default": true, "strategy": "joint"}')
    status, text, _ = await asyncio.to_thread(config, "show", "--json")
    told = json.loads(text)
    assert (status, told["not_valid"]) == (0, {"tbt_ms_default": "True is not a number"})
    assert told["settings"] == {"tbt_ms_default": True, "strategy": "joint"}
    _, text, _ = await asyncio.to_thread(config, "show")
    assert "not valid: True is not a number" in text
    status, text, _ = await asyncio.to_thread(config, "unset", "tbt_ms_default", "--json")
    assert (status, json.loads(text)["settings"]) == (0, {"strategy": "joint"})


def test_without_a_control_plane_it_says_so_in_time(capsys: pytest.CaptureFixture[str]) -> None:
    status = main(["config", "show", "--etcd-url", "http://127.0.0.1:1", "--timeout", "0.3"])
    assert status == 1
    assert "no etcd answers at http://127.0.0.1:1 within 0.3 s" in capsys.readouterr().err
