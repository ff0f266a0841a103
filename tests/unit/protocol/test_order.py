"""A client's tokens, whatever the network does with the entries that carry them."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.order import Fresh, Gap, Repeat, arrange

pytestmark = pytest.mark.unit


def packed(*token_ids: int) -> bytes:
    return np.asarray(token_ids, "<i4").tobytes()


def test_next_token_is_fresh() -> None:
    assert arrange(3, 3, packed(7)) == Fresh(packed(7), 3, 4)


def test_overlap_is_cut() -> None:
    assert arrange(3, 1, packed(5, 6, 7, 8)) == Fresh(packed(7, 8), 3, 5)


def test_old_and_empty_entries_are_repeats() -> None:
    assert arrange(3, 0, packed(1, 2, 3)) == Repeat()
    assert arrange(3, 3, b"") == Repeat()


def test_later_entry_shows_a_gap() -> None:
    assert arrange(3, 5, packed(9)) == Gap(3)


@given(st.lists(st.integers(0, 2**31 - 1), max_size=30), st.data())
def test_any_pieces_in_any_order_give_the_answer_once(answer: list[int], data: st.DataObject) -> None:
    """Pieces are repeated, shuffled and cut anywhere; a gap is answered by everything from there on."""
    taken: list[int] = []
    for _ in range(data.draw(st.integers(0, 20))):
        start = data.draw(st.integers(0, len(answer)))
        end = data.draw(st.integers(start, len(answer)))
        arranged = arrange(len(taken), start, packed(*answer[start:end]))
        if isinstance(arranged, Gap):
            arranged = arrange(len(taken), arranged.from_index, packed(*answer[arranged.from_index :]))
        if isinstance(arranged, Fresh):
            taken += np.frombuffer(arranged.token_ids, "<i4").tolist()
            assert arranged.next_index == len(taken)
        assert taken == answer[: len(taken)]
