"""Inventory: prefix-closed whatever is asked of it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvhash import BlockHash
from kvindex.core import Tier, TierRun
from kvindex.inventory import Inventory, InventoryError

pytestmark = pytest.mark.unit

A, B, C, D = (BlockHash(bytes([letter]) * 16) for letter in b"abcd")


def build() -> Inventory:
    """A with the children B and C, D under C."""
    return Inventory([(A, None, Tier.DRAM), (B, A, Tier.DRAM), (C, A, Tier.DRAM), (D, C, Tier.SSD)])


def test_it_knows_relations_and_tiers():
    inventory = build()
    assert len(inventory) == 4
    assert A in inventory
    assert BlockHash(b"x" * 16) not in inventory
    assert (inventory.parent(A), inventory.parent(D)) == (None, C)
    assert (inventory.tier(A), inventory.tier(D)) == (Tier.DRAM, Tier.SSD)
    assert set(inventory.leaves()) == {B, D}
    assert [inventory.is_leaf(block_hash) for block_hash in (A, B, C, D)] == [False, True, False, True]


def test_removing_a_leaf_may_make_its_parent_one():
    inventory = build()
    inventory.remove(D)
    assert set(inventory.leaves()) == {B, C}
    inventory.remove(B)
    inventory.remove(C)
    assert list(inventory) == [A]
    assert inventory.is_leaf(A)


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
    assert set(inventory.leaves()) == {B, D}


def test_blocks_that_do_not_come_parents_first_make_no_inventory():
    with pytest.raises(InventoryError, match="parent"):
        Inventory([(B, A, Tier.DRAM), (A, None, Tier.DRAM)])


def test_moving_keeps_the_order_and_tells_when_one_tier_is_left():
    inventory = build()
    assert inventory.only_tier() is None
    inventory.move(D, Tier.DRAM)
    assert inventory.only_tier() is Tier.DRAM
    assert inventory.blocks() == [
        (A, None, Tier.DRAM),
        (B, A, Tier.DRAM),
        (C, A, Tier.DRAM),
        (D, C, Tier.DRAM),
    ]
    assert Inventory().only_tier() is None


def test_the_tiers_of_a_chain_are_told_up_to_the_first_block_that_is_not_held():
    inventory = build()
    assert inventory.tier_runs([A, C, D, B]) == (
        TierRun(Tier.DRAM, 2),
        TierRun(Tier.SSD, 1),
        TierRun(Tier.DRAM, 1),
    )
    assert inventory.tier_runs([A, BlockHash(b"x" * 16), D]) == (TierRun(Tier.DRAM, 1),)
    assert inventory.tier_runs([]) == ()


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
    assert set(inventory.leaves()) == set(model) - set(model.values())
    # Parents first is exactly what building a second inventory from the list demands.
    assert Inventory(inventory.blocks()).blocks() == inventory.blocks()
