"""What benchmarks have alike on the command line: which cases, how often, and in which form they answer."""

import argparse
from collections.abc import Sequence

from moonpool.arguments import whole_number
from moonpool.measurement import Measurement, as_json_line, as_table


def add_json_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="one JSON object a line instead of a table")


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


def print_results(results: Sequence[Measurement], *, as_json: bool) -> None:
    if as_json:
        print("\n".join(as_json_line(result) for result in results))
    else:
        print(as_table(results))
