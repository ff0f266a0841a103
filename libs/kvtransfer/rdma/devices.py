"""The verbs devices that a transport uses: found, checked, opened, best first."""

import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from kvtransfer.errors import TransportUnavailable
from kvtransfer.rdma import ports, verbs
from kvtransfer.rdma.frames import LANES_MAX
from kvtransfer.rdma.ports import PortFacts

_DEVICES_FOLDER = Path("/sys/class/infiniband")
_NODES_FOLDER = Path("/sys/devices/system/node")

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class OpenDevice:
    device: verbs.Device
    facts: PortFacts


def open_devices(wanted: Sequence[str] | None) -> list[OpenDevice]:
    """The devices with an active port, the best first; those of `wanted` only, where given, in its order.

    An entry of `wanted` is a device's name, or NAME:INDEX to choose the entry of its GID table. Raises
    TransportUnavailable, with the reason, if none is left.
    """
    names = verbs.device_names()
    if not names:
        raise TransportUnavailable("this machine has no verbs device")
    gid_indexes = dict(map(ports.parsed_device, wanted)) if wanted is not None else dict.fromkeys(names)
    reasons = [f"{name} is not a device of this machine" for name in gid_indexes if name not in names]
    opened: dict[str, OpenDevice] = {}
    for name in gid_indexes:
        if name not in names:
            continue
        try:
            opened[name] = _opened(name, gid_indexes[name])
        except (OSError, TransportUnavailable) as error:
            reasons.append(f"{name}: {error}")
    order = ports.preferred(
        [one.facts for one in opened.values()],
        _own_node(),
        list(gid_indexes) if wanted is not None else None,
    )
    if not order:
        raise TransportUnavailable(f"no usable verbs device: {'; '.join(reasons)}")
    for reason in reasons:
        _log.warning("rdma device left out: %s", reason)
    for facts in order[LANES_MAX:]:
        opened[facts.device].device.close()
    return [opened[facts.device] for facts in order[:LANES_MAX]]


def _opened(name: str, gid_index: int | None) -> OpenDevice:
    device = verbs.Device(name)
    try:
        state = device.port_state()
        if not state.active:
            raise TransportUnavailable("its port is not active")
        gid = ports.chosen_gid(state.gids, gid_index)
        if gid is None:
            raise TransportUnavailable(
                "its port has no GID" if gid_index is None else f"its port has no GID of index {gid_index}"
            )
    except BaseException:
        device.close()
        raise
    facts = PortFacts(name, _node_of_device(name), gid, state.lid, state.mtu_bytes)
    return OpenDevice(device, facts)


def _node_of_device(name: str) -> int | None:
    try:
        return ports.parsed_node((_DEVICES_FOLDER / name / "device" / "numa_node").read_text())
    except OSError:  # a software device has none
        return None


def _own_node() -> int | None:
    """The NUMA node that this process is bound to, if it is bound to one."""
    lists = {
        int(folder.name.removeprefix("node")): (folder / "cpulist").read_text()
        for folder in _NODES_FOLDER.glob("node[0-9]*")
    }
    return ports.node_of_processors(frozenset(os.sched_getaffinity(0)), lists)
