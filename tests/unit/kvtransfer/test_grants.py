"""The table of grants: what it lets through, and what it must not."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtransfer import Access, BusyError, GrantError, RangeError, Region
from kvtransfer.grants import GrantTable
from kvtransfer.memory import FEW_RANGES

pytestmark = pytest.mark.unit

SIZE = 64
piece = st.integers(0, SIZE).flatmap(lambda at: st.tuples(st.just(at), st.integers(0, SIZE - at)))
pieces = st.one_of(
    st.lists(piece, max_size=6), st.lists(piece, min_size=FEW_RANGES + 1, max_size=2 * FEW_RANGES)
)


def region(number: int = 1) -> Region:
    return Region(number, bytearray(SIZE))


@given(pieces, pieces)
def test_access_is_given_exactly_to_granted_bytes(
    granted: list[tuple[int, int]], wanted: list[tuple[int, int]]
) -> None:
    table = GrantTable(10)
    grant = table.issue(region(), granted, "peer", 1, Access.WRITE)
    held = {place for at, length in granted for place in range(at, at + length)}
    allowed = all(place in held for at, length in wanted for place in range(at, at + length))
    if allowed:
        found, ranges = table.check(grant.token, "peer", Access.WRITE, wanted)
        again, _ = table.check(grant.token, "peer", Access.WRITE, np.array(wanted, np.int64).reshape(-1, 2))
        assert found is again is grant
        assert int(ranges[:, 1].sum()) == sum(length for _, length in wanted)
    else:
        for form in (wanted, np.array(wanted, np.int64)):
            with pytest.raises(GrantError):
                table.check(grant.token, "peer", Access.WRITE, form)


def test_each_field_of_a_grant_is_checked() -> None:
    table = GrantTable(10)
    grant = table.issue(region(), [(0, 10)], "peer", 4, Access.WRITE)
    inside = np.array([(0, 10)])
    table.check(grant.token, "peer", Access.WRITE, inside)
    random_part = grant.token.split(".")[1]
    for token, peer, access in (
        (grant.token, "other", Access.WRITE),
        (grant.token, "peer", Access.READ),
        (f"g1.{random_part}.5", "peer", Access.WRITE),
        (f"g1.{random_part}", "peer", Access.WRITE),
        (f"g2.{random_part}.4", "peer", Access.WRITE),
        (f"g1.{random_part.upper()}x.4", "peer", Access.WRITE),
        ("", "peer", Access.WRITE),
    ):
        with pytest.raises(GrantError):
            table.check(token, peer, access, inside)


def test_a_revoked_grant_is_gone_and_the_others_are_not() -> None:
    table = GrantTable(2)
    first = table.issue(region(), [(0, 10)], "peer", 1, Access.WRITE)
    second = table.issue(region(), [(0, 10)], "peer", 1, Access.WRITE)
    assert first.token != second.token
    with pytest.raises(BusyError, match="grants_max of 2"):
        table.issue(region(), [(0, 10)], "peer", 1, Access.WRITE)
    table.revoke(first)
    table.revoke(first)
    with pytest.raises(GrantError):
        table.check(first.token, "peer", Access.WRITE, [(0, 1)])
    table.check(second.token, "peer", Access.WRITE, [(0, 1)])
    assert table.all() == [second]


def test_grants_of_a_region() -> None:
    table = GrantTable(10)
    mine, other = region(1), region(2)
    grant = table.issue(mine, [(0, 1)], "peer", 1, Access.WRITE)
    table.issue(other, [(0, 1)], "peer", 1, Access.WRITE)
    assert table.of_region(mine) == [grant]


@pytest.mark.parametrize(
    ("ranges", "peer", "generation", "text"),
    [
        ([(0, SIZE + 1)], "peer", 1, "ranges"),
        ([(0, 1)], "", 1, "peer"),
        ([(0, 1)], "p" * 256, 1, "peer"),
        ([(0, 1)], "peer", -1, "generation"),
        ([(0, 1)], "peer", 2**63, "generation"),
    ],
)
def test_malformed_grants_name_the_field(
    ranges: list[tuple[int, int]], peer: str, generation: int, text: str
) -> None:
    with pytest.raises(RangeError, match=text):
        GrantTable(10).issue(region(), ranges, peer, generation, Access.WRITE)
