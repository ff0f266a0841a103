"""`moonpool simulate decisions`: a recording's decisions made once more, by the same code.

A conductor with a `record_folder` (MOONPOOL_RECORD_FOLDER) writes down all that its decisions are made from.
Without further flags each of them must come out as it did, to the last digit: the exit status is 1 where one
does not. With `--policy` or `--admission` it is told what those would have decided, each time in the cluster
as it was.

`--json` prints one object:

    {"recording": path, "instance": of the conductor, "complete": false where it was cut off,
     "end": why it ended or null, "span_s", "policy", "admission": null where as recorded,
     "decisions", "placed", "rejected", "identical", "different",
     "elsewhere": different ones that also are placed otherwise,
     "differences": a few of them, those elsewhere first,
                    [{"at_s", "request_id", "attempt", "recorded": D, "remade": D}, …]}

`D` is a placement or a rejection as on the bus.
"""

import argparse
import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from cluster.recording import Begun, Ended, Line, RecordingError, read_recording
from moonpool.arguments import Command, words
from moonpool.errors import EXIT_FAILURE, EXIT_OK, CommandError
from moonpool.table import format_table
from policy.choice import AdmissionMode, PlacementLimits, Strategy
from policy.core import Placement, Rejection
from simulator.recorded_decisions import RemadeDecision, remade_decisions

DIFFERENCES_SHOWN_MAX = 5


@dataclass(slots=True)
class Tally:
    """What was found so far."""

    instance: str = ""
    begun_s: float = 0.0
    last_s: float = 0.0
    end: str | None = None
    decisions: int = 0
    placed: int = 0
    """As recorded."""
    identical: int = 0
    elsewhere: int = 0
    first_elsewhere: list[RemadeDecision] = field(default_factory=list)
    first_in_place: list[RemadeDecision] = field(default_factory=list)
    """Different ones that are placed as they were."""

    @property
    def differences(self) -> list[RemadeDecision]:
        """Those that are shown."""
        return [*self.first_elsewhere, *self.first_in_place][:DIFFERENCES_SHOWN_MAX]

    def see(self, line: Line) -> None:
        self.last_s = line.at_s
        if isinstance(line.entry, Begun):
            self.instance, self.begun_s = line.entry.instance, line.at_s
        elif isinstance(line.entry, Ended):
            self.end = line.entry.reason

    def add(self, made: RemadeDecision) -> None:
        self.decisions += 1
        self.placed += isinstance(made.recorded, Placement)
        self.identical += made.identical
        self.elsewhere += not made.same_place
        if not made.identical:
            alike = self.first_in_place if made.same_place else self.first_elsewhere
            if len(alike) < DIFFERENCES_SHOWN_MAX:
                alike.append(made)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="one JSON object instead of a table")
    parser.add_argument("--recording", type=Path, required=True, metavar="FILE", help="of one conductor")
    parser.add_argument("--policy", choices=words(Strategy), help="another than the recorded one")
    parser.add_argument("--admission", choices=words(AdmissionMode), help="another than the recorded one")


def run(options: argparse.Namespace) -> int:
    tally = Tally()
    try:
        lines = _seen(read_recording(options.recording), tally)
        for made in remade_decisions(lines, _limits_of(options)):
            tally.add(made)
    except RecordingError as error:
        raise CommandError(str(error)) from None
    print(json.dumps(as_object(options, tally)) if options.json else as_text(tally))
    as_recorded = options.policy is None and options.admission is None
    return EXIT_FAILURE if as_recorded and tally.identical < tally.decisions else EXIT_OK


def as_object(options: argparse.Namespace, tally: Tally) -> dict[str, object]:
    """What `--json` prints; its keys are told at the top of this module."""
    return {
        "recording": str(options.recording),
        "instance": tally.instance,
        "complete": tally.end is not None,
        "end": tally.end,
        "span_s": tally.last_s - tally.begun_s,
        "policy": options.policy,
        "admission": options.admission,
        "decisions": tally.decisions,
        "placed": tally.placed,
        "rejected": tally.decisions - tally.placed,
        "identical": tally.identical,
        "different": tally.decisions - tally.identical,
        "elsewhere": tally.elsewhere,
        "differences": [
            {
                "at_s": made.at_s,
                "request_id": made.recorded.request_id,
                "attempt": made.recorded.attempt,
                "recorded": asdict(made.recorded),
                "remade": asdict(made.remade),
            }
            for made in tally.differences
        ],
    }


def as_text(tally: Tally) -> str:
    table = format_table(
        ("measure", "value"),
        [
            ("recorded by", f"{tally.instance}, {tally.last_s - tally.begun_s:.1f} s"),
            ("ended", "cut off" if tally.end is None else tally.end),
            ("decisions", f"{tally.decisions}, {tally.placed} placed"),
            ("identical", str(tally.identical)),
            ("different", f"{tally.decisions - tally.identical}, {tally.elsewhere} of them elsewhere"),
        ],
    )
    shown = [
        f"{made.at_s:.3f} s {made.recorded.request_id}: {_told_change(made)}" for made in tally.differences
    ]
    return "\n".join([table, *shown])


def _seen(lines: Iterable[Line], tally: Tally) -> Iterator[Line]:
    for line in lines:
        tally.see(line)
        yield line


def _limits_of(options: argparse.Namespace) -> Callable[[PlacementLimits], PlacementLimits]:
    policy = None if options.policy is None else Strategy(options.policy)
    admission = None if options.admission is None else AdmissionMode(options.admission)

    def limits_of(recorded: PlacementLimits) -> PlacementLimits:
        return replace(
            recorded, strategy=policy or recorded.strategy, admission=admission or recorded.admission
        )

    return limits_of


def _told_change(made: RemadeDecision) -> str:
    if not made.same_place:
        return f"{_told(made.recorded)}; now {_told(made.remade)}"
    recorded, remade = asdict(made.recorded), asdict(made.remade)
    changed = [
        f"{name} {recorded[name]}, now {remade[name]}" for name in recorded if recorded[name] != remade[name]
    ]
    return f"{_told(made.recorded)}: not elsewhere, but {'; '.join(changed)}"


def _told(decision: Placement | Rejection) -> str:
    if isinstance(decision, Rejection):
        return f"rejected, {decision.reason}"
    source = f" with {decision.prefix_blocks} blocks of {decision.source}" if decision.source else ""
    return f"{decision.prefill} and {decision.decode}{source}, TTFT {decision.predicted_ttft_ms:.1f} ms"


COMMAND = Command(
    "decisions", "a recording's decisions made once more, or by another policy", add_arguments, run
)
