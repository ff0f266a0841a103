"""`moonpool config show | set NAME=VALUE… | unset NAME…`: the cluster's configuration, which running services
take over at once.

Each prints what is set then; `--json` as one object:

    {"revision", "settings": {NAME: value, …}, "not_valid": {NAME: why, …},
     "known": {NAME: {"allowed", "meaning"}, …}}

`revision` is that of the control plane, 0 where nothing was ever set; services tell the one that they use as
`moonpool_cluster_config_revision`. What is not set is each process's own setting. `not_valid` are those of
`settings`, put there by other means, for which services pass over all that is set; `known` are all settings
that there are.
"""

import argparse
import asyncio
import json
from collections.abc import Awaitable, Callable, Sequence

from cluster import keys
from cluster.cluster_config import SETTINGS, Document, faults, with_settings, without_settings
from cluster.config import Setting
from cluster.config_watch import change_document, read_document
from cluster.control import ABSENT_REVISION, ControlPlane
from cluster.errors import ConfigError, MoonpoolError, ProtocolError
from moonpool.arguments import Command, CommandGroup, seconds
from moonpool.cluster_client import control_plane
from moonpool.errors import EXIT_OK, CommandError, UsageError
from moonpool.find_stack import add_control_arguments, control_url
from moonpool.table import format_table

TIMEOUT_S_DEFAULT = 5.0
TIMEOUT_S_MAX = 60.0
NOT_SET = "-"
PASSED_OVER = (
    "While a value is not valid, services pass over all of this: the last valid configuration stays."
)

Change = Callable[[ControlPlane], Awaitable[tuple[Document, int]]]
"""What is set afterwards, and its revision."""


def run_show(options: argparse.Namespace) -> int:
    return _run(options, read_document)


def run_set(options: argparse.Namespace) -> int:
    assignments = assignments_of(options.assignments)
    return _run(
        options,
        lambda control: change_document(control, lambda document: with_settings(document, assignments)),
    )


def run_unset(options: argparse.Namespace) -> int:
    names: list[str] = options.names
    if options.all == bool(names):
        raise UsageError("give names of settings, or --all")
    if options.all:
        return _run(options, _unset_all)
    return _run(
        options, lambda control: change_document(control, lambda document: without_settings(document, names))
    )


def assignments_of(arguments: Sequence[str]) -> dict[str, str]:
    """Value texts by name. UsageError where one is no NAME=VALUE, or a name comes twice."""
    assignments: dict[str, str] = {}
    for argument in arguments:
        name, equals, text = argument.partition("=")
        if not (name and equals):
            raise UsageError(f"{argument!r} must have the form NAME=VALUE")
        if name in assignments:
            raise UsageError(f"{name} is given twice")
        assignments[name] = text
    return assignments


def as_table(document: Document) -> str:
    """Every setting there is, and what is set that this version does not know."""
    wrong = faults(document)
    rows = [
        (
            name,
            _shown(document.get(name)),
            _allowed(setting),
            f"not valid: {wrong[name]}" if name in wrong else setting.help,
        )
        for name, setting in SETTINGS.items()
    ]
    unknown = [
        (name, _shown(value), "", "unknown to this version")
        for name, value in document.items()
        if name not in SETTINGS
    ]
    table = format_table(("setting", "value", "allowed", "meaning"), [*rows, *unknown])
    return f"{table}\n{PASSED_OVER}" if wrong else table


def as_object(document: Document, revision: int) -> dict[str, object]:
    """What `--json` prints; its keys are told at the top of this module."""
    return {
        "revision": revision,
        "settings": document,
        "not_valid": faults(document),
        "known": {
            name: {"allowed": _allowed(setting), "meaning": setting.help}
            for name, setting in SETTINGS.items()
        },
    }


def _allowed(setting: Setting) -> str:
    return setting.limits() or ("true or false" if setting.kind is bool else "")


def _run(options: argparse.Namespace, change: Change) -> int:
    document, revision = asyncio.run(_changed(options, change))
    if options.json:
        print(json.dumps(as_object(document, revision)))
    else:
        print(as_table(document))
    return EXIT_OK


async def _changed(options: argparse.Namespace, change: Change) -> tuple[Document, int]:
    async with control_plane(control_url(options), timeout_s=options.timeout) as control:
        try:
            return await change(control)
        except ConfigError as error:
            raise UsageError(str(error)) from error
        except ProtocolError as error:
            raise CommandError(f"{error}; `moonpool config unset --all` clears it") from error
        except MoonpoolError as error:
            raise CommandError(str(error)) from error


async def _unset_all(control: ControlPlane) -> tuple[Document, int]:
    """Also what is no configuration at all: nothing is read."""
    await control.delete(keys.CONFIG)
    return {}, ABSENT_REVISION


def _shown(value: object) -> str:
    return NOT_SET if value is None else value if isinstance(value, str) else json.dumps(value)


def _add_common(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="one JSON object instead of a table")
    parser.add_argument(
        "--timeout",
        type=seconds(TIMEOUT_S_MAX),
        default=TIMEOUT_S_DEFAULT,
        help="what the control plane gets to answer, in seconds (default 5)",
    )
    add_control_arguments(parser)


def _add_set(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("assignments", metavar="NAME=VALUE", nargs="+", help=f"of {', '.join(SETTINGS)}")
    _add_common(parser)


def _add_unset(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("names", metavar="NAME", nargs="*", help="settings that are to be set no more")
    parser.add_argument("--all", action="store_true", help="all of them, and whatever else stands there")
    _add_common(parser)


GROUP = CommandGroup(
    "config",
    "show and change the settings that all services of a running stack share",
    (
        Command("show", "what is set", _add_common, run_show),
        Command("set", "set NAME=VALUE for all services, at once", _add_set, run_set),
        Command("unset", "go back to each process's own setting", _add_unset, run_unset),
    ),
)
