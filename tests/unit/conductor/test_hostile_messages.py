"""Whatever passes the checks, a conductor goes on deciding, and what it decides can be told and recorded."""

from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.support.message_values import values_of
from tests.support.records import MODEL_INFO, registry, worker

from cluster.errors import ProtocolError
from cluster.folds import Decided, DecisionHeard, Fold, LoadHeard, Registered, folded
from cluster.messages import Decision, MatchReply
from cluster.recording import Begun, Line, decode_lines, encode_line
from cluster.wire import decode, encode
from conductor.checks import checked_decision, checked_matches, checked_request
from kvindex.core import InstanceId, InstanceMatch
from policy.choice import AdmissionMode, PlacementLimits, Strategy
from policy.core import (
    InstanceState,
    LoadSnapshot,
    Placement,
    QueuedRequest,
    RequestId,
    Role,
    ScheduleRequest,
)
from policy.load_sums import DecodeLoad
from policy.place import place
from policy.predict import PrefillBacklog, outlook
from policy.view import ClusterView, expire

pytestmark = pytest.mark.unit

WORKERS = registry(
    worker("p1", Role.PREFILL),
    worker("p2", Role.PREFILL),
    worker("d1", Role.DECODE),
    worker("c1", Role.PREFILL, Role.DECODE),
)
NAMES = st.sampled_from([*WORKERS, InstanceId("nobody")])
BOOKING_TTL_S = 2.0
CONDUCTOR = InstanceId("conductor-0")

IDS = st.just(RequestId("r")) | st.just(RequestId("s"))
DECODES = st.sampled_from([InstanceId("d1"), InstanceId("c1")])
COUNTS = st.integers(0, 2000) | st.integers(-(2**63), 2**63 - 1)
queues = st.lists(
    st.builds(QueuedRequest, IDS, st.just(0), DECODES, COUNTS, COUNTS, COUNTS, samples=COUNTS), max_size=4
)
loads = st.builds(
    lambda load, name, queued: replace(load, instance=name, queued=tuple(queued)),
    values_of(LoadSnapshot),
    NAMES,
    queues,
)
decisions = st.builds(
    lambda decision, prefill, decode, prefix_blocks: replace(
        decision,
        attempt=abs(decision.attempt),
        samples=max(1, decision.samples),
        priority=decision.priority % 100,
        placement=Placement(decision.request_id, abs(decision.attempt), prefill, decode, None, prefix_blocks),
        rejection=None,
    ),
    values_of(Decision),
    NAMES,
    NAMES,
    st.integers(-5, 5),
)
requests = st.builds(
    lambda asked, prompt_tokens: replace(
        asked, model=MODEL_INFO.name, fingerprint=MODEL_INFO.fingerprint, prompt_tokens=prompt_tokens
    ),
    values_of(ScheduleRequest).map(
        lambda asked: replace(
            asked,
            output_tokens_max=max(1, asked.output_tokens_max),
            block_hashes=b"",
            samples=1,
            attempt=abs(asked.attempt),
            priority=0,
        )
    ),
    st.integers(1, 4000),
)
matches = st.lists(
    st.builds(InstanceMatch, NAMES, st.integers(-2, 300)), max_size=3, unique_by=lambda one: one.instance
)
limits = st.builds(
    PlacementLimits,
    strategy=st.sampled_from(Strategy),
    admission=st.sampled_from(AdmissionMode),
    ttft_ms_default=st.none() | st.just(1000.0),
    tbt_ms_default=st.none() | st.just(50.0),
)


def passed_on(message: LoadSnapshot | Decision, number: int) -> Fold | None:
    """As a conductor takes it in."""
    if isinstance(message, LoadSnapshot):
        return LoadHeard(message, 1, number)
    try:
        return DecisionHeard(checked_decision(message))
    except ProtocolError:
        return None


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.lists(st.tuples(loads | decisions, requests, matches, limits), min_size=1, max_size=4))
def test_nothing_that_is_believed_stops_a_conductor(rounds) -> None:
    view = folded(ClusterView(), Registered(tuple(WORKERS.values())), 0.0, BOOKING_TTL_S)
    for number, (message, asked, held, wanted) in enumerate(rounds, start=1):
        now_s = number / 10
        fold = passed_on(message, number)
        if fold is not None:
            view = folded(view, fold, now_s, BOOKING_TTL_S)
        try:
            request = checked_request(asked)
            told = checked_matches(MatchReply(tuple(held)), request.prompt_tokens // 16)
        except ProtocolError:
            continue
        view = expire(view, now_s, BOOKING_TTL_S)
        decision = place(view, request, told, wanted, now_s)
        assert decode(encode(decision, CONDUCTOR, 1, 1, 0.0))[1] == decision
        placement, rejection = (decision, None) if isinstance(decision, Placement) else (None, decision)
        decided = Decided(request, told, wanted, now_s, 0.0, placement, rejection)
        begun = Begun(1, CONDUCTOR, 1, BOOKING_TTL_S, 0.0)
        lines = [encode_line(Line(now_s, entry)) for entry in (begun, decided)]
        assert [line.entry for line in decode_lines(lines, "recording")] == [begun, decided]
        view = folded(view, decided, now_s, BOOKING_TTL_S)
    # All that was said is taken back: then nothing is left of it.
    for name, record in WORKERS.items():
        quiet = LoadSnapshot(name, record.roles, InstanceState.SERVING, blocks_free=4096)
        view = folded(view, LoadHeard(quiet, 1, 100), 10.0, BOOKING_TTL_S)
    ahead = outlook(expire(view, 10.0, BOOKING_TTL_S), 10.0)
    assert [ahead.load(name) for name in WORKERS] == [DecodeLoad()] * len(WORKERS)
    assert [ahead.backlog(name) for name in WORKERS] == [PrefillBacklog()] * len(WORKERS)
    assert ahead.priority_max == 0
