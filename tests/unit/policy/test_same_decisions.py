"""`place` keeps columns from one decision to the next; a plain walk over the whole view decides the same.

A cluster of few names, costs and times goes through folds of every kind, so that ties, requests that are told
twice, silence and overload all come up, and is asked after each.
"""

from collections.abc import Iterator
from dataclasses import replace
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.plain_place import plain_place
from tests.support.views import BLOCK_TOKENS, COST, FINGERPRINT, MODEL, instance

from kvindex.core import InstanceId, InstanceMatch, Tier, TierRun
from policy.choice import AdmissionMode, PlacementLimits, Strategy
from policy.core import (
    EndedRequest,
    InstanceState,
    LoadSnapshot,
    Placement,
    QueuedRequest,
    RequestId,
    Role,
    RunningRequest,
    ScheduleRequest,
)
from policy.place import place
from policy.view import (
    Booking,
    ClusterView,
    InstanceView,
    expire,
    with_booking,
    with_instance,
    with_instances,
    with_load,
    with_placement,
    without_instance,
)

pytestmark = pytest.mark.unit

NAMES = [InstanceId(f"i{number}") for number in range(8)]
KEYS_MAX = 24
"""Requests that snapshots and bookings tell of; each has its prefill and its decode, as a placement gives."""
COSTS = (
    COST,
    replace(COST, prefill_per_token_s=1.05e-3, step_fixed_s=0.031),
    replace(COST, transfer_bytes_per_s=4e7, ssd_bytes_per_s=3e7),
    replace(COST, transfer_fixed_s=0.0, ssd_fixed_s=0.0, first_token_fixed_s=0.02),
    replace(COST, prefill_fixed_s=0.0, prefill_per_token_s=0.0, prefill_per_token_pair_s=0.0),
    None,
)
ROLES = ((Role.PREFILL,), (Role.DECODE,), (Role.PREFILL, Role.DECODE), (Role.PREFILL,), (Role.DECODE,))
STEP_S = 0.004
"""Times are multiples of it: less than the lag in which others' decisions are allowed for."""


def of_key(number: int) -> tuple[RequestId, InstanceId, InstanceId]:
    return RequestId(f"k{number}"), NAMES[number % len(NAMES)], NAMES[(number * 5 + 3) % len(NAMES)]


class Cluster:
    """A view, and the folds that `draw` draws for it."""

    def __init__(self, draw: Random) -> None:
        self.draw = draw
        self.now_s = 1.0
        self.seq = 1
        names = draw.sample(NAMES, draw.randrange(2, len(NAMES) + 1))
        self.view = ClusterView({name: self.registered(name) for name in names})

    def registered(self, name: InstanceId) -> InstanceView:
        draw = self.draw
        return instance(
            name,
            *draw.choice(ROLES),
            load=draw.choice((self.load(name), self.load(name), None)),
            model=draw.choice((MODEL,) * 5 + ("other",)),
            fingerprint=draw.choice((FINGERPRINT,) * 5 + ("f1",)),
            blocks=draw.choice((100, 4096, 4096)),
            block_bytes=draw.choice((700_000, 1_000_000)),
            heard_at_s=self.now_s - draw.choice((0.0, 0.5, 5.0, 5.5)),
            incarnation=draw.choice((1, 1, 2)),
        )

    def load(self, name: InstanceId) -> LoadSnapshot:
        draw = self.draw
        told = [of_key(number) for number in range(KEYS_MAX)]
        queued = [key for key, prefill, _ in told if prefill == name and draw.random() < 0.4]
        running = [key for key, _, decode in told if decode == name and draw.random() < 0.4]
        decodes = {key: decode for key, _, decode in told}
        ended = [key for key, prefill, _ in told if prefill == name and draw.random() < 0.2]
        return LoadSnapshot(
            instance=name,
            roles=(),
            state=draw.choice((InstanceState.SERVING,) * 7 + (InstanceState.DRAINING,)),
            queued=tuple(self.queued(key, decodes[key]) for key in queued),
            running=tuple(self.running(key) for key in running),
            blocks=4096,
            blocks_free=draw.choice((0, 20, 80, 4000)),
            blocks_cached=draw.choice((0, 10)),
            cost=draw.choice(COSTS),
            ended=tuple(EndedRequest(key, 1, draw.randrange(1, 100)) for key in ended),
            ended_total=self.seq * 3,
        )

    def queued(self, key: RequestId, decode: InstanceId) -> QueuedRequest:
        draw = self.draw
        return QueuedRequest(
            key,
            draw.choice((1, 1, 2)),
            decode,
            new_tokens=draw.choice((1, 500, 3000)),
            prefix_tokens=draw.choice((0, 160)),
            output_tokens_max=64,
            samples=draw.choice((1, 1, 3)),
            priority=draw.choice((0, 0, -1, 2)),
            output_tokens_expected=draw.choice((None, 10, 64)),
        )

    def running(self, key: RequestId) -> RunningRequest:
        draw = self.draw
        return RunningRequest(
            key,
            draw.choice((1, 1, 2)),
            kv_tokens=draw.choice((50, 100, 2000)),
            output_tokens=draw.choice((0, 5, 60)),
            output_tokens_max=64,
            committed=True,
            samples=draw.choice((1, 1, 3)),
            priority=draw.choice((0, 0, 0, 1)),
            output_tokens_expected=draw.choice((None, 10, 64)),
        )

    def booking(self) -> Booking:
        draw = self.draw
        key, prefill, decode = of_key(draw.randrange(KEYS_MAX))
        new_tokens, prefix_tokens = draw.choice((1, 400, 2000)), draw.choice((0, 320))
        return Booking(
            key,
            draw.choice((1, 1, 2)),
            prefill,
            decode,
            new_tokens,
            prefix_tokens,
            booked_at_s=self.now_s - draw.choice((0, 0, STEP_S, 10 * STEP_S)),
            blocks=-(-(new_tokens + prefix_tokens) // BLOCK_TOKENS) + 1,
            samples=draw.choice((1, 2)),
            priority=draw.choice((0, 0, 1)),
            output_tokens_expected=draw.choice((None, 30)),
            elsewhere=draw.random() < 0.5,
        )

    def fold(self) -> None:
        draw, view = self.draw, self.view
        names = list(view.instances) or NAMES
        kind = draw.choice("lllllbbbbrwxke")
        self.now_s += draw.choice((0.0, STEP_S, 0.1))
        self.seq += 1
        match kind:
            case "l":
                name = draw.choice(names)
                known = view.instances.get(name)
                incarnation = 1 if known is None else known.incarnation
                self.view = with_load(view, self.load(name), incarnation, self.seq, self.now_s)
            case "b":
                self.view = with_booking(view, self.booking())
            case "r":
                self.view = with_instance(view, self.registered(draw.choice(NAMES)))
            case "w":
                self.view = without_instance(view, draw.choice(names))
            case "x":
                kept = [view.instances.get(name, self.registered(name)) for name in draw.sample(NAMES, 7)]
                self.view = with_instances(view, kept)
            case "k":
                shuffled = list(view.instances.items())
                draw.shuffle(shuffled)
                self.view = replace(view, instances=dict(shuffled))
            case "e":
                self.view = expire(view, self.now_s, 0.1)

    def request(self, number: int) -> ScheduleRequest:
        draw = self.draw
        return ScheduleRequest(
            request_id=RequestId(f"r{number}-{draw.randrange(1000)}"),
            attempt=1,
            model=MODEL,
            fingerprint=FINGERPRINT,
            prompt_tokens=draw.choice((1, 16, 17, 400, 1500, 1601, 3000)),
            output_tokens_max=draw.choice((1, 64)),
            block_hashes=b"",
            deadline_s=draw.choice((600.0, 600.0, 2.0)),
            priority=draw.choice((0, 0, -1, 1)),
            ttft_ms_max=draw.choice((None, None, 500.0, 2500.0)),
            tbt_ms_max=draw.choice((None, None, 60.0, 120.0, 400.0)),
            excluded=tuple(draw.sample(NAMES, draw.choice((0, 0, 0, 1, 5)))),
            resumed=draw.random() < 0.1,
            samples=draw.choice((1, 1, 4)),
        )

    def matches(self) -> tuple[InstanceMatch, ...]:
        draw = self.draw
        found = []
        for name in draw.sample(NAMES, draw.choice((0, 1, 4, 8))):
            memory_blocks, ssd_blocks = draw.choice((0, 5, 40, 93, 93)), draw.choice((0, 0, 0, 7, 60))
            runs = ((Tier.DRAM, memory_blocks), (Tier.SSD, ssd_blocks))
            told = tuple(TierRun(tier, blocks) for tier, blocks in runs if blocks)
            found.append(InstanceMatch(name, memory_blocks + ssd_blocks, told))
        return tuple(sorted(found, key=lambda match: (-match.prefix_blocks, match.instance)))

    def limits(self) -> PlacementLimits:
        draw = self.draw
        return PlacementLimits(
            strategy=draw.choice(list(Strategy)),
            admission=draw.choice(list(AdmissionMode)),
            kvcache_balancing_threshold=draw.choice((1.0, 2.0, 4.0)),
            kvcache_local_share_min=draw.choice((1.0, 0.3)),
            ttft_ms_default=draw.choice((None, 3000.0)),
            tbt_ms_default=draw.choice((None, 200.0)),
            decode_horizon_s=draw.choice((60.0, 1.0)),
            tie_fraction=draw.choice((0.1, 0.0)),
            tie_s=draw.choice((0.005, 0.0)),
            compute_weight=draw.choice((1.0, 1.0, 2.0)),
            work_price=draw.choice((1.0, 3.0)),
        )

    def views(self, folds: int) -> Iterator[ClusterView]:
        yield self.view
        for _ in range(folds):
            self.fold()
            yield self.view


@settings(max_examples=150)
@given(draw=st.randoms(use_true_random=True), folds=st.integers(0, 20))
def test_whatever_was_folded(draw: Random, folds: int) -> None:
    cluster = Cluster(draw)
    for number, view in enumerate(cluster.views(folds)):
        for _ in range(2):
            asked = (cluster.request(number), cluster.matches(), cluster.limits(), cluster.now_s)
            decision = place(view, *asked)
            assert decision == plain_place(view, *asked)
            if isinstance(decision, Placement) and draw.random() < 0.5:
                cluster.view = with_placement(
                    cluster.view,
                    decision,
                    asked[0].prompt_tokens,
                    cluster.now_s,
                    elsewhere=draw.random() < 0.5,
                )


@settings(max_examples=50)
@given(draw=st.randoms(use_true_random=True))
def test_from_whichever_view_it_comes(draw: Random) -> None:
    """Views of one chain share their columns: those of an earlier one, or of another branch, are as good."""
    cluster = Cluster(draw)
    views = list(cluster.views(folds=6))
    cluster.view = views[draw.randrange(len(views))]
    views += cluster.views(folds=4)
    draw.shuffle(views)
    for number, view in enumerate(views):
        asked = (cluster.request(number), cluster.matches(), cluster.limits(), cluster.now_s)
        assert place(view, *asked) == plain_place(view, *asked)
