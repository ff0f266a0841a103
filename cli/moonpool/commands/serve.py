"""`moonpool serve ROLE [flags]`: one service in this process, with the service's own flags."""

import argparse
import runpy
import sys

from moonpool.arguments import Command
from moonpool.errors import EXIT_OK
from moonpool.roles import SERVICE_OF_ROLE


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("role", choices=sorted(SERVICE_OF_ROLE), help="what to serve")
    parser.add_argument(
        "flags",
        nargs=argparse.REMAINDER,
        help="flags of the service itself; moonpool serve ROLE --help lists them",
    )


def run(options: argparse.Namespace) -> int:
    module, *implied = SERVICE_OF_ROLE[options.role]
    sys.argv = [f"moonpool serve {options.role}", *implied, *options.flags]
    # The same as `python -m MODULE`, so that there is one way in.
    runpy.run_module(module, run_name="__main__")
    return EXIT_OK


COMMAND = Command("serve", "run one service in this process", add_arguments, run)
