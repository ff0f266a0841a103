"""What requests a simulation is given: those of a trace, or ones made to the statistics of a data set."""

import argparse
from collections.abc import Mapping
from pathlib import Path

from moonpool.arguments import positive, whole_number, words
from moonpool.errors import CommandError, UsageError
from simulator.datasets import RATE_MAX, DatasetName, dataset_requests
from simulator.trace import LINES_MAX, TracedRequest, TraceError, read_trace, without_reuse

DATASET_REQUESTS_DEFAULT = 2_000
RATE_DEFAULT = 1.0
SEED_MAX = 2**63 - 1


def add_workload_arguments(parser: argparse.ArgumentParser, rate: str) -> None:
    """`rate` is the help of `--rate`."""
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--trace", type=Path, metavar="FILE", help="one JSON request a line")
    source.add_argument(
        "--dataset",
        choices=words(DatasetName),
        help="requests by the statistics that the Mooncake paper tells",
    )
    parser.add_argument("--rate", type=positive(RATE_MAX), metavar="R", help=rate)
    parser.add_argument(
        "--requests",
        type=whole_number(1, LINES_MAX),
        metavar="N",
        help=f"of a trace only the first N (default all), of a data set so many "
        f"(default {DATASET_REQUESTS_DEFAULT})",
    )
    parser.add_argument(
        "--no-reuse", action="store_true", help="no block comes twice: as if every prompt were new"
    )
    parser.add_argument(
        "--seed",
        type=whole_number(0, SEED_MAX),
        default=0,
        metavar="S",
        help="names the requests, by which equal instances are told apart, and draws those of a data set "
        "(default 0)",
    )


def read_workload(options: argparse.Namespace) -> list[TracedRequest]:
    """At least one request; a data set's arrive at RATE_DEFAULT where no rate is named. CommandError where a
    trace cannot be used."""
    if options.dataset is not None:
        number = options.requests or DATASET_REQUESTS_DEFAULT
        rate_per_s = options.rate or RATE_DEFAULT
        requests = dataset_requests(DatasetName(options.dataset), number, rate_per_s, options.seed)
    else:
        if options.rate is not None:
            raise UsageError("--rate is for --dataset: a trace has its own times, see --speedup")
        try:
            requests = read_trace(options.trace)[: options.requests]
        except TraceError as error:
            raise CommandError(str(error)) from None
    return without_reuse(requests) if options.no_reuse else requests


def workload_object(options: argparse.Namespace) -> Mapping[str, object]:
    """What `--json` prints of it: one of `trace` and `dataset` is null."""
    return {
        "trace": None if options.trace is None else str(options.trace),
        "dataset": options.dataset,
        "rate": options.rate,
        "reuse": not options.no_reuse,
        "seed": options.seed,
    }


def workload_name(options: argparse.Namespace) -> str:
    return str(options.trace) if options.dataset is None else str(options.dataset)
