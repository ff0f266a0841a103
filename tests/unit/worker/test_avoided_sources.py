"""A block that could not be read from a source is not asked of it again for a while, and not for longer."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvhash import BlockHash
from kvindex.core import InstanceId
from worker import avoided_sources
from worker.avoided_sources import (
    AVOIDED_MAX,
    SILENT_SOURCE_AVOIDED_S,
    SOURCE_AVOIDED_S,
    AvoidedSources,
)

pytestmark = pytest.mark.unit

A, B = InstanceId("a"), InstanceId("b")
CHAIN = [BlockHash(bytes([number]) * 16) for number in range(8)]


def test_a_source_is_avoided_for_the_block_and_what_lies_behind_it() -> None:
    avoided = AvoidedSources()
    avoided.avoid(A, CHAIN[3], 10.0)
    assert avoided.askable_blocks(A, CHAIN, 0, 10.0) == 3
    assert avoided.askable_blocks(A, CHAIN, 3, 10.0) == 3
    assert avoided.askable_blocks(A, CHAIN[:3], 0, 10.0) == 3
    assert avoided.askable_blocks(B, CHAIN, 0, 10.0) == len(CHAIN)


def test_blocks_that_are_held_are_not_looked_at() -> None:
    """What was avoided came from elsewhere meanwhile, or was computed."""
    avoided = AvoidedSources()
    avoided.avoid(A, CHAIN[3], 10.0)
    assert avoided.askable_blocks(A, CHAIN, 4, 10.0) == len(CHAIN)


def test_it_ends_by_itself_and_begins_anew_with_each_failure() -> None:
    avoided = AvoidedSources()
    avoided.avoid(A, CHAIN[3], 0.0)
    avoided.avoid(A, CHAIN[3], 1.0)
    assert avoided.askable_blocks(A, CHAIN, 0, SOURCE_AVOIDED_S) == 3
    assert avoided.askable_blocks(A, CHAIN, 0, SOURCE_AVOIDED_S + 1.0) == len(CHAIN)
    assert len(avoided) == 0


def test_a_silent_source_is_avoided_for_every_block() -> None:
    avoided = AvoidedSources()
    avoided.avoid_all(A, 10.0)
    assert avoided.askable_blocks(A, CHAIN, 0, 10.0) == 0
    assert avoided.askable_blocks(A, CHAIN, 5, 10.0) == 5
    assert avoided.askable_blocks(B, CHAIN, 0, 10.0) == len(CHAIN)
    avoided.avoid_all(B, 12.0)
    assert avoided.askable_blocks(A, CHAIN, 0, 10.0 + SILENT_SOURCE_AVOIDED_S) == len(CHAIN)
    assert avoided.askable_blocks(B, CHAIN, 0, 10.0 + SILENT_SOURCE_AVOIDED_S) == 0


def test_the_table_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(avoided_sources, "AVOIDED_MAX", 4)
    assert AVOIDED_MAX > 4
    avoided = AvoidedSources()
    for block_hash in CHAIN:
        avoided.avoid(A, block_hash, 0.0)
    assert len(avoided) == 4
    assert avoided.askable_blocks(A, CHAIN, 0, 0.0) == 4


@settings(max_examples=200)
@given(
    st.lists(
        st.tuples(st.sampled_from([A, B]), st.integers(0, 7), st.floats(0.0, SOURCE_AVOIDED_S / 2)),
        max_size=30,
    )
)
def test_it_is_as_a_plain_table_would_be(failures: list[tuple[InstanceId, int, float]]) -> None:
    avoided, failed_at_s, now_s = AvoidedSources(), {}, 0.0
    for source, block, wait_s in failures:
        now_s += wait_s
        avoided.avoid(source, CHAIN[block], now_s)
        failed_at_s[source, block] = now_s
        for asked in (A, B):
            blocks = [
                block
                for (other, block), at_s in failed_at_s.items()
                if other == asked and at_s + SOURCE_AVOIDED_S > now_s
            ]
            assert avoided.askable_blocks(asked, CHAIN, 0, now_s) == min(blocks, default=len(CHAIN))
