"""What benchmarks have alike on the command line: which cases, how often, and in which form they answer."""

import argparse
import sys
from collections.abc import Iterable, Sequence

from moonpool.arguments import whole_number
from moonpool.measurement import Measurement, as_json_line, as_table

THREADS_MAX = 1024


def add_json_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="one JSON object a line instead of a table")


def add_engine_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default="smollm2", help="smollm2 (default), tiny, or a model's folder")
    parser.add_argument(
        "--threads",
        type=whole_number(1, THREADS_MAX),
        default=2,
        metavar="N",
        help="threads the engine computes with (default 2)",
    )
    parser.add_argument("--backend", choices=("torch", "native"), help="default: what a worker would take")


def add_case_arguments(parser: argparse.ArgumentParser, case_names: Sequence[str], repeats_max: int) -> None:
    parser.add_argument(
        "--case",
        dest="cases",
        action="append",
        choices=case_names,
        help="only this case; may be repeated (default: all)",
    )
    parser.add_argument(
        "--repeats",
        type=whole_number(1, repeats_max),
        default=5,
        metavar="N",
        help="samples of each case (default 5)",
    )


def say(text: str) -> None:
    """Progress, which is no result."""
    print(text, file=sys.stderr, flush=True)


def print_results(results: Sequence[Measurement], *, as_json: bool) -> None:
    if as_json:
        print("\n".join(as_json_line(result) for result in results))
    else:
        print(as_table(results))


def add_number_arguments(
    parser: argparse.ArgumentParser, rows: Iterable[tuple[str, int, int, int, str]]
) -> None:
    """A flag for each (flag, least, most, default, what it says)."""
    for flag, least, most, default, text in rows:
        parser.add_argument(
            flag,
            type=whole_number(least, most),
            default=default,
            metavar="N",
            help=f"{text} (default {default})",
        )
