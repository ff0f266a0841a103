"""`moonpool simulate recording`: a recorded live run in the simulator, beside what came of it.

The recording is a conductor's (`record_folder`). It gives arrivals, lengths and prefixes, the instances, and
the costs that they announced while they ran. With `--replay`, what `moonpool replay --json --per-request`
printed of the same run is laid beside it: of the requests that it sent. Until a gateway has read a request
and asks for a place, nothing is simulated: that time of each is measured, by the clocks of both. What no
message tells, the settings of the workers, is taken to be their defaults unless a flag says otherwise.

`--json` prints one object:

    {"recording": path, "replay": path or null, "requests", "replayed": of these sent by the replay, null
     without one, "compared": of these served, by both, "unended": whose answer's length is not known,
     "prefill", "decode", "coupled": instances, "message_ms", "gateway_ms": the median until a place was asked
     for, "simulated": R, "live": R or null, "ttft_ratio": {"p50", "p90"} or null}

`R` is {"served", "ttft_ms": {"n", "p50", "p90", "p99", "max"}, "cached_tokens"}: `served` of all, or of the
replayed ones, the others of the compared ones; a ratio is simulated by live.
"""

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

import msgspec

from cluster.recording import RecordingError, read_recording
from moonpool.arguments import Command, whole_number
from moonpool.errors import EXIT_OK, CommandError
from moonpool.replay.records import Outcome
from moonpool.replay.statistics import Spread, spread_of
from moonpool.table import format_table
from simulator.cluster import simulate_cluster
from simulator.recorded_run import RecordedRun, RunError, WorkerLimits, recorded_run
from simulator.results import RequestResult, Served
from simulator.setup import SetupError

DEFAULTS = WorkerLimits()
STEP_TOKENS_MAX = 65_536
REQUESTS_MAX = 65_536
SERVED = Outcome.SERVED.value
CLOCK_TOLERANCE_S = 0.5
"""How far the clock of who replayed may be off the gateway's."""


class ReplayedRequest(msgspec.Struct):
    """What is read of one of `per_request` of `moonpool replay --json`."""

    sent_s: float
    outcome: str
    ttft_s: float | None
    cached_tokens: int | None


class Replayed(msgspec.Struct):
    began_unix_s: float
    span_s: float
    per_request: tuple[ReplayedRequest, ...]


@dataclass(frozen=True, slots=True)
class Side:
    """One of the two that are compared."""

    served: int
    """Also those that the other one did not serve; all else is of those that are compared."""
    ttft_s: Spread | None
    cached_tokens: int


@dataclass(frozen=True, slots=True)
class Comparison:
    requests: int
    replayed: int | None
    compared: int
    """Served by both."""
    gateway_s: float
    """From a client's sending until the gateway asks for a place: the median."""
    simulated: Side
    live: Side | None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    requests = whole_number(1, REQUESTS_MAX)
    parser.add_argument("--json", action="store_true", help="one JSON object instead of a table")
    parser.add_argument("--recording", type=Path, required=True, metavar="FILE", help="of one conductor")
    parser.add_argument("--replay", type=Path, metavar="FILE", help="what replay printed of the same run")
    parser.add_argument(
        "--step-tokens",
        type=whole_number(1, STEP_TOKENS_MAX),
        default=DEFAULTS.step_tokens_max,
        metavar="N",
        help=f"the workers' step_tokens_max (default {DEFAULTS.step_tokens_max})",
    )
    parser.add_argument(
        "--batch-requests",
        type=requests,
        default=DEFAULTS.batch_requests_max,
        metavar="N",
        help=f"the workers' batch_requests_max (default {DEFAULTS.batch_requests_max})",
    )
    parser.add_argument(
        "--prefill-requests",
        type=requests,
        default=DEFAULTS.prefill_requests_max,
        metavar="N",
        help=f"the workers' prefill_requests_max (default {DEFAULTS.prefill_requests_max})",
    )


def run(options: argparse.Namespace) -> int:
    limits = WorkerLimits(
        step_tokens_max=options.step_tokens,
        batch_requests_max=options.batch_requests,
        prefill_requests_max=options.prefill_requests,
    )
    try:
        recorded = recorded_run(read_recording(options.recording), limits)
        replayed = None if options.replay is None else read_replay(options.replay)
        simulated = simulate_cluster([request.traced for request in recorded.requests], recorded.setup)
    except RecordingError as error:
        raise CommandError(str(error)) from None
    except (RunError, SetupError) as error:
        raise CommandError(f"{options.recording}: {error}") from None
    compared = compare(recorded, simulated.results, replayed)
    print(
        json.dumps(as_object(options, recorded, compared)) if options.json else as_table(recorded, compared)
    )
    return EXIT_OK


def read_replay(path: Path) -> Replayed:
    """CommandError where it is not what `moonpool replay` prints."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=Replayed)
    except msgspec.DecodeError as error:
        raise CommandError(
            f"{path}: {error}; it must be what `moonpool replay --json --per-request` printed"
        ) from None


def compare(
    recorded: RecordedRun, results: tuple[RequestResult, ...], replayed: Replayed | None
) -> Comparison:
    """CommandError where the replay's requests are not those of the recording."""
    if replayed is None:
        served = [(one.served, 0.0) for one in results if one.served is not None]
        return Comparison(len(results), None, len(served), 0.0, _simulated(len(served), served), None)
    begun_s = replayed.began_unix_s - CLOCK_TOLERANCE_S
    ended_s = replayed.began_unix_s + replayed.span_s + CLOCK_TOLERANCE_S
    pairs = zip(recorded.requests, results, strict=True)
    within = [pair for pair in pairs if begun_s <= pair[0].asked_unix_s <= ended_s]
    if len(within) != len(replayed.per_request):
        raise CommandError(
            f"replay: {len(replayed.per_request)} requests sent; of its time the recording has {len(within)}"
        )
    # No name is common to both: they are paired in their order, so one that overtook another takes its place.
    sent = sorted(replayed.per_request, key=lambda one: one.sent_s)
    waits_s = [
        max(0.0, request.asked_unix_s - replayed.began_unix_s - one.sent_s)
        for (request, _), one in zip(within, sent, strict=True)
    ]
    both = [
        (result.served, wait_s, one)
        for (_, result), wait_s, one in zip(within, waits_s, sent, strict=True)
        if result.served is not None and one.outcome == SERVED
    ]
    return Comparison(
        len(results),
        len(within),
        len(both),
        median(waits_s) if waits_s else 0.0,
        _simulated(
            sum(result.served is not None for _, result in within),
            [(served, wait_s) for served, wait_s, _ in both],
        ),
        _live(sum(one.outcome == SERVED for one in sent), [one for _, _, one in both]),
    )


def as_object(options: argparse.Namespace, recorded: RecordedRun, compared: Comparison) -> dict[str, object]:
    """What `--json` prints; its keys are told at the top of this module."""
    setup = recorded.setup
    ratios = _ratios(compared)
    return {
        "recording": str(options.recording),
        "replay": options.replay and str(options.replay),
        "requests": compared.requests,
        "replayed": compared.replayed,
        "compared": compared.compared,
        "unended": sum(not request.ended for request in recorded.requests),
        "prefill": setup.prefill,
        "decode": setup.decode,
        "coupled": setup.coupled,
        "message_ms": setup.message_s * 1e3,
        "gateway_ms": compared.gateway_s * 1e3,
        "simulated": _side_object(compared.simulated),
        "live": compared.live and _side_object(compared.live),
        "ttft_ratio": ratios and dict(zip(("p50", "p90"), ratios, strict=True)),
    }


def as_table(recorded: RecordedRun, compared: Comparison) -> str:
    setup = recorded.setup
    facts = [
        ("instances", f"{setup.prefill} prefill, {setup.decode} decode, {setup.coupled} coupled"),
        *_request_rows(compared),
        ("a message", f"{setup.message_s * 1e3:.2f} ms"),
        ("at the gateway", f"{compared.gateway_s * 1e3:.2f} ms"),
        ("TTFT ms simulated", _told(compared.simulated)),
    ]
    ratios = _ratios(compared)
    if compared.live is not None:
        facts.append(("TTFT ms live", _told(compared.live)))
    if ratios is not None:
        facts.append(("simulated by live", f"p50 {ratios[0]:.2f}, p90 {ratios[1]:.2f}"))
    return format_table(("measure", "value"), facts)


def _request_rows(compared: Comparison) -> list[tuple[str, str]]:
    """How many there are, were served, and are behind the times that are shown."""
    simulated = compared.simulated.served
    if compared.live is None:
        return [("requests", str(compared.requests)), ("served simulated", str(simulated))]
    live = compared.live.served
    only_live, only_simulated = live - compared.compared, simulated - compared.compared
    left_out = f"; not the same were served: {only_live} only live, {only_simulated} only simulated"
    return [
        ("requests", f"{compared.requests}, {compared.replayed} of them replayed"),
        ("served live / simulated", f"{live} / {simulated}"),
        ("compared", f"{compared.compared} served by both{left_out if only_live or only_simulated else ''}"),
    ]


def _simulated(served: int, compared: Sequence[tuple[Served, float]]) -> Side:
    """Each with how long it was at the gateway before."""
    return Side(
        served,
        spread_of([one.ttft_s + wait_s for one, wait_s in compared]),
        sum(one.cached_tokens for one, _ in compared),
    )


def _live(served: int, compared: Sequence[ReplayedRequest]) -> Side:
    return Side(
        served,
        spread_of([one.ttft_s for one in compared if one.ttft_s is not None]),
        sum(one.cached_tokens or 0 for one in compared),
    )


def _ratios(compared: Comparison) -> tuple[float, float] | None:
    live = None if compared.live is None else compared.live.ttft_s
    simulated = compared.simulated.ttft_s
    if live is None or simulated is None:
        return None
    return simulated.p50 / live.p50, simulated.p90 / live.p90


def _side_object(side: Side) -> dict[str, object]:
    spread = side.ttft_s
    ttft_ms = spread and {
        name: value if name == "n" else value * 1e3 for name, value in asdict(spread).items()
    }
    return {"served": side.served, "ttft_ms": ttft_ms, "cached_tokens": side.cached_tokens}


def _told(side: Side) -> str:
    spread = side.ttft_s
    if spread is None:
        return "-"
    values = (("p50", spread.p50), ("p90", spread.p90), ("p99", spread.p99), ("max", spread.max))
    return ", ".join(f"{name} {value * 1e3:.1f}" for name, value in values)


COMMAND = Command(
    "recording", "a recorded live run, simulated and beside what came of it", add_arguments, run
)
