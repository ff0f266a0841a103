"""A small recording made by hand: two requests, of which the second begins like the first."""

from dataclasses import replace
from pathlib import Path

from tests.support.records import worker
from tests.support.simulated_clusters import ROUND_COST
from tests.support.views import request, snapshot

from cluster.folds import Decided, LoadHeard, Registered, folded
from cluster.recording import VERSION, Begun, Ended, Line, encode_line
from kvindex.core import InstanceId
from policy.choice import AdmissionMode, PlacementLimits
from policy.core import CostCoefficients, EndedRequest, Placement, Rejection, RequestId, Role
from policy.place import place
from policy.view import ClusterView, expire

BEGUN_S, UNIX_S = 50.0, 1_000_000.0
BOOKING_TTL_S = 2.0
HASHES = bytes(range(16)) + bytes(range(16, 32)) + bytes(range(32, 48))
OTHER_HASHES = HASHES[:32] + bytes(range(100, 116))
LIMITS = PlacementLimits(admission=AdmissionMode.NONE)
RECORDS = (worker("p-b", Role.PREFILL), worker("d-a", Role.DECODE), worker("p-a", Role.PREFILL))
ASK_LAG_S = 0.002


def load_line(
    at_s: float,
    name: str,
    seq: int,
    cost: CostCoefficients = ROUND_COST,
    ended: tuple[EndedRequest, ...] = (),
    step_s: float = 0.0,
    step_predicted_s: float = 0.0,
) -> Line:
    load = replace(
        snapshot(name, blocks_free=4096, cost=cost),
        ended=ended,
        ended_total=len(ended),
        step_s_total=step_s,
        step_predicted_s_total=step_predicted_s,
    )
    return Line(at_s, LoadHeard(load, 1, seq, 0.001))


def ended(name: str, output_tokens: int | None) -> EndedRequest:
    return EndedRequest(RequestId(name), 0, output_tokens)


def small_recording(*, limits: PlacementLimits = LIMITS) -> list[Line]:
    """Decided by `policy.place` as a conductor would."""
    view = ClusterView()
    lines = [
        Line(BEGUN_S, Begun(VERSION, InstanceId("conductor-1"), 1, BOOKING_TTL_S, UNIX_S)),
        Line(50.1, Registered(RECORDS)),
        *(load_line(50.2, record.instance, 1) for record in RECORDS),
    ]
    for line in lines[1:]:
        view = folded(view, line.entry, line.at_s, BOOKING_TTL_S)
    for at_s, name, hashes in ((51.0, "first", HASHES), (53.5, "second", OTHER_HASHES)):
        asked = request(name, prompt_tokens=50, attempt=0, block_hashes=hashes, ttft_ms_max=1500.0)
        decision = place(expire(view, at_s, BOOKING_TTL_S), asked, (), limits, at_s)
        placement = decision if isinstance(decision, Placement) else None
        rejection = decision if isinstance(decision, Rejection) else None
        decided = Decided(asked, (), limits, at_s - 0.01, ASK_LAG_S, placement, rejection)
        view = folded(view, decided, at_s, BOOKING_TTL_S)
        lines.append(Line(at_s, decided))
    slower = replace(ROUND_COST, prefill_per_token_s=2e-3, first_token_fixed_s=0.02)
    lines += [
        load_line(54.0, "p-a", 2, slower, step_s=3.0, step_predicted_s=2.0),
        load_line(54.3, "p-a", 3, slower, step_s=3.0, step_predicted_s=2.0),
        load_line(54.4, "p-a", 4, slower, step_s=4.0, step_predicted_s=4.0),
        load_line(54.5, "d-a", 2, ended=(ended("first", 7), ended("second", None))),
        Line(55.0, Ended("closed")),
    ]
    return lines


def written(folder: Path, lines: list[Line]) -> Path:
    path = folder / "recording.jsonl"
    path.write_bytes(b"".join(map(encode_line, lines)))
    return path
