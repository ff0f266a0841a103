"""Directory: by example, and against a naive model under random events."""

import itertools
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvhash import BlockHash, HashInputError, block_hashes, namespace, unpack
from kvindex.core import BlockAction, BlockEvent, HeldRun, InstanceId, InstanceMatch, Tier, TierRun
from kvindex.directory import Directory
from kvindex.holders import Interned
from kvindex.inventory import Inventory, InventoryError
from kvindex.runs import NO_PARENT

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
    directory.apply(ONE, stored(cut(0, 6), tier=Tier.DEVICE))
    directory.apply(TWO, stored(cut(0, 4)))
    directory.apply(ONE, moved(cut(2, 6), Tier.DRAM))
    directory.apply(ONE, moved(cut(5, 6), Tier.SSD))
    runs = (TierRun(Tier.DEVICE, 2), TierRun(Tier.DRAM, 3), TierRun(Tier.SSD, 1))
    assert directory.match(CHAIN) == (InstanceMatch(ONE, 6, runs), match_in(TWO, 4))
    assert directory.match(cut(0, 3)) == (
        InstanceMatch(ONE, 3, (TierRun(Tier.DEVICE, 2), TierRun(Tier.DRAM, 1))),
        match_in(TWO, 3),
    )
    directory.apply(ONE, moved(cut(0, 6), Tier.DEVICE))
    assert directory.match(CHAIN) == (match_in(ONE, 6, Tier.DEVICE), match_in(TWO, 4))


tier_lengths = st.tuples(*[st.integers(0, 40)] * 3)


@given(st.lists(tier_lengths, min_size=1, max_size=8), st.lists(st.integers(0, 100), min_size=1, max_size=4))
def test_any_mix_of_tiers_and_lengths_is_found(instances, asked):
    """Asked again and again: what is remembered of the answers before changes none."""
    directory = Directory()
    for number, lengths in enumerate(instances):
        end = 0
        for tier, blocks in zip(Tier, lengths, strict=True):
            parent = cut(end - 1, end) if end else b""
            directory.apply(InstanceId(f"i{number}"), stored(cut(end, end + blocks), parent, tier))
            end = min(end + blocks, 100)
    for blocks in asked:
        expected = []
        for number, lengths in enumerate(instances):
            left, runs = blocks, []
            for tier, length in zip(Tier, lengths, strict=True):
                taken = min(left, length)
                left -= taken
                runs += [TierRun(tier, taken)] * (taken > 0)
            if runs:
                expected.append(
                    InstanceMatch(InstanceId(f"i{number}"), sum(run.blocks for run in runs), tuple(runs))
                )
        expected.sort(key=lambda match: (-match.prefix_blocks, match.instance))
        assert directory.match(cut(0, blocks)) == tuple(expected)


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


def sweep(directory: Directory, blocks_max: int = 3) -> None:
    while directory.sweep(blocks_max):
        pass


def test_instances_that_come_and_go_leave_nothing_behind():
    directory = Directory()
    directory.apply(ONE, stored(cut(0, 1)))
    for number in range(200):
        directory.apply(InstanceId(f"i{number}"), stored(cut(0, 2)))
        directory.drop(InstanceId(f"i{number}"))
        sweep(directory)
    assert set(directory._holders) == {cut(0, 1)}
    assert max(directory._holders.values()).bit_length() == 2
    assert len(directory._place_of) == len(directory._places) == 1


def test_what_was_dropped_is_seen_by_nobody_while_it_is_swept():
    directory = Directory()
    for instance in (ONE, TWO, THREE):
        directory.apply(instance, stored(cut(0, 90)))
    directory.drop(ONE)
    directory.apply(TWO, removed(cut(89, 90)))
    directory.drop(THREE)
    directory.apply(ONE, stored(cut(0, 5)))
    assert directory.sweep(7)
    directory.drop(ONE)
    directory.apply(ONE, stored(cut(0, 4)))
    expected = (match_in(TWO, 89), match_in(ONE, 4))
    steps = 0
    while directory.sweep(7):
        assert directory.match(CHAIN) == expected
        steps += 1
    assert steps > 90 / 7
    assert directory.match(CHAIN) == expected
    assert set(directory._holders) == set(unpack(cut(0, 89)))
    assert len(directory._places) == 2


def test_a_million_integers_that_were_used_once_are_not_kept(monkeypatch):
    monkeypatch.setattr(Interned, "UNUSED_MAX", 4)
    directory = Directory()
    rng = random.Random(3)
    for number in range(8):
        directory.apply(InstanceId(f"i{number}"), stored(CHAIN))
    for _ in range(300):
        number = rng.randrange(100)
        for instance in rng.sample(range(8), 3):
            directory.apply(
                InstanceId(f"i{instance}"), moved(cut(number, number + 1), rng.choice(list(Tier)))
            )
        used = {id(holders): holders for holders in directory._holders.values()}
        assert len(set(used.values())) == len(used), "equal integers are one object"
        assert len(directory._interned) <= 2 * 101 + 4


def runs_of(*runs: tuple[Tier, bytes, bytes]) -> list[HeldRun]:
    return [HeldRun(*run) for run in runs]


def test_an_inventory_replaces_all_that_was_known():
    directory = Directory()
    other = block_hashes(SPACE, [7] * 32)
    directory.apply(ONE, stored(cut(0, 3)))
    directory.apply(ONE, stored(other))
    directory.apply(TWO, stored(other))
    directory.replace(ONE, runs_of((Tier.DRAM, cut(0, 1), NO_PARENT), (Tier.SSD, cut(1, 2), cut(0, 1))))
    assert directory.match(CHAIN) == (InstanceMatch(ONE, 2, (TierRun(Tier.DRAM, 1), TierRun(Tier.SSD, 1))),)
    assert directory.match(other) == (match_in(TWO, 2),)
    assert directory.blocks_of(ONE) == 2
    directory.replace(ONE, [])
    assert directory.match(CHAIN) == ()
    assert set(directory.instances()) == {ONE, TWO}
    sweep(directory)
    assert set(directory._holders) == set(unpack(other))


def test_an_inventory_is_unseen_until_it_is_whole():
    directory = Directory()
    directory.apply(ONE, stored(cut(0, 9)))
    replacement = directory.replacement(ONE)
    directory.extend(replacement, HeldRun(Tier.DRAM, cut(0, 2), NO_PARENT + cut(0, 1)))
    directory.extend(replacement, HeldRun(Tier.DRAM, cut(2, 3), cut(1, 2)))
    assert replacement.blocks == 3
    assert directory.match(CHAIN) == (match_in(ONE, 9),)
    assert (directory.blocks(), directory.instances()) == (9, (ONE,))
    directory.commit(replacement)
    assert directory.match(CHAIN) == (match_in(ONE, 3),)
    given_up = directory.replacement(TWO)
    directory.extend(given_up, HeldRun(Tier.DRAM, cut(0, 2), NO_PARENT + cut(0, 1)))
    directory.abandon(given_up)
    directory.abandon(given_up)
    assert directory.instances() == (ONE,)
    sweep(directory)
    assert set(directory._holders) == set(unpack(cut(0, 3)))


def test_in_an_inventory_parents_may_come_after_their_children():
    """Blocks that moved while it was packed are told in their new tier, wherever in the order."""
    directory = Directory()
    replacement = directory.replacement(ONE)
    directory.extend(replacement, HeldRun(Tier.DRAM, cut(2, 4), cut(1, 3)))
    assert replacement.parents_missing == {cut(1, 2)}
    directory.extend(replacement, HeldRun(Tier.SSD, cut(0, 2), NO_PARENT + cut(0, 1)))
    directory.commit(replacement)
    assert [(match.instance, match.prefix_blocks) for match in directory.match(CHAIN)] == [(ONE, 4)]
    with pytest.raises(AssertionError, match="committed"):
        directory.extend(replacement, HeldRun(Tier.SSD, cut(4, 5), cut(3, 4)))


@pytest.mark.parametrize(
    ("runs", "message"),
    [
        (runs_of((Tier.DRAM, cut(1, 2), cut(0, 1))), "parent .* is not held"),
        (
            runs_of((Tier.DRAM, cut(0, 2) + cut(3, 4), NO_PARENT + cut(0, 1) + cut(2, 3))),
            "parent .* is not held",
        ),
        (runs_of((Tier.DRAM, cut(0, 1), NO_PARENT), (Tier.SSD, cut(0, 1), NO_PARENT)), "held already"),
        (runs_of((Tier.DRAM, cut(0, 1) * 2, NO_PARENT * 2)), "twice"),
        (runs_of((Tier.DRAM, cut(0, 1), b"")), "parents: 0 bytes"),
    ],
)
def test_an_inventory_with_a_hole_is_refused_and_changes_nothing(runs, message):
    directory = Directory()
    directory.apply(ONE, stored(cut(0, 3)))
    with pytest.raises(InventoryError, match=message):
        directory.replace(ONE, runs)
    assert directory.match(CHAIN) == (match_in(ONE, 3),)
    sweep(directory)
    assert set(directory._holders) == set(unpack(cut(0, 3)))


@pytest.mark.parametrize(
    ("event", "message"),
    [
        (stored(cut(0, 1)), "held already"),
        (stored(cut(5, 6), parent=cut(4, 5)), "parent .* is not held"),
        (stored(cut(3, 4), parent=b"short"), "parent: 5 bytes"),
        (stored(cut(3, 4) * 2, parent=cut(2, 3)), "twice"),
        (stored(cut(3, 5) + cut(2, 3), parent=cut(2, 3)), "held already"),
        (removed(cut(2, 3) * 2), "twice"),
        (removed(cut(2, 3) + cut(7, 8)), "is not held"),
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
    directory.apply(ONE, moved(cut(3, 40), Tier.SSD))
    directory.apply(TWO, stored(cut(0, 60)))
    directory.match(CHAIN)
    matches = directory.match(b"".join(cut(index, index + 1) for index in indexes))
    assert len({match.instance for match in matches}) == len(matches)
    for match in matches:
        assert 1 <= match.prefix_blocks <= len(indexes)
        assert sum(run.blocks for run in match.runs) == match.prefix_blocks


def node_hash(path: tuple[int, ...]) -> BlockHash:
    return BlockHash(bytes(path).ljust(15, b"\xff") + bytes([len(path)]))


paths = st.lists(st.integers(0, 1), min_size=1, max_size=6).map(tuple)
instances = st.sampled_from([ONE, TWO, THREE])
tiers = st.sampled_from(Tier)


def pack_nodes(nodes: list[tuple[int, ...]]) -> bytes:
    return b"".join(map(node_hash, nodes))


def slower(one: Tier, other: Tier) -> Tier:
    return max(one, other, key=list(Tier).index)


class DirectoryMachine(RuleBasedStateMachine):
    """The model is a plain dict per instance: path in the tree of prompts to tier.

    As an instance does it, no block lies in a faster tier than its parent.
    """

    def __init__(self):
        super().__init__()
        self.directory = Directory()
        self.model: dict[InstanceId, dict[tuple[int, ...], Tier]] = {}

    @rule(instance=instances, path=paths, tier=tiers)
    def store_path(self, instance, path, tier):
        """What is missing of a path, in one event."""
        held = self.model.setdefault(instance, {})
        missing = [path[:depth] for depth in range(1, len(path) + 1) if path[:depth] not in held]
        above = missing[0][:-1] if missing else ()
        tier = slower(tier, held[above]) if above else tier
        self.directory.apply(instance, stored(pack_nodes(missing), node_hash(above) if above else b"", tier))
        held.update(dict.fromkeys(missing, tier))

    @rule(instance=instances, path=paths)
    def remove_subtree(self, instance, path):
        held = self.model.setdefault(instance, {})
        gone = sorted((node for node in held if node[: len(path)] == path), key=len, reverse=True)
        self.directory.apply(instance, removed(pack_nodes(gone)))
        for node in gone:
            del held[node]

    @rule(instance=instances, path=paths, tier=tiers)
    def sink_subtree(self, instance, path, tier):
        held = self.model.setdefault(instance, {})
        sunk = [node for node in held if node[: len(path)] == path and slower(held[node], tier) is tier]
        self.directory.apply(instance, moved(pack_nodes(sorted(sunk, key=len, reverse=True)), tier))
        held.update(dict.fromkeys(sunk, tier))

    @rule(instance=instances, path=paths, tier=tiers)
    def raise_path(self, instance, path, tier):
        held = self.model.setdefault(instance, {})
        way = [path[:depth] for depth in range(1, len(path) + 1)]
        risen = [node for node in way if node in held and slower(held[node], tier) is held[node]]
        self.directory.apply(instance, moved(pack_nodes(risen), tier))
        held.update(dict.fromkeys(risen, tier))

    @rule(instance=instances, path=paths, event=st.sampled_from(["stored", "moved", "removed", "orphan"]))
    def contradict(self, instance, path, event):
        """Nothing of an event that cannot be true is applied, whatever else stands in it."""
        held = self.model.get(instance, {})
        other = next(iter(held), None)
        block_hashes = pack_nodes([*([other] if other else []), path])
        contradictions = {
            "orphan": (path not in held, stored(node_hash((*path, 0, 0)), node_hash(path))),
            "stored": (other or path in held, stored(block_hashes)),
            "moved": (path not in held, moved(block_hashes, Tier.SSD)),
            "removed": (path not in held, removed(block_hashes)),
        }
        is_one, contradiction = contradictions[event]
        if is_one:
            self.model.setdefault(instance, held)
            with pytest.raises(InventoryError):
                self.directory.apply(instance, contradiction)

    @rule(
        instance=instances, others=st.lists(st.tuples(paths, tiers), max_size=4), blocks_max=st.integers(1, 5)
    )
    def replace(self, instance, others, blocks_max):
        """In runs as an instance cuts them, while what was there before is asked for and swept."""
        fresh: dict[tuple[int, ...], Tier] = {}
        for path, tier in others:
            for depth in range(1, len(path) + 1):
                above = fresh.get(path[: depth - 1], tier)
                fresh.setdefault(path[:depth], slower(tier, above))
        blocks = [
            (node_hash(node), node_hash(node[:-1]) if node[:-1] else None, fresh[node])
            for node in sorted(fresh, key=len)
        ]
        replacement = self.directory.replacement(instance)
        for part in Inventory(blocks).snapshot().parts(blocks_max):
            self.directory.extend(replacement, part.pack())
            self.directory.sweep(2)
            for path, _ in others:
                self.match(path)
        self.directory.commit(replacement)
        self.model[instance] = fresh

    @rule(instance=instances)
    def drop(self, instance):
        self.directory.drop(instance)
        self.model.pop(instance, None)

    @rule(blocks_max=st.integers(1, 9))
    def sweep_on(self, blocks_max):
        self.directory.sweep(blocks_max)

    @rule(path=paths)
    def match(self, path):
        expected = {}
        for instance, held in self.model.items():
            held_tiers = []
            for depth in range(1, len(path) + 1):
                if path[:depth] not in held:
                    break
                held_tiers.append(held[path[:depth]])
            if held_tiers:
                expected[instance] = held_tiers
        matches = self.directory.match(pack_nodes([path[:depth] for depth in range(1, len(path) + 1)]))
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

    def teardown(self):
        sweep(self.directory)
        every = {node_hash(node) for held in self.model.values() for node in held}
        assert set(self.directory._holders) == every
        assert len(self.directory._places) == len(self.model)


DirectoryMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40)
TestDirectory = DirectoryMachine.TestCase
