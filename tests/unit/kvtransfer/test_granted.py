"""What owners ask of a request beyond its grant: tags, and what landed before."""

from typing import Any

import numpy as np
import pytest

from kvtransfer import Access, FrameError, GrantError, Region
from kvtransfer.grants import GrantTable
from kvtransfer.stream.frames import DIGEST_BYTES, TransferRequest
from kvtransfer.stream.granted import check_request

pytestmark = pytest.mark.unit

RANGES = np.array([(0, 10)], np.int64)


def check(access: Access, *, takes_tags: bool = False, landed_bytes: int = 0, **wanted: Any) -> None:
    table = GrantTable(1)
    on_arrival = (lambda arrival: None) if takes_tags else None
    grant = table.issue(Region(1, bytearray(100)), [(0, 50)], "peer", 1, access, on_arrival)
    grant.landed_bytes = landed_bytes
    found, ranges = check_request(table, "peer", access, TransferRequest(grant.token, RANGES, 10, **wanted))
    assert found is grant
    assert ranges.tolist() == RANGES.tolist()


@pytest.mark.parametrize("access", Access)
def test_bytes_under_a_grant(access: Access) -> None:
    check(access)


def test_a_tag_for_whoever_takes_tags() -> None:
    check(Access.WRITE, takes_tags=True, tag=b"layer 0")
    check(Access.WRITE, takes_tags=True, tag_follows=True)
    check(Access.WRITE, takes_tags=True, tag=b"all", earlier_bytes=7, landed_bytes=7)


@pytest.mark.parametrize("wanted", [{"tag": b"x"}, {"tag_follows": True}])
def test_a_grant_without_tags(wanted: dict[str, Any]) -> None:
    with pytest.raises(GrantError, match="takes no tags"):
        check(Access.WRITE, **wanted)


def test_earlier_bytes_that_did_not_land() -> None:
    with pytest.raises(GrantError, match="did not land"):
        check(Access.WRITE, takes_tags=True, tag=b"all", earlier_bytes=8, landed_bytes=7)


@pytest.mark.parametrize("wanted", [{"tag": b"x"}, {"tag_follows": True}, {"digest": bytes(DIGEST_BYTES)}])
def test_a_read_with_what_belongs_to_a_write(wanted: dict[str, Any]) -> None:
    with pytest.raises(FrameError):
        check(Access.READ, takes_tags=True, **wanted)


@pytest.mark.parametrize("access", Access)
def test_earlier_bytes_without_a_tag(access: Access) -> None:
    with pytest.raises(FrameError):
        check(access, earlier_bytes=1, landed_bytes=1)
