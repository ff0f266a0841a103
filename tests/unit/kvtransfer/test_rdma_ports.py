"""Choices of the rdma transport that need no device: GID, MTU, which devices, which pairs."""

import ipaddress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtransfer.rdma import ports
from kvtransfer.rdma.ports import Gid, GidKind, PortFacts

pytestmark = pytest.mark.unit


def gid(index: int, address: str, kind: GidKind = GidKind.ROCE_V2) -> Gid:
    return Gid(index, ipaddress.IPv6Address(address).exploded, kind)


IPV4 = gid(5, "::ffff:10.0.0.7")
ROUTABLE = gid(3, "2001:db8::7")
LINK_LOCAL = gid(1, "fe80::7")
INFINIBAND = gid(0, "fe80::8", GidKind.INFINIBAND)
OLD = gid(4, "::ffff:10.0.0.7", GidKind.ROCE_V1)


@pytest.mark.parametrize(
    ("table", "expected"),
    [
        ([OLD, INFINIBAND, LINK_LOCAL, ROUTABLE, IPV4], IPV4),
        ([OLD, INFINIBAND, LINK_LOCAL, ROUTABLE], ROUTABLE),
        ([OLD, INFINIBAND, LINK_LOCAL], LINK_LOCAL),
        ([OLD, INFINIBAND], INFINIBAND),
        ([OLD], OLD),
        ([], None),
        ([gid(9, "::ffff:10.0.0.9"), gid(2, "::ffff:10.0.0.2")], gid(2, "::ffff:10.0.0.2")),
    ],
)
def test_which_gid(table: list[Gid], expected: Gid | None) -> None:
    assert ports.chosen_gid(table) == expected


def test_a_wanted_gid_is_taken_or_none() -> None:
    table = [IPV4, LINK_LOCAL]
    assert ports.chosen_gid(table, LINK_LOCAL.index) == LINK_LOCAL
    assert ports.chosen_gid(table, 77) is None


@pytest.mark.parametrize(
    ("text", "expected"), [("mlx5_0", ("mlx5_0", None)), ("mlx5_0:3", ("mlx5_0", 3)), ("a:0", ("a", 0))]
)
def test_names_of_devices(text: str, expected: tuple[str, int | None]) -> None:
    assert ports.parsed_device(text) == expected


@pytest.mark.parametrize("text", ["", ":3", "mlx5_0:", "mlx5_0:x", "mlx5_0:-1"])
def test_names_of_devices_that_are_none(text: str) -> None:
    with pytest.raises(ValueError, match="rdma_devices"):
        ports.parsed_device(text)


def port(device: str, node: int | None) -> PortFacts:
    return PortFacts(device, node, IPV4, 0, 4096)


def names(found: list[PortFacts]) -> list[str]:
    return [facts.device for facts in found]


def test_near_devices_come_first() -> None:
    known = [port("d", 1), port("c", None), port("b", 0), port("a", 1)]
    assert names(ports.preferred(known, 1, None)) == ["a", "d", "c", "b"]
    assert names(ports.preferred(known, 0, None)) == ["b", "c", "a", "d"]
    assert names(ports.preferred(known, None, None)) == ["a", "b", "c", "d"]
    assert names(ports.preferred(known, 1, ["b", "gone", "a"])) == ["b", "a"]


def test_devices_of_one_rail_meet() -> None:
    ours = [gid(0, "::ffff:10.1.0.1"), gid(0, "::ffff:10.2.0.1"), gid(0, "::ffff:10.3.0.1")]
    theirs = ["::ffff:10.3.0.9", "::ffff:10.1.0.9", "::ffff:10.2.0.9"]
    assert ports.paired(ours, theirs, 16) == [(0, 1), (1, 2), (2, 0)]
    assert ports.paired(ours, theirs, 2) == [(0, 1), (1, 2)]
    assert ports.paired(ours, theirs[:1], 16) == [(2, 0)]
    assert ports.paired(ours[1:2], theirs, 16) == [(0, 2)]


ADDRESSES = st.integers(0, 2**128 - 1).map(lambda number: ipaddress.IPv6Address(number).exploded)


@given(st.lists(ADDRESSES, max_size=6), st.lists(ADDRESSES, max_size=6), st.integers(1, 8))
def test_each_device_is_in_one_pair_at_most(ours: list[str], theirs: list[str], lanes_max: int) -> None:
    found = ports.paired([gid(0, text) for text in ours], theirs, lanes_max)
    assert len(found) == min(len(ours), len(theirs), lanes_max)
    assert len({pair[0] for pair in found}) == len({pair[1] for pair in found}) == len(found)
    assert found == sorted(found)


def test_nodes_of_sysfs() -> None:
    assert [ports.parsed_node(text) for text in ("1\n", "0\n", "-1\n", "")] == [1, 0, None, None]
    lists = {0: "0-3,8-11\n", 1: "4-7,12-15\n", 2: "\n"}
    assert ports.node_of_processors(frozenset({9, 2}), lists) == 0
    assert ports.node_of_processors(frozenset({12}), lists) == 1
    assert ports.node_of_processors(frozenset({3, 4}), lists) is None


def test_what_is_a_gid() -> None:
    assert ports.is_gid("0000:0000:0000:0000:0000:ffff:c0a8:b101")
    assert not ports.is_gid("192.168.177.1")
    assert not ports.is_gid("")
