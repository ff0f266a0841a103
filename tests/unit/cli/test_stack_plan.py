import argparse
import dataclasses
import json
import shlex
import socket
from pathlib import Path

import pytest

from kvindex.core import InstanceId
from moonpool.commands import up
from moonpool.errors import CommandError, UsageError
from moonpool.ports import check_port, hold_port
from moonpool.roles import SERVICE_OF_ROLE, ServiceSettings, service_arguments
from moonpool.stack_plan import SECRET_VARIABLE, STOP_ORDER, StackConfig, members, service_environment

pytestmark = pytest.mark.unit

SETTINGS = ServiceSettings(
    nats_url="nats://a:1",
    etcd_url="http://a:2",
    model_folder=Path("/models/tiny"),
    gateway_bind="0.0.0.0",
    gateway_port=8000,
    threads=2,
    pool_bytes=1 << 20,
    ssd_bytes=1 << 21,
    ssd_folder=Path("/disk/kv"),
    drain_s_max=30.0,
)


def test_several_gateways_have_names_of_their_own_and_share_the_port() -> None:
    names = [member.instance for member in members(StackConfig(name="a", model="tiny", gateways=3))]
    assert names[-3:] == ["gateway-0", "gateway-1", "gateway-2"]
    shared = dataclasses.replace(SETTINGS, gateways_share_port=True)
    assert "--reuse-port" in service_arguments("gateway", InstanceId("gateway-0"), shared)
    assert "--reuse-port" not in service_arguments("gateway", InstanceId("gateway-0"), SETTINGS)
    assert "--reuse-port" not in service_arguments("decode", InstanceId("decode-0"), shared)


def test_a_held_port_takes_no_connection_and_is_nobody_elses() -> None:
    with hold_port("127.0.0.1", 0) as held:
        port = held.getsockname()[1]
        with pytest.raises(CommandError, match="in use"):
            check_port("127.0.0.1", port)
        with pytest.raises(OSError, match="refused"):
            socket.create_connection(("127.0.0.1", port), timeout=5)
    check_port("127.0.0.1", port)


def parsed(*arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    up.add_arguments(parser)
    return parser.parse_args(arguments)


def test_a_stack_has_one_of_each_duty_and_as_many_workers_as_asked() -> None:
    names = [member.instance for member in members(StackConfig(name="a", model="tiny", prefill=2, coupled=1))]
    assert names == [
        "kvmeta-0",
        "conductor-0",
        "prefill-0",
        "prefill-1",
        "decode-0",
        "coupled-0",
        "gateway-0",
    ]


def test_a_secret_is_drawn_for_each_run_but_where_one_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    config = StackConfig(name="a", model="tiny")
    monkeypatch.setenv(SECRET_VARIABLE, "")
    drawn = {service_environment(config)[SECRET_VARIABLE] for _ in range(2)}
    assert [len(secret) for secret in drawn] == [64, 64]
    monkeypatch.setenv(SECRET_VARIABLE, "known to who joins")
    assert service_environment(config)[SECRET_VARIABLE] == "known to who joins"


def test_every_service_is_stopped_and_the_gateway_first() -> None:
    stopped = [role for roles in STOP_ORDER for role in roles]
    assert stopped[0] == "gateway"
    assert sorted(stopped) == sorted(SERVICE_OF_ROLE)


@pytest.mark.parametrize("role", sorted(SERVICE_OF_ROLE))
def test_no_secret_is_on_a_command_line_and_all_know_the_servers(role: str) -> None:
    arguments = service_arguments(role, InstanceId(f"{role}-0"), SETTINGS)
    assert arguments[0] == "-m"
    assert ("nats://a:1" in arguments, "http://a:2" in arguments) == (True, True)
    assert not any("secret" in argument for argument in arguments)


def test_only_the_gateway_listens_where_clients_come() -> None:
    listening = {
        role for role in SERVICE_OF_ROLE if "8000" in service_arguments(role, InstanceId("x"), SETTINGS)
    }
    assert listening == {"gateway"}


def test_only_workers_get_memory_and_threads() -> None:
    sized = {
        role
        for role in SERVICE_OF_ROLE
        if {"--pool-bytes", "--ssd-bytes", "/disk/kv"}
        <= {*service_arguments(role, InstanceId("x"), SETTINGS)}
    }
    assert sized == {"prefill", "decode", "coupled"}


def test_a_worker_without_files_is_told_nothing_of_a_folder() -> None:
    arguments = service_arguments("decode", InstanceId("x"), dataclasses.replace(SETTINGS, ssd_bytes=0))
    assert not {"--ssd-bytes", "--ssd-folder"} & {*arguments}


@pytest.mark.parametrize(("bind", "host"), [("0.0.0.0", None), ("192.0.2.1", "192.0.2.1")])
def test_the_gateway_is_found_where_it_listens(bind: str, host: str | None) -> None:
    settings = dataclasses.replace(SETTINGS, gateway_bind=bind)
    arguments = service_arguments("gateway", InstanceId("gateway-0"), settings)
    assert arguments[arguments.index("--bind") + 1] == bind
    assert (arguments[arguments.index("--host") + 1] if "--host" in arguments else None) == host


@pytest.mark.parametrize(
    "flags", [["--prefill", "0"], ["--decode", "0"], ["--prefill", "0", "--decode", "0"]]
)
def test_a_stack_that_could_not_answer_is_refused(flags: list[str]) -> None:
    with pytest.raises(UsageError, match="--coupled"):
        up.stack_config(parsed(*flags))


@pytest.mark.parametrize("name", ["", "../up", "a/b", "-x", "a" * 65])
def test_a_name_that_is_no_folder_name_is_refused(name: str) -> None:
    with pytest.raises(UsageError, match="--name"):
        up.stack_config(parsed(f"--name={name}"))


def test_a_folder_for_files_of_no_size_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="--ssd-bytes"):
        up.stack_config(parsed("--ssd-folder", str(tmp_path)))


def test_flags_reach_the_stack() -> None:
    flags = ["--model", "tiny", "--prefill", "0", "--decode", "0", "--coupled", "2", "--port", "0"]
    more = ["--threads", "3", "--pool-bytes", "2097152", "--drain-timeout", "5", "--name", "mine"]
    more += ["--ssd-bytes", "4194304", "--ssd-folder", "/disk/kv"]
    assert up.stack_config(parsed(*flags, *more)) == StackConfig(
        name="mine",
        model="tiny",
        prefill=0,
        decode=0,
        coupled=2,
        threads=3,
        pool_bytes=2097152,
        ssd_bytes=4194304,
        ssd_folder=Path("/disk/kv"),
        drain_s_max=5.0,
    )


def test_the_example_is_a_command_a_shell_understands() -> None:
    words = shlex.split(up.example_curl("http://127.0.0.1:8000/v1", "it's"))
    assert words[:3] == ["curl", "-N", "http://127.0.0.1:8000/v1/chat/completions"]
    assert json.loads(words[-1])["model"] == "it's"


def test_a_taken_port_and_a_host_of_others_are_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(CommandError, match=f"port {port}: Address already in use; give"):
            check_port("127.0.0.1", port)
    check_port("127.0.0.1", port)
    with pytest.raises(CommandError, match=r"192\.0\.2\.1"):
        check_port("192.0.2.1", 0)


def has_ipv6() -> bool:
    try:
        with socket.create_server(("::1", 0), family=socket.AF_INET6):
            return True
    except OSError:
        return False


@pytest.mark.skipif(not has_ipv6(), reason="no IPv6 here")
def test_a_stack_may_listen_on_ipv6() -> None:
    with socket.create_server(("::1", 0), family=socket.AF_INET6) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(CommandError, match=f"port {port}: Address already in use; give"):
            check_port("::1", port)
    check_port("::1", 0)
    check_port("::", 0)


def test_the_command_to_copy_takes_the_key_from_the_environment() -> None:
    assert not up.asks_for_key({"MOONPOOL_API_KEYS": ""})
    assert up.asks_for_key({"MOONPOOL_API_KEYS_FILE": "keys.toml"})
    words = up.example_curl("http://a:1/v1", "tiny", asks_for_key=True)
    assert '-H "Authorization: Bearer $MOONPOOL_API_KEY"' in words
    assert "Authorization" not in up.example_curl("http://a:1/v1", "tiny")
