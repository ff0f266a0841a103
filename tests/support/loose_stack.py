"""Services as processes of their own, each started, stopped, frozen and killed by itself, on real servers.

`moonpool up` ends when one of its processes does; here a test may end any of them and see what the others
make of it.
"""

import json
import os
import secrets
import signal
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from urllib.error import URLError
from urllib.request import urlopen

from kvindex.core import InstanceId
from moonpool import child
from moonpool.cluster_client import ClusterAddresses
from moonpool.roles import SERVICE_OF_ROLE, ServiceSettings, service_arguments
from moonpool.servers import etcd_server, nats_server
from moonpool.stack_plan import SECRET_VARIABLE

READY_S_MAX = 90.0
STOP_S_MAX = 30.0
POLL_S = 0.1
LOG_TAIL_LINES = 40
ROOT = Path(__file__).parents[2]
ANY_CERTIFICATE = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
ANY_CERTIFICATE.check_hostname = False
ANY_CERTIFICATE.verify_mode = ssl.CERT_NONE


class LooseStack:
    """`loose_stack` makes one, and ends what still runs."""

    def __init__(
        self,
        folder: Path,
        model_folder: Path,
        addresses: ClusterAddresses,
        lease_ttl_s: float,
        services: Mapping[str, tuple[str, ...]],
    ) -> None:
        self.folder = folder
        self.addresses = addresses
        self._settings = ServiceSettings(
            nats_url=addresses.nats_url,
            etcd_url=addresses.etcd_url,
            model_folder=model_folder,
            gateway_bind="127.0.0.1",
            gateway_port=0,
            threads=1,
            pool_bytes=None,
            ssd_bytes=0,
            ssd_folder=folder / "ssd",
            drain_s_max=10.0,
        )
        self._lease_ttl_s = lease_ttl_s
        self._services = services
        self._secret = secrets.token_hex(32)
        self._processes: dict[str, subprocess.Popen[bytes]] = {}

    @property
    def ssd_folder(self) -> Path:
        """Of all workers; each has its own below."""
        return self._settings.ssd_folder

    def launch(self, name: str, *flags: str) -> None:
        """Start `name`, such as prefill-0, with these flags beside the usual ones."""
        role = name.rpartition("-")[0]
        program = [
            *(sys.executable, "-I", "-S", child.__file__, str(os.getpid())),
            *(sys.executable, *service_arguments(role, InstanceId(name), self._settings, self._services)),
            *("--lease-ttl-s", str(self._lease_ttl_s), *flags),
        ]
        with self._log_path(name).open("ab") as log:
            self._processes[name] = subprocess.Popen(
                program,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=self._environment(),
                start_new_session=True,
            )

    def start(self, *names: str, flags: tuple[str, ...] = ()) -> None:
        """Return when all of them are ready."""
        for name in names:
            self.launch(name, *flags)
        for name in names:
            self.wait_ready(name)

    def wait_ready(self, name: str) -> None:
        pause, ends_at_s = threading.Event(), time.monotonic() + READY_S_MAX
        while not self._is_ready(name):
            status = self._processes[name].poll()
            assert status is None, f"{name} ended with status {status}:\n{self.log_tail(name)}"
            assert time.monotonic() < ends_at_s, f"{name} is not ready:\n{self.log_tail(name)}"
            pause.wait(POLL_S)

    def pid(self, name: str) -> int:
        return self._processes[name].pid

    def url(self, name: str) -> str:
        """Of the HTTP of its last start."""
        urls = [line["http_url"] for line in self.log_lines(name) if line.get("message") == "starting"]
        return str(urls[-1])

    def kill(self, name: str) -> None:
        self._processes[name].kill()
        self._processes[name].wait()

    def stop(self, name: str) -> int:
        """The gentle way; the exit status."""
        self._processes[name].terminate()
        return self._processes[name].wait(STOP_S_MAX)

    def wait_end(self, name: str) -> int:
        """Of one that ends by itself; the exit status."""
        return self._processes[name].wait(READY_S_MAX)

    def signal(self, name: str, number: signal.Signals) -> None:
        self._processes[name].send_signal(number)

    def pause(self, name: str) -> None:
        self.signal(name, signal.SIGSTOP)

    def log_lines(self, name: str) -> list[dict[str, object]]:
        """All that is JSON in its log, of all its starts."""
        found = []
        for line in self._log_path(name).read_text(errors="replace").splitlines():
            if line.startswith("{") and line.endswith("}"):
                found.append(json.loads(line))
        return found

    def log_tail(self, name: str) -> str:
        return "\n".join(self._log_path(name).read_text(errors="replace").splitlines()[-LOG_TAIL_LINES:])

    def logs(self) -> str:
        return "\n".join(f"--- {name} ---\n{self.log_tail(name)}" for name in self._processes)

    def end_all(self) -> None:
        for process in self._processes.values():
            process.kill()
        for process in self._processes.values():
            process.wait()

    def _environment(self) -> dict[str, str]:
        """Some services are modules of the tests."""
        path = os.pathsep.join((str(ROOT), *filter(None, (os.environ.get("PYTHONPATH"),))))
        ours = {"OMP_NUM_THREADS": "1", "PYTHONPATH": path, SECRET_VARIABLE: self._secret}
        return {**os.environ, **ours}

    def _is_ready(self, name: str) -> bool:
        try:
            with urlopen(f"{self.url(name)}/ready", timeout=POLL_S * 10, context=ANY_CERTIFICATE) as answer:
                return bool(answer.status == 200)
        except (URLError, OSError, IndexError):
            return False

    def _log_path(self, name: str) -> Path:
        return self.folder / f"{name}.log"


@contextmanager
def loose_stack(
    folder: Path,
    model_folder: Path,
    *,
    lease_ttl_s: float = 2.0,
    services: Mapping[str, tuple[str, ...]] = SERVICE_OF_ROLE,
) -> Iterator[LooseStack]:
    """Servers, and nothing else yet. What runs at the end is killed. `services`: the modules by role."""
    with ExitStack() as opened:
        nats = opened.enter_context(nats_server(folder))
        etcd = opened.enter_context(etcd_server(folder))
        addresses = ClusterAddresses(nats.url, etcd.url)
        stack = LooseStack(folder, model_folder, addresses, lease_ttl_s, services)
        opened.callback(stack.end_all)
        yield stack
