"""Flag before name before environment before the default stack."""

import argparse
import os
from pathlib import Path

import pytest

from moonpool.errors import CommandError
from moonpool.find_stack import add_cluster_arguments, add_stack_arguments, api_url, cluster_urls, gateway_api
from moonpool.run_folder import StackState, run_folder, write_state

pytestmark = pytest.mark.unit

PID_OF_NOBODY = (1 << 22) + 1
"""Linux gives none above 2^22."""


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MOONPOOL_HOME", str(tmp_path))
    for variable in (
        "MOONPOOL_URL",
        "MOONPOOL_NATS_URL",
        "MOONPOOL_ETCD_URL",
        "MOONPOOL_API_KEY",
        "MOONPOOL_CA_FILE",
    ):
        monkeypatch.delenv(variable, raising=False)
    return tmp_path


def running(name: str) -> None:
    folder = run_folder(name)
    folder.mkdir(parents=True)
    urls = (f"http://{name}/v1", f"nats://{name}", f"http://{name}")
    write_state(folder, StackState(name, os.getpid(), "tiny", "/m", *urls, ()))


def asked_url(*arguments: str) -> str:
    parser = argparse.ArgumentParser()
    add_stack_arguments(parser)
    return api_url(parser.parse_args(arguments))


def test_key_and_certificates_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    parser = argparse.ArgumentParser()
    add_stack_arguments(parser)
    plain = gateway_api(parser.parse_args(["--url", "https://a"]), timeout_s=5)
    assert (plain.url, plain.key, plain.ca_file, plain.timeout_s) == ("https://a", "", None, 5)
    monkeypatch.setenv("MOONPOOL_API_KEY", "mp-x")
    monkeypatch.setenv("MOONPOOL_CA_FILE", "/env.pem")
    asked = gateway_api(parser.parse_args(["--url", "https://a"]))
    assert (asked.key, asked.ca_file) == ("mp-x", Path("/env.pem"))
    assert gateway_api(parser.parse_args(["--url", "https://a", "--ca-file", "/b.pem"])).ca_file == Path(
        "/b.pem"
    )


def test_the_gateway_is_found_in_this_order(monkeypatch: pytest.MonkeyPatch) -> None:
    running("default")
    running("other")
    assert asked_url() == "http://default/v1"
    monkeypatch.setenv("MOONPOOL_URL", "http://environment/v1")
    assert asked_url() == "http://environment/v1"
    assert asked_url("--name", "other") == "http://other/v1"
    assert asked_url("--name", "other", "--url", "http://flag/v1") == "http://flag/v1"


def test_bus_and_control_plane_are_found_in_the_same_order(monkeypatch: pytest.MonkeyPatch) -> None:
    running("other")
    monkeypatch.setenv("MOONPOOL_NATS_URL", "nats://environment")
    monkeypatch.setenv("MOONPOOL_ETCD_URL", "http://environment")
    parser = argparse.ArgumentParser()
    add_cluster_arguments(parser)
    assert cluster_urls(parser.parse_args([])) == ("nats://environment", "http://environment")
    assert cluster_urls(parser.parse_args(["--name", "other"])) == ("nats://other", "http://other")
    mixed = parser.parse_args(["--name", "other", "--nats-url", "nats://flag"])
    assert cluster_urls(mixed) == ("nats://flag", "http://other")


def test_a_stack_that_does_not_run_is_named() -> None:
    with pytest.raises(CommandError, match="'other' runs here; start one with `moonpool up`, or give --url"):
        asked_url("--name", "other")


def test_where_others_run_their_names_are_told(home: Path) -> None:
    running("second")
    running("another")
    state = (run_folder("second") / "stack.json").read_text()
    for name, text in (("broken", "{"), ("gone", state.replace(str(os.getpid()), str(PID_OF_NOBODY)))):
        run_folder(name).mkdir()
        (run_folder(name) / "stack.json").write_text(text)
    with pytest.raises(CommandError, match=r"here; give --name, one of another, second, or give --url$"):
        asked_url()
