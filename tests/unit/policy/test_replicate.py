from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.views import D1, P1, P2, decode, instance, prefill, snapshot, view_of

from kvindex.core import InstanceId, InstanceMatch
from policy.core import InstanceState, Role
from policy.replicate import (
    Budget,
    HotPrefix,
    Replication,
    ReplicationLimits,
    ReplicationView,
    replicate,
)
from policy.view import InstanceView

pytestmark = pytest.mark.unit

LIMITS = ReplicationLimits(
    requests_min=5, copies_max=3, in_flight_max=4, bytes_per_s=1e9, burst_bytes=1e9, silence_s_max=5.0
)
BLOCK_BYTES = 1_000_000
P3 = InstanceId("p3")
ROLES = {"p": Role.PREFILL, "d": Role.DECODE}


def worker(name: str, requests: int = 0, free: int = 1000, cached: int = 0, **fields: object) -> InstanceView:
    load = replace(snapshot(name, blocks_free=free), requests=requests, blocks_cached=cached)
    return instance(name, ROLES[name[0]], load=load, block_bytes=BLOCK_BYTES, **fields)


def chain(blocks: int, salt: int = 0) -> bytes:
    return b"".join(bytes([salt, number]) * 8 for number in range(blocks))


def hot(blocks: int, *holders: tuple[str, int], requests: int = 10, salt: int = 0) -> HotPrefix:
    matches = tuple(InstanceMatch(InstanceId(name), held) for name, held in holders)
    return HotPrefix(chain(blocks, salt), requests, matches)


def view(*instances: InstanceView, prefixes=(), left_bytes: float = 1e9, **fields: object) -> ReplicationView:
    return ReplicationView(view_of(*instances), tuple(prefixes), Budget(left_bytes, 0.0), **fields)


def begun(asked: ReplicationView, limits: ReplicationLimits = LIMITS, now_s: float = 0.0):
    return [
        (copy.source, copy.target, copy.new_blocks) for copy in replicate(asked, limits, now_s).replications
    ]


def test_a_hot_prefix_goes_to_prefills_first_least_loaded_first():
    asked = view(
        worker("p1", 9),
        worker("p2", 5),
        worker("p3", 2),
        worker("d1"),
        prefixes=[hot(10, ("p1", 10), ("p3", 4))],
    )
    assert begun(asked) == [(P1, P3, 6), (P1, P2, 10)]
    assert begun(asked, replace(LIMITS, copies_max=4))[-1] == (P1, D1, 10)
    first = replicate(asked, LIMITS, 0.0).replications[0]
    assert (first.fingerprint, first.block_hashes, first.new_bytes) == ("f0", chain(10), 6 * BLOCK_BYTES)


def test_too_few_requests():
    assert begun(view(worker("p1"), worker("p2"), prefixes=[hot(10, ("p1", 10), requests=4)])) == []
    assert begun(view(worker("p1"), worker("p2"), prefixes=[hot(10, ("p1", 10), requests=5)]))


def test_enough_copies():
    holders = [("p1", 10), ("p2", 12), ("d1", 10)]
    asked = view(worker("p1"), worker("p2"), worker("p3"), worker("d1"), prefixes=[hot(10, *holders)])
    assert begun(asked) == []


def test_a_draining_holder_is_neither_copy_nor_source():
    leaving = replace(worker("p1"), load=snapshot("p1", state=InstanceState.DRAINING))
    assert begun(view(leaving, worker("p2"), prefixes=[hot(10, ("p1", 10))])) == []
    asked = view(leaving, worker("p2"), worker("p3"), prefixes=[hot(10, ("p1", 10), ("p2", 10))])
    assert begun(asked, replace(LIMITS, copies_max=2)) == [(P2, P3, 10)]


def test_the_least_loaded_holder_is_read():
    asked = view(worker("p1", 5), worker("d1", 1), worker("p3"), prefixes=[hot(10, ("p1", 10), ("d1", 10))])
    assert begun(asked) == [(D1, P3, 10)]


@pytest.mark.parametrize(
    "unfit",
    [
        worker("p2", fingerprint="other"),
        worker("p2", heard_at_s=-6.0),
        worker("p2", free=9),
        worker("p2", free=4, cached=11),
        replace(worker("p2"), load=None),
        replace(worker("p2"), load=snapshot("p2", blocks_free=1000, state=InstanceState.DRAINING)),
    ],
    ids=["other model", "silent", "no room", "too few cached", "load unknown", "draining"],
)
def test_no_copy_to_the_unfit(unfit):
    assert begun(view(worker("p1"), unfit, prefixes=[hot(10, ("p1", 10))])) == []


def test_a_share_of_what_is_cached_is_room():
    asked = view(worker("p1"), worker("p2", free=4, cached=12), prefixes=[hot(10, ("p1", 10))])
    assert begun(asked) == [(P1, P2, 10)]


def test_what_is_on_its_way_takes_room_and_counts_as_a_copy():
    first, second = hot(10, ("p1", 10), requests=20), hot(10, ("p1", 10), salt=1)
    asked = view(worker("p1"), worker("p2", free=15), prefixes=[first, second])
    assert begun(asked) == [(P1, P2, 10)]
    (copy,) = replicate(asked, LIMITS, 0.0).replications
    assert copy.block_hashes == first.block_hashes
    for known in ({"in_flight": (copy,)}, {"settling": (copy,)}):
        assert begun(replace(asked, **known)) == []
        roomy = replace(asked, cluster=view_of(worker("p1"), worker("p2", free=20)), **known)
        assert [made.block_hashes for made in replicate(roomy, LIMITS, 0.0).replications] == [
            second.block_hashes
        ]


def test_what_was_tried_is_avoided():
    asked = view(worker("p1"), worker("p2"), worker("p3"), prefixes=[hot(10, ("p1", 10))])
    avoided = frozenset({(hot(10).last_hash, P2)})
    assert begun(replace(asked, avoided=avoided)) == [(P1, P3, 10)]


def test_in_flight_bound():
    asked = view(*(worker(f"p{n}") for n in range(1, 6)), prefixes=[hot(10, ("p1", 10))])
    assert len(begun(asked, replace(LIMITS, copies_max=9, in_flight_max=2))) == 2


class TestBudget:
    def test_pays_for_each_copy_and_grows_with_time(self):
        asked = view(
            worker("p1"), worker("p2"), worker("p3"), prefixes=[hot(10, ("p1", 10))], left_bytes=15e6
        )
        plan = replicate(asked, LIMITS, 0.0)
        assert [copy.target for copy in plan.replications] == [P2]
        assert plan.budget == Budget(5e6, 0.0)
        settled = replace(asked, budget=plan.budget, settling=plan.replications)
        assert begun(settled, now_s=0.004) == []
        assert begun(settled, now_s=0.005) == [(P1, P3, 10)]

    def test_never_grows_beyond_a_burst(self):
        assert Budget(0.0, 0.0).at(1e6, LIMITS) == Budget(1e9, 1e6)

    def test_a_copy_larger_than_a_burst_needs_a_whole_one_and_is_paid_off(self):
        limits = replace(LIMITS, burst_bytes=4e6)
        asked = view(worker("p1"), worker("p2"), prefixes=[hot(10, ("p1", 10))], left_bytes=3.9e6)
        assert replicate(asked, limits, 0.0).replications == ()
        plan = replicate(asked, limits, 0.0001)
        assert (len(plan.replications), plan.budget.left_bytes) == (1, -6e6)

    def test_the_hottest_is_waited_for(self):
        large, small = hot(200, ("p1", 200), requests=20), hot(1, ("p1", 1), salt=1)
        asked = view(worker("p1"), worker("p2"), prefixes=[small, large], left_bytes=100e6)
        assert begun(asked) == []


names = st.sampled_from([f"{kind}{number}" for kind in "pd" for number in range(4)])
workers = st.builds(
    worker,
    name=names,
    requests=st.integers(0, 9),
    free=st.integers(0, 30),
    cached=st.integers(0, 30),
    fingerprint=st.sampled_from(["f0", "f1"]),
    heard_at_s=st.floats(0, 10),
)
prefixes = st.builds(
    lambda blocks, requests, salt, held: hot(blocks, *held.items(), requests=requests, salt=salt),
    blocks=st.integers(1, 20),
    requests=st.integers(0, 12),
    salt=st.integers(0, 255),
    held=st.dictionaries(names, st.integers(1, 20), max_size=6),
)


@given(
    workers=st.lists(workers, unique_by=lambda worker: worker.instance),
    prefixes=st.lists(prefixes, max_size=5, unique_by=lambda prefix: prefix.last_hash),
    left_bytes=st.floats(-1e8, 1e8),
)
def test_every_limit_is_kept_round_after_round(workers, prefixes, left_bytes):
    """Each round's copies are in flight in the next, and every second round they are done."""
    limits = replace(LIMITS, bytes_per_s=5e6, burst_bytes=2e7)
    state = view(*workers, prefixes=prefixes, left_bytes=left_bytes)
    copied_bytes, keys = 0, []
    for second in range(10):
        plan = replicate(state, limits, float(second))
        reversed_view = replace(state, cluster=view_of(*workers[::-1]), prefixes=state.prefixes[::-1])
        assert replicate(reversed_view, limits, float(second)) == plan
        assert len(state.in_flight) + len(plan.replications) <= limits.in_flight_max
        for copy in plan.replications:
            check(copy, state, limits, float(second))
        keys += [copy.key for copy in plan.replications]
        copied_bytes += sum(copy.new_bytes for copy in plan.replications)
        coming = state.in_flight + plan.replications
        done = coming if second % 2 else ()
        state = replace(
            state,
            budget=plan.budget,
            in_flight=() if second % 2 else coming,
            settling=state.settling + done,
        )
    assert len(keys) == len(set(keys))
    largest = max((prefix.blocks for prefix in prefixes), default=0) * BLOCK_BYTES
    assert copied_bytes <= max(0.0, min(left_bytes, limits.burst_bytes)) + 9 * limits.bytes_per_s + largest
    for prefix in prefixes:
        holders = {held.instance for held in prefix.holders if held.prefix_blocks >= prefix.blocks}
        targets = {target for last_hash, target in keys if last_hash == prefix.last_hash}
        if prefix.requests < limits.requests_min or not holders:
            assert not targets
        assert not targets or len(targets) < limits.copies_max


def check(copy: Replication, state: ReplicationView, limits: ReplicationLimits, now_s: float) -> None:
    (prefix,) = (p for p in state.prefixes if p.block_hashes == copy.block_hashes)
    held = {match.instance: match.prefix_blocks for match in prefix.holders}
    assert held[copy.source] >= prefix.blocks
    assert copy.target not in held or held[copy.target] < prefix.blocks
    assert copy.new_blocks == prefix.blocks - held.get(copy.target, 0) > 0
    for name in (copy.source, copy.target):
        used = state.cluster.instances[name]
        assert used.fingerprint == copy.fingerprint
        assert not used.draining
        assert now_s - used.heard_at_s <= limits.silence_s_max
    load = state.cluster.instances[copy.target].load
    assert copy.new_blocks <= load.blocks_free + limits.cached_share * load.blocks_cached


def test_nothing_to_do():
    assert begun(view(prefill("p1"), decode("d1"))) == []
