"""Directory: by example, and against a naive model under random events."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvhash import BlockHash, HashInputError, block_hashes, namespace, unpack
from kvindex.core import BlockAction, BlockEvent, InstanceId, InstanceMatch, Tier, TierRun
from kvindex.directory import Directory
from kvindex.inventory import InventoryError

pytestmark = pytest.mark.unit

SPACE = namespace(b"", "model")
ONE, TWO, THREE = InstanceId("one"), InstanceId("two"), InstanceId("three")
CHAIN = block_hashes(SPACE, range(16 * 100))


def stored(block_hashes: bytes, parent: bytes = b"", tier: Tier = Tier.DRAM) -> BlockEvent:
    return BlockEvent(BlockAction.STORED, block_hashes, tier, parent)


def removed(block_hashes: bytes) -> BlockEvent:
    return BlockEvent(BlockAction.REMOVED, block_hashes, Tier.DRAM)


def moved(block_hashes: bytes, tier: Tier) -> BlockEvent:
    return BlockEvent(BlockAction.MOVED, block_hashes, tier)


def match_in(instance: InstanceId, blocks: int, tier: Tier = Tier.DRAM) -> InstanceMatch:
    return InstanceMatch(instance, blocks, (TierRun(tier, blocks),))


def cut(first: int, end: int) -> bytes:
    return CHAIN[16 * first : 16 * end]


def test_every_holder_of_a_prefix_is_found_longest_first():
    directory = Directory()
    directory.apply(ONE, stored(cut(0, 10)))
    directory.apply(TWO, stored(cut(0, 100)))
    directory.apply(THREE, stored(cut(0, 10)))
    assert directory.match(CHAIN) == (match_in(TWO, 100), match_in(ONE, 10), match_in(THREE, 10))
    assert directory.match(cut(0, 5)) == tuple(match_in(instance, 5) for instance in (ONE, THREE, TWO))
    assert (directory.blocks(), directory.blocks_of(TWO)) == (120, 100)


def test_who_holds_nothing_of_a_prompt_is_left_out():
    directory = Directory()
    assert directory.match(CHAIN) == ()
    directory.apply(ONE, stored(block_hashes(SPACE, [7] * 64)))
    assert directory.match(CHAIN) == ()
    assert directory.match(b"") == ()


@given(st.lists(st.integers(0, 100), min_size=1, max_size=12), st.integers(0, 100))
def test_any_mix_of_prefix_lengths_is_found(lengths, asked):
    directory = Directory()
    for number, length in enumerate(lengths):
        directory.apply(InstanceId(f"i{number}"), stored(cut(0, length)))
    matches = directory.match(cut(0, asked))
    expected = {f"i{number}": min(length, asked) for number, length in enumerate(lengths)}
    found = {match.instance: match.prefix_blocks for match in matches}
    assert found == {instance: blocks for instance, blocks in expected.items() if blocks}


def test_the_tiers_of_a_prefix_are_told_as_runs():
    directory = Directory()
    directory.apply(ONE, stored(cut(0, 6)))
    directory.apply(ONE, moved(cut(2, 5), Tier.SSD))
    runs = (TierRun(Tier.DRAM, 2), TierRun(Tier.SSD, 3), TierRun(Tier.DRAM, 1))
    assert directory.match(CHAIN) == (InstanceMatch(ONE, 6, runs),)
    directory.apply(ONE, moved(cut(0, 6), Tier.DEVICE))
    assert directory.match(CHAIN) == (match_in(ONE, 6, Tier.DEVICE),)


def test_removed_blocks_are_gone_for_their_instance_alone():
    directory = Directory()
    directory.apply(ONE, stored(cut(0, 3)))
    directory.apply(TWO, stored(cut(0, 3)))
    directory.apply(ONE, removed(b"".join(reversed(unpack(cut(1, 3))))))
    assert directory.match(CHAIN) == (match_in(TWO, 3), match_in(ONE, 1))


def test_a_dropped_instance_is_forgotten_and_its_place_given_again():
    directory = Directory()
    directory.apply(ONE, stored(cut(0, 3)))
    directory.apply(TWO, stored(cut(0, 2)))
    directory.drop(ONE)
    directory.drop(ONE)
    assert directory.match(CHAIN) == (match_in(TWO, 2),)
    assert directory.instances() == (TWO,)
    assert directory.blocks_of(ONE) == 0
    directory.apply(THREE, stored(cut(0, 1)))
    assert directory.match(CHAIN) == (match_in(TWO, 2), match_in(THREE, 1))


def test_instances_that_come_and_go_leave_nothing_behind():
    directory = Directory()
    directory.apply(ONE, stored(cut(0, 1)))
    for number in range(200):
        directory.apply(InstanceId(f"i{number}"), stored(cut(0, 2)))
        directory.drop(InstanceId(f"i{number}"))
    assert max(directory._holders.values()).bit_length() == 1
    assert len(directory._bits) == len(directory._instances) == len(directory._inventories) == 1


def test_an_inventory_replaces_all_that_was_known():
    directory = Directory()
    other = block_hashes(SPACE, [7] * 32)
    directory.apply(ONE, stored(cut(0, 3)))
    directory.apply(ONE, stored(other))
    directory.apply(TWO, stored(other))
    first, second = unpack(cut(0, 2))
    directory.replace(ONE, [(first, None, Tier.DRAM), (second, first, Tier.SSD)])
    assert directory.match(CHAIN) == (InstanceMatch(ONE, 2, (TierRun(Tier.DRAM, 1), TierRun(Tier.SSD, 1))),)
    assert directory.match(other) == (match_in(TWO, 2),)
    directory.replace(ONE, [])
    assert directory.match(CHAIN) == ()


def test_an_inventory_with_a_hole_is_refused_and_changes_nothing():
    directory = Directory()
    directory.apply(ONE, stored(cut(0, 3)))
    first, second = unpack(cut(0, 2))
    with pytest.raises(InventoryError, match="parent"):
        directory.replace(ONE, [(second, first, Tier.DRAM)])
    assert directory.match(CHAIN) == (match_in(ONE, 3),)


@pytest.mark.parametrize(
    ("event", "message"),
    [
        (stored(cut(0, 1)), "held already"),
        (stored(cut(5, 6), parent=cut(4, 5)), "parent .* is not held"),
        (stored(cut(3, 4), parent=b"short"), "parent: 5 bytes"),
        (removed(cut(1, 2)), "has 1 held children"),
        (removed(cut(7, 8)), "is not held"),
        (moved(cut(7, 8), Tier.SSD), "is not held"),
    ],
)
def test_an_event_that_contradicts_what_is_known_is_refused(event, message):
    directory = Directory()
    directory.apply(ONE, stored(cut(0, 3)))
    with pytest.raises(InventoryError, match=message):
        directory.apply(ONE, event)
    assert directory.match(CHAIN) == (match_in(ONE, 3),)


def test_packed_hashes_of_a_wrong_length_are_refused():
    directory = Directory()
    with pytest.raises(HashInputError, match="17 bytes"):
        directory.match(b"x" * 17)
    with pytest.raises(HashInputError, match="17 bytes"):
        directory.apply(ONE, stored(b"x" * 17))


@given(st.lists(st.integers(0, 99), max_size=30))
def test_hashes_that_are_no_chain_are_answered(indexes):
    directory = Directory()
    directory.apply(ONE, stored(cut(0, 40)))
    directory.apply(ONE, moved(cut(3, 5), Tier.SSD))
    directory.apply(TWO, stored(cut(0, 60)))
    for match in directory.match(b"".join(cut(index, index + 1) for index in indexes)):
        assert 1 <= match.prefix_blocks <= len(indexes)
        assert sum(run.blocks for run in match.runs) == match.prefix_blocks


def node_hash(path: tuple[int, ...]) -> BlockHash:
    return BlockHash(bytes(path).ljust(15, b"\xff") + bytes([len(path)]))


paths = st.lists(st.integers(0, 1), min_size=1, max_size=6).map(tuple)
instances = st.sampled_from([ONE, TWO, THREE])


class DirectoryMachine(RuleBasedStateMachine):
    """The model is a plain dict per instance: path in the tree of prompts to tier."""

    def __init__(self):
        super().__init__()
        self.directory = Directory()
        self.model: dict[InstanceId, dict[tuple[int, ...], Tier]] = {}

    @rule(instance=instances, path=paths, tier=st.sampled_from(Tier))
    def store_path(self, instance, path, tier):
        """What is missing of a path, in one event."""
        held = self.model.setdefault(instance, {})
        missing = [path[:depth] for depth in range(1, len(path) + 1) if path[:depth] not in held]
        parent = node_hash(missing[0][:-1]) if missing and len(missing[0]) > 1 else b""
        self.directory.apply(instance, stored(b"".join(map(node_hash, missing)), parent, tier))
        held.update(dict.fromkeys(missing, tier))

    @rule(instance=instances, path=paths)
    def remove_subtree(self, instance, path):
        held = self.model.setdefault(instance, {})
        gone = sorted((node for node in held if node[: len(path)] == path), key=len, reverse=True)
        self.directory.apply(instance, removed(b"".join(map(node_hash, gone))))
        for node in gone:
            del held[node]

    @rule(instance=instances, path=paths, tier=st.sampled_from(Tier))
    def move(self, instance, path, tier):
        held = self.model.setdefault(instance, {})
        if path in held:
            self.directory.apply(instance, moved(node_hash(path), tier))
            held[path] = tier
        else:
            with pytest.raises(InventoryError):
                self.directory.apply(instance, moved(node_hash(path), tier))

    @rule(instance=instances, others=st.lists(paths, max_size=4))
    def replace(self, instance, others):
        nodes = sorted({path[:depth] for path in others for depth in range(1, len(path) + 1)}, key=len)
        self.directory.replace(
            instance,
            [(node_hash(node), node_hash(node[:-1]) if node[:-1] else None, Tier.DRAM) for node in nodes],
        )
        self.model[instance] = dict.fromkeys(nodes, Tier.DRAM)

    @rule(instance=instances)
    def drop(self, instance):
        self.directory.drop(instance)
        self.model.pop(instance, None)

    @rule(path=paths)
    def match(self, path):
        expected = {}
        for instance, held in self.model.items():
            tiers = []
            for depth in range(1, len(path) + 1):
                if path[:depth] not in held:
                    break
                tiers.append(held[path[:depth]])
            if tiers:
                expected[instance] = tiers
        matches = self.directory.match(b"".join(node_hash(path[:d]) for d in range(1, len(path) + 1)))
        found = {match.instance: [r.tier for r in match.runs for _ in range(r.blocks)] for match in matches}
        assert found == expected
        assert [match.prefix_blocks for match in matches] == sorted(map(len, expected.values()), reverse=True)
        for match in matches:
            runs = [run.tier for run in match.runs]
            assert all(one is not other for one, other in itertools.pairwise(runs))

    @invariant()
    def counts_agree(self):
        assert set(self.directory.instances()) == set(self.model)
        for instance, held in self.model.items():
            assert self.directory.blocks_of(instance) == len(held)
        assert self.directory.blocks() == sum(map(len, self.model.values()))
        every = {node_hash(node) for held in self.model.values() for node in held}
        assert set(self.directory._holders) == every


DirectoryMachine.TestCase.settings = settings(max_examples=40, stateful_step_count=40)
TestDirectory = DirectoryMachine.TestCase
