"""Which device, which GID, which MTU, which pairs of devices: decisions over facts of ports. Pure.

A GID is what a RoCE or InfiniBand port is addressed by; it is written as `verbs` and the kernel write it:
eight groups of four hexadecimal digits, lower case.
"""

import ipaddress
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

MTU_BYTES = (256, 512, 1024, 2048, 4096)
"""What a path MTU may be; as libibverbs numbers them: 1 is the first."""


class GidKind(IntEnum):
    """As libibverbs numbers them."""

    INFINIBAND = 0
    ROCE_V1 = 1
    ROCE_V2 = 2


@dataclass(frozen=True, slots=True)
class Gid:
    """An entry of a port's GID table."""

    index: int
    text: str
    kind: GidKind

    @property
    def address(self) -> ipaddress.IPv6Address:
        return ipaddress.IPv6Address(self.text)


@dataclass(frozen=True, slots=True)
class PortFacts:
    """What is known of one active port. `numa_node` is None where the kernel does not say."""

    device: str
    numa_node: int | None
    gid: Gid
    lid: int
    mtu_bytes: int


def chosen_gid(gids: Sequence[Gid], wanted_index: int | None = None) -> Gid | None:
    """The GID to use, None if there is none: RoCE v2 with an IPv4 address first, then RoCE v2 with a routable
    IPv6 address, then any RoCE v2, then InfiniBand, RoCE v1 last; among equals the lowest index.

    A `wanted_index` is taken or nothing is.
    """
    if wanted_index is not None:
        return next((gid for gid in gids if gid.index == wanted_index), None)
    return min(gids, key=lambda gid: (_gid_rank(gid), gid.index), default=None)


def _gid_rank(gid: Gid) -> int:
    address = gid.address
    match gid.kind:
        case GidKind.ROCE_V2 if address.ipv4_mapped is not None:
            return 0
        case GidKind.ROCE_V2 if not address.is_link_local:
            return 1
        case GidKind.ROCE_V2:
            return 2
        case GidKind.INFINIBAND:
            return 3
        case _:
            return 4


def preferred(
    ports: Sequence[PortFacts], numa_node: int | None, wanted: Sequence[str] | None
) -> list[PortFacts]:
    """The ports to use, best first.

    `wanted` names devices, in its order, and leaves out all others; without it devices on `numa_node` come
    first, then those whose node is not known, then the far ones, each by name.
    """
    if wanted is not None:
        by_device = {port.device: port for port in ports}
        return [by_device[device] for device in wanted if device in by_device]

    def distance(port: PortFacts) -> int:
        if port.numa_node is None or numa_node is None:
            return 1
        return 0 if port.numa_node == numa_node else 2

    return sorted(ports, key=lambda port: (distance(port), port.device))


def paired(ours: Sequence[Gid], theirs: Sequence[str], lanes_max: int) -> list[tuple[int, int]]:
    """Which of our devices talks to which of theirs: (our index, their index), at most `lanes_max`.

    Every device of the side with fewer is used once. Devices whose addresses share the longest prefix go
    together (the rails of a cluster are subnets); among equals both sides' preference counts. In the order
    of our preference.
    """
    found = [int(ipaddress.IPv6Address(text)) for text in theirs]
    scored = sorted(
        (-_common_prefix_bits(int(gid.address), address), our_index, their_index)
        for our_index, gid in enumerate(ours)
        for their_index, address in enumerate(found)
    )
    pairs: dict[int, int] = {}
    for _, our_index, their_index in scored:
        if our_index not in pairs and their_index not in pairs.values():
            pairs[our_index] = their_index
    return sorted(pairs.items())[:lanes_max]


def _common_prefix_bits(one: int, other: int) -> int:
    return 128 - (one ^ other).bit_length()


def parsed_node(text: str) -> int | None:
    """A `numa_node` file of sysfs; -1 stands for unknown."""
    try:
        node = int(text)
    except ValueError:
        return None
    return node if node >= 0 else None


def node_of_processors(processors: frozenset[int], lists_by_node: dict[int, str]) -> int | None:
    """The node that holds all of `processors`, None if they span several; from sysfs' `cpulist` files."""
    nodes = [node for node, text in lists_by_node.items() if processors & _parsed_list(text)]
    return nodes[0] if len(nodes) == 1 else None


def _parsed_list(text: str) -> frozenset[int]:
    """'0-3,8' as a set."""
    found: set[int] = set()
    for item in text.strip().split(","):
        if item:
            first, _, last = item.partition("-")
            found.update(range(int(first), int(last or first) + 1))
    return frozenset(found)


def parsed_device(text: str) -> tuple[str, int | None]:
    """'NAME' or 'NAME:INDEX' as name and index in the GID table. Raises ValueError."""
    name, colon, index = text.partition(":")
    if not name or (colon and not index.isdecimal()):
        raise ValueError(f"rdma_devices: an entry is NAME or NAME:GID_INDEX, not {text!r}")
    return name, int(index) if colon else None


def is_gid(text: str) -> bool:
    try:
        ipaddress.IPv6Address(text)
    except ValueError:
        return False
    return True
