"""Inventory: prefix-closed whatever is asked of it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvhash import BlockHash
from kvindex.core import Tier
from kvindex.inventory import Inventory, InventoryError

pytestmark = pytest.mark.unit

A, B, C, D = (BlockHash(bytes([letter]) * 16) for letter in b"abcd")


def build() -> Inventory:
    """A with the children B and C, D under C."""
    return Inventory([(A, None, Tier.DRAM), (B, A, Tier.DRAM), (C, A, Tier.DRAM), (D, C, Tier.SSD)])


def test_it_knows_blocks_and_tiers():
    inventory = build()
    assert len(inventory) == 4
    assert A in inventory
    assert BlockHash(b"x" * 16) not in inventory
    assert (inventory.tier(A), inventory.tier(D)) == (Tier.DRAM, Tier.SSD)
    assert (inventory.blocks_in(Tier.DRAM), inventory.blocks_in(Tier.SSD)) == (3, 1)
    assert inventory.blocks_in(Tier.DEVICE) == 0


def test_a_block_may_go_once_its_children_have_gone():
    inventory = build()
    for block_hash in (D, B, C, A):
        inventory.remove(block_hash)
    assert list(inventory) == []
    assert inventory.blocks_in(Tier.DRAM) == inventory.blocks_in(Tier.SSD) == 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda inventory: inventory.add(B, A, Tier.DRAM), "is held already"),
        (
            lambda inventory: inventory.add(BlockHash(b"x" * 16), BlockHash(b"y" * 16), Tier.DRAM),
            "parent 7979",
        ),
        (lambda inventory: inventory.remove(A), "has 2 held children"),
        (lambda inventory: inventory.remove(BlockHash(b"x" * 16)), "block 7878.* is not held"),
        (lambda inventory: inventory.move(BlockHash(b"x" * 16), Tier.SSD), "is not held"),
    ],
)
def test_a_change_that_leaves_a_hole_is_refused_and_changes_nothing(change, message):
    inventory = build()
    with pytest.raises(InventoryError, match=message):
        change(inventory)
    assert inventory.blocks() == build().blocks()
    inventory.remove(B)
    inventory.remove(D)


def test_blocks_that_do_not_come_parents_first_make_no_inventory():
    with pytest.raises(InventoryError, match="parent"):
        Inventory([(B, A, Tier.DRAM), (A, None, Tier.DRAM)])


def test_moving_keeps_the_order():
    inventory = build()
    inventory.move(D, Tier.DRAM)
    assert (inventory.blocks_in(Tier.DRAM), inventory.blocks_in(Tier.SSD)) == (4, 0)
    assert inventory.blocks() == [
        (A, None, Tier.DRAM),
        (B, A, Tier.DRAM),
        (C, A, Tier.DRAM),
        (D, C, Tier.DRAM),
    ]


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 6), st.integers(0, 6)), max_size=60))
def test_any_history_leaves_it_prefix_closed_and_parents_first(changes):
    names = [BlockHash(bytes([number]) * 16) for number in range(7)]
    inventory, model = Inventory(), {}
    for adds, number, parent_number in changes:
        block_hash, parent = names[number], names[parent_number] if parent_number < number else None
        if adds:
            allowed = block_hash not in model and (parent is None or parent in model)
        else:
            allowed = block_hash in model and block_hash not in model.values()
        try:
            inventory.add(block_hash, parent, Tier.DRAM) if adds else inventory.remove(block_hash)
        except InventoryError:
            assert not allowed
            continue
        assert allowed
        model.update({block_hash: parent}) if adds else model.pop(block_hash)
    assert {block_hash: parent for block_hash, parent, _ in inventory.blocks()} == model
    # Parents first is exactly what building a second inventory from the list demands.
    assert Inventory(inventory.blocks()).blocks() == inventory.blocks()
