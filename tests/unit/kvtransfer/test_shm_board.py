"""Permissions on a board, and what a peer sees of them."""

import pytest

from kvtransfer.errors import BusyError, FrameError
from kvtransfer.shm.board import Board, BoardView, Permission
from kvtransfer.shm.system import Mapping

pytestmark = pytest.mark.unit


@pytest.fixture
def board():
    made = Board(4)
    yield made
    made.close()


@pytest.fixture
def seen(board: Board) -> BoardView:
    """Through a mapping of its own, as a peer has it."""
    return BoardView(Mapping(board.memory.fileno()))


def seen_of(view: BoardView, slot) -> Permission:
    return view.permission(slot.index, slot.epoch)


def test_a_permission_stands_until_it_is_shut(board, seen):
    slot = board.open()
    permission = seen_of(seen, slot)
    assert permission.stands()
    board.shut(slot)
    assert not permission.stands()


def test_a_slot_used_again_does_not_revive_the_old_permission(board, seen):
    old = board.open()
    board.shut(old)
    new = board.open()
    assert new.index == old.index
    assert not seen_of(seen, old).stands()
    assert seen_of(seen, new).stands()


def test_shutting_again_does_not_touch_who_has_the_slot_now(board, seen):
    old = board.open()
    board.shut(old)
    new = board.open()
    board.shut(old)
    assert seen_of(seen, new).stands()


def test_slots_are_bounded_and_come_back(board):
    slots = [board.open() for _ in range(4)]
    with pytest.raises(BusyError, match="all 4 slots"):
        board.open()
    board.shut(slots[2])
    assert board.open().index == slots[2].index


def test_closing_takes_all_back_for_who_still_looks(seen, board):
    permission = seen_of(seen, board.open())
    board.close()
    assert not permission.stands()


@pytest.mark.parametrize(("index", "epoch"), [(4, 1), (-1, 1), (2**32 - 1, 1), (0, 0)])
def test_a_permission_that_the_board_cannot_have_is_refused(seen, index, epoch):
    with pytest.raises(FrameError, match=f"slot {index} with epoch {epoch}"):
        seen.permission(index, epoch)
