"""`moonpool up` starts everything, says what is wrong, and leaves nothing behind however it ends."""

import os
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.support.stack import MoonpoolProcess, RunningStack, Status, moonpool, processes_of, running_stack

from moonpool.api import ApiError
from moonpool.commands.up import ONE_WISH_S
from moonpool.errors import CommandError

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]

GONE_S_MAX = 20.0


@pytest.fixture
def own_home(tmp_path: Path) -> Path:
    """A home of one test, so that what it leaves behind can be told from what others run."""
    return tmp_path / "home"


def start(home: Path, *flags: str) -> RunningStack:
    return RunningStack.start(home, "default", "--model", "tiny", *flags)


def test_ready_is_said_with_a_command_that_works(tiny_stack: RunningStack) -> None:
    ready = tiny_stack.up.wait_line("^ready ")
    assert ready == f"ready {tiny_stack.state.url}"
    curl = tiny_stack.up.wait_line("^curl ")
    assert f"{tiny_stack.state.url}/chat/completions" in curl
    assert tiny_stack.state.model in curl


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_stops_all_of_it(own_home: Path, number: signal.Signals) -> None:
    stack = start(own_home)
    assert len(stack.state.processes) == 7
    assert len(processes_of(own_home)) >= 8
    assert stack.up.interrupt_and_wait(number) == 0, stack.up.output
    assert processes_of(own_home) == []
    assert not (stack.folder / "stack.json").exists()
    assert "killed" not in stack.up.output


def test_of_several_gateways_one_may_die(own_home: Path) -> None:
    stack = start(own_home, "--gateways", "2")
    pids = {process.name: process.pid for process in stack.state.processes}
    body = {"model": stack.state.model, "prompt": "hello", "max_tokens": 2}
    for _ in range(4):
        stack.api.post("/completions", body)
    os.kill(pids["gateway-0"], signal.SIGKILL)
    stack.up.wait_line("gateway-0 was killed by SIGKILL; the other gateways go on")
    for _ in range(8):
        assert stack.api.post("/completions", body)["choices"]
    os.kill(pids["gateway-1"], signal.SIGKILL)
    assert stack.up.wait() == 1, stack.up.output
    assert "gateway-1 was killed by SIGKILL" in stack.up.output
    assert processes_of(own_home) == []


def long_answer(stack: RunningStack, tokens: int) -> Iterator[dict[str, Any]]:
    """The events of an answer that has begun."""
    body = {"model": stack.state.model, "prompt": "hello", "max_tokens": tokens, "ignore_eos": True}
    events = stack.api.stream("/completions", {**body, "stream_options": {"include_usage": True}})
    next(events)
    return events


def test_an_open_answer_is_finished_before_it_stops(own_home: Path) -> None:
    stack = start(own_home)
    events = long_answer(stack, 400)
    stack.up.process.send_signal(signal.SIGINT)
    usage = [event["usage"] for event in events if event.get("usage")]
    assert [u["completion_tokens"] for u in usage] == [400]
    assert stack.up.wait() == 0
    assert processes_of(own_home) == []


def test_a_second_signal_does_not_wait_for_open_answers(own_home: Path) -> None:
    stack = start(own_home, "--drain-timeout", "3000")
    events = long_answer(stack, 1900)
    stack.up.process.send_signal(signal.SIGINT)
    stack.up.wait_line("stopping gateway-0")
    # A second wish is one that comes later than the first one's echo.
    time.sleep(2 * ONE_WISH_S)
    assert stack.up.interrupt_and_wait(signal.SIGINT, GONE_S_MAX) == 0
    assert processes_of(own_home) == []
    with pytest.raises(CommandError):
        list(events)


def test_a_signal_while_it_starts_stops_what_has_started(own_home: Path) -> None:
    up = MoonpoolProcess(own_home, "up", "--model", "tiny", "--port", "0")
    up.wait_line("starting gateway-0")
    assert up.interrupt_and_wait(signal.SIGINT) == 0, up.output
    assert "ready http" not in up.output
    assert processes_of(own_home) == []


@pytest.mark.skipif(not Path("/proc").is_dir(), reason="the kernel's parent-death signal is Linux's")
def test_even_a_killed_up_leaves_nothing_behind(own_home: Path) -> None:
    stack = start(own_home)
    watched = [os.pidfd_open(process.pid) for process in stack.state.processes]
    stack.up.kill()
    for descriptor in watched:
        assert has_exited(descriptor), processes_of(own_home)
        os.close(descriptor)
    assert processes_of(own_home) == []
    # What it wrote down does not fool those who look for it.
    assert "no stack named 'default'" in moonpool(own_home, "status").stderr


def answer_of(stack: RunningStack, body: dict[str, object]) -> dict[str, Any]:
    """As a client that does what Retry-After says: right after the start the conductor may not have heard of
    all instances."""
    ends_at_s = time.monotonic() + GONE_S_MAX
    while True:
        try:
            return stack.api.post("/completions", body)
        except ApiError as error:
            if error.status != 503 or time.monotonic() > ends_at_s:
                raise
            time.sleep(0.2)


def test_the_next_run_finds_the_blocks_of_an_ssd_folder(own_home: Path, small_folder: Path) -> None:
    ssd_folder = own_home / "blocks"
    flags = ("--model", str(small_folder), "--pool-bytes", str(16 << 20), "--ssd-bytes", str(32 << 20))
    prompt = list(range(10, 411))

    def ask(name: str) -> tuple[str, int]:
        with running_stack(own_home, name, *flags, "--ssd-folder", str(ssd_folder)) as stack:
            body = {"model": stack.state.model, "prompt": prompt, "max_tokens": 4, "temperature": 0}
            answer = answer_of(stack, body)
            return answer["choices"][0]["text"], answer["usage"]["prompt_tokens_details"]["cached_tokens"]

    text, cached_tokens = ask("first")
    assert cached_tokens == 0
    assert ask("second") == (text, 400)


def has_exited(descriptor: int) -> bool:
    import select

    return bool(select.select([descriptor], [], [], GONE_S_MAX)[0])


def test_a_process_that_ends_ends_the_stack_and_is_named(own_home: Path) -> None:
    stack = start(own_home)
    victim = next(process for process in stack.state.processes if process.name == "decode-0")
    os.kill(victim.pid, signal.SIGKILL)
    assert stack.up.wait() == 1
    assert f"error: decode-0 was killed by SIGKILL; see {victim.log}" in stack.up.output
    assert processes_of(own_home) == []


def test_a_service_that_a_setting_is_wrong_for_says_so_in_the_last_line(
    own_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MOONPOOL_DEVICE_BYTES", "1")
    workers = ("--prefill", "0", "--decode", "0", "--coupled", "1")
    done = moonpool(own_home, "up", "--model", "tiny", "--port", "0", *workers)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "error: coupled-0 ended with status 2: " in done.stderr
    assert "device_bytes" in done.stderr
    assert processes_of(own_home) == []


def test_a_taken_port_is_told_before_anything_starts(own_home: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        done = moonpool(own_home, "up", "--model", "tiny", "--port", str(port))
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1
    assert f"port {port}" in done.stderr
    assert done.stdout == ""
    assert not own_home.exists()


def test_two_stacks_of_one_name_are_refused(tiny_stack: RunningStack, home: Path) -> None:
    done = moonpool(home, "up", "--model", "tiny", "--port", "0", "--name", tiny_stack.name)
    assert done.returncode == 1
    assert "already running" in done.stderr
    assert tiny_stack.status()["totals"]["unreachable"] == 0


def test_a_model_that_is_none_is_named(own_home: Path) -> None:
    done = moonpool(own_home, "up", "--model", "/no/such/folder", "--port", "0")
    assert done.returncode == 1
    assert "/no/such/folder" in done.stderr
    assert processes_of(own_home) == []


def test_status_lists_every_instance(tiny_stack: RunningStack) -> None:
    status = tiny_stack.status()
    roles = sorted(role for instance in status["instances"] for role in instance["roles"])
    assert roles == ["conductor", "decode", "decode", "gateway", "kvmeta", "prefill", "prefill"]
    assert {instance["state"] for instance in status["instances"]} == {"serving"}
    assert status["totals"]["instances"] == 7
    for instance in status["instances"]:
        in_pool = instance["blocks_free"] + instance["blocks_cached"] + instance["blocks_in_use"]
        assert in_pool == instance["blocks"]
        assert (instance["blocks"] > 0) == ({"prefill", "decode"} & set(instance["roles"]) != set())
    table = tiny_stack.command("status", "--name", tiny_stack.name).stdout.splitlines()
    assert table[0].split()[:3] == ["instance", "roles", "state"]
    assert len(table) == 1 + 7 + 1


def test_status_finds_the_cluster_by_its_addresses(tiny_stack: RunningStack, own_home: Path) -> None:
    addresses = ["--nats-url", tiny_stack.state.nats_url, "--etcd-url", tiny_stack.state.etcd_url]
    assert moonpool(own_home, "status", "--json", *addresses).returncode == 0
    nobody = moonpool(own_home, "status", "--nats-url", "nats://127.0.0.1:1", *addresses[2:])
    assert nobody.returncode == 1
    assert "nats://127.0.0.1:1" in nobody.stderr


def test_chat_answers_a_question(tiny_stack: RunningStack) -> None:
    chat = ("chat", "--name", tiny_stack.name, "--max-tokens", "8")
    first = tiny_stack.command(*chat, "Who are you?")
    assert first.returncode == 0, first.stderr
    assert first.stdout.strip()
    assert tiny_stack.command(*chat, "Who are you?").stdout == first.stdout


def test_chat_talks_until_its_input_ends(tiny_stack: RunningStack) -> None:
    chat = ("chat", "--name", tiny_stack.name, "--max-tokens", "8", "--system", "be brief")
    talk = tiny_stack.command(*chat, typed="hello\n\nand again\n")
    assert talk.returncode == 0, talk.stderr
    assert talk.stdout.count("> ") == 4
    assert len(talk.stdout.splitlines()) == 3
    too_long = tiny_stack.command(*chat[:3], "--max-tokens", "100000", "hello")
    assert too_long.returncode == 1
    assert "the gateway answered 400" in too_long.stderr


def test_serve_runs_a_service_that_joins_the_cluster(tiny_stack: RunningStack, own_home: Path) -> None:
    addresses = ("--nats-url", tiny_stack.state.nats_url, "--etcd-url", tiny_stack.state.etcd_url)
    service = MoonpoolProcess(own_home, "serve", "kvmeta", "--instance", "kvmeta-extra", *addresses)
    try:
        tiny_stack.wait_status(lambda status: "kvmeta-extra" in names(status))
        assert service.interrupt_and_wait(signal.SIGTERM) == 0, service.output
    finally:
        service.kill()
    assert "kvmeta-extra" not in names(tiny_stack.status())


def names(status: Status) -> set[str]:
    return {instance["instance"] for instance in status["instances"]}


def test_serve_leaves_usage_to_the_service(own_home: Path) -> None:
    helped = moonpool(own_home, "serve", "decode", "--help")
    assert helped.returncode == 0
    assert "--pool-bytes" in helped.stdout
    wrong = moonpool(own_home, "serve", "decode", "--pool-bits", "1")
    assert wrong.returncode == 2
    assert "--pool-bits" in wrong.stderr
