"""Two hosts on one machine: two network namespaces joined by a veth pair, whose link can be cut.

Everything is made inside the two namespaces, so the machine's own network is not touched and the same
addresses serve any number of pairs at once. Needs root and iproute2.
"""

import os
import secrets
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import NoReturn

import pytest

PREFIX = "moonpool-test-"
STALE_S = 900
"""A namespace of ours older than this was left by a run that crashed: no test module takes that long."""
COMMAND_S_MAX = 10.0
"""Time for one `ip` or `tc`."""
BURST_BYTES = 128 << 10
"""What a shaped link may send at once: more than one segment that the kernel hands over (64 KiB)."""
QUEUE_MS = 50

_NAMED = Path("/run/netns")
_REQUIRED = "MOONPOOL_NETNS_REQUIRED"
_CAPABILITIES = {"CAP_NET_ADMIN": 12, "CAP_SYS_ADMIN": 21}
_NOBODY = "02:6d:70:00:00:ff"
"""A hardware address that neither host has: frames to it arrive and are dropped without a word."""


class NamespaceError(Exception):
    """A command failed; its text says which and why."""


class Cut(StrEnum):
    """How a link fails.

    DOWN: the near host's interface is taken down: its routes go, both hosts lose the carrier.
    SILENT: every frame is lost in both directions, and no host notices but by time.
    """

    DOWN = "down"
    SILENT = "silent"


@dataclass(frozen=True, slots=True)
class Host:
    """One end of the pair."""

    namespace: str
    address: str
    hardware_address: str
    interface: str = "link0"

    @property
    def launcher(self) -> tuple[str, ...]:
        """A command in front of another one that runs it on this host; the process keeps its pid."""
        return ("ip", "netns", "exec", self.namespace)


@dataclass(frozen=True, slots=True)
class HostPair:
    """Two hosts and the link between them."""

    near: Host
    far: Host

    def shape(self, megabits_per_s: int) -> None:
        """Limit both directions, so that a transfer takes long enough to be cut."""
        limit = ("rate", f"{megabits_per_s}mbit", "burst", str(BURST_BYTES), "latency", f"{QUEUE_MS}ms")
        for host in (self.near, self.far):
            device = ("dev", host.interface, "root")
            _command("tc", "-n", host.namespace, "qdisc", "replace", *device, "tbf", *limit)

    def unshape(self) -> None:
        """The end of `shape`; what waits in its queues is lost, as on any link."""
        for host in (self.near, self.far):
            _command("tc", "-n", host.namespace, "qdisc", "del", "dev", host.interface, "root")

    def cut(self, kind: Cut) -> None:
        """From now on nothing gets through."""
        match kind:
            case Cut.DOWN:
                _ip("-n", self.near.namespace, "link", "set", self.near.interface, "down")
            case Cut.SILENT:
                _send_to(self.near, self.far.address, _NOBODY)
                _send_to(self.far, self.near.address, _NOBODY)

    def restore(self, kind: Cut) -> None:
        """The end of a `cut` of this kind."""
        match kind:
            case Cut.DOWN:
                _ip("-n", self.near.namespace, "link", "set", self.near.interface, "up")
            case Cut.SILENT:
                _send_to(self.near, self.far.address, self.far.hardware_address)
                _send_to(self.far, self.near.address, self.near.hardware_address)

    def unplug(self) -> None:
        """Both interfaces are gone for good, as the far host is for the near one."""
        _ip("-n", self.far.namespace, "link", "del", self.far.interface)


@contextmanager
def host_pair() -> Iterator[HostPair]:
    """A new pair, removed at the end; what crashed runs left is removed first.

    Skips the test where this machine cannot have one, and fails it where MOONPOOL_NETNS_REQUIRED is set.
    """
    reason = _lacking()
    if reason is not None:
        _unavailable(reason)
    for name in stale(_names(), time.time()):
        _remove(name)
    stem = f"{PREFIX}{int(time.time())}-{secrets.token_hex(3)}"
    pair = HostPair(
        Host(f"{stem}-near", "10.213.77.1", "02:6d:70:00:00:01"),
        Host(f"{stem}-far", "10.213.77.2", "02:6d:70:00:00:02"),
    )
    try:
        try:
            _make(pair)
        except NamespaceError as error:
            _unavailable(str(error))
        yield pair
    finally:
        for name in {pair.near.namespace, pair.far.namespace} & set(_names()):
            _remove(name)


def stale(names: list[str], now_s: float) -> list[str]:
    """Those that a run of ours made over STALE_S ago, by the time in their name."""
    found = []
    for name in names:
        made_s = name.removeprefix(PREFIX).split("-")[0]
        if name.startswith(PREFIX) and made_s.isdecimal() and now_s - int(made_s) > STALE_S:
            found.append(name)
    return found


def tcp_counter(pid: int, name: str) -> int:
    """What the kernel counted on the host of a process since the host was made: PassiveOpens, TCPTimeouts."""
    for table in ("snmp", "netstat"):
        lines = Path(f"/proc/{pid}/net/{table}").read_text().splitlines()
        for names, values in zip(lines[::2], lines[1::2], strict=True):
            counters = dict(zip(names.split(), values.split(), strict=True))
            if name in counters:
                return int(counters[name])
    raise NamespaceError(f"the kernel has no counter {name}")


def _unavailable(reason: str) -> NoReturn:
    if os.environ.get(_REQUIRED):
        pytest.fail(f"{_REQUIRED} is set, but there are no network namespaces: {reason}")
    pytest.skip(f"no network namespaces: {reason}")


def _make(pair: HostPair) -> None:
    near, far = pair.near, pair.far
    for host in (near, far):
        _ip("netns", "add", host.namespace)
    near_end = ("name", near.interface, "address", near.hardware_address, "netns", near.namespace)
    far_end = ("name", far.interface, "address", far.hardware_address, "netns", far.namespace)
    _ip("link", "add", *near_end, "type", "veth", "peer", *far_end)
    for host in (near, far):
        inside = ("-n", host.namespace)
        _ip(*inside, "address", "add", f"{host.address}/30", "dev", host.interface)
        _ip(*inside, "link", "set", "lo", "up")
        _ip(*inside, "link", "set", host.interface, "up")


def _remove(name: str) -> None:
    """Its interfaces go with it, and the other end of the link with them."""
    try:
        _ip("netns", "del", name)
    except NamespaceError:
        if name in _names():  # otherwise another run was faster
            raise


def _lacking() -> str | None:
    """Why there can be no namespaces here, or None."""
    for program in ("ip", "tc"):
        if shutil.which(program) is None:
            return f"iproute2's {program!r} is not installed"
    if os.geteuid() != 0:
        return "not root"
    status = Path("/proc/self/status").read_text()
    effective = int(status.split("CapEff:")[1].split()[0], 16)
    missing = [name for name, bit in _CAPABILITIES.items() if not effective >> bit & 1]
    return f"root without {' and '.join(missing)}" if missing else None


def _names() -> list[str]:
    return os.listdir(_NAMED) if _NAMED.is_dir() else []


def _send_to(host: Host, address: str, hardware_address: str) -> None:
    """The frames of `host` for `address` go to this hardware address, whoever else claims it."""
    entry = (address, "lladdr", hardware_address, "dev", host.interface, "nud", "permanent")
    _ip("-n", host.namespace, "neighbour", "replace", *entry)


def _ip(*arguments: str) -> None:
    _command("ip", *arguments)


def _command(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=COMMAND_S_MAX, check=False)
    if done.returncode != 0:
        raise NamespaceError(f"{' '.join(command)}: {done.stderr.strip()}")
