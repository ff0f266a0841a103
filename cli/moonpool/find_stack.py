"""Where the running stack is: by URL, by name, by environment, or the default one.

A flag goes before the environment, also the one that names a local stack; `moonpool up` wrote down where
that is.
"""

import argparse
import os
from collections.abc import Callable
from pathlib import Path

from moonpool.api import API_KEY_VARIABLE, Api
from moonpool.errors import CommandError
from moonpool.run_folder import DEFAULT_NAME, StackState, read_state, run_folder, running_names

URL_VARIABLE = "MOONPOOL_URL"
"""Not a flag: those are in the shell's history and in the list of processes."""
CA_FILE_VARIABLE = "MOONPOOL_CA_FILE"
NATS_VARIABLE = "MOONPOOL_NATS_URL"
ETCD_VARIABLE = "MOONPOOL_ETCD_URL"
TIMEOUT_S_DEFAULT = 120.0


def add_stack_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of a command that asks the gateway."""
    parser.add_argument(
        "--url",
        help=f"the gateway, for example http://127.0.0.1:8000/v1 (or ${URL_VARIABLE}); its API key, where it "
        f"asks for one, is taken from ${API_KEY_VARIABLE}",
    )
    parser.add_argument(
        "--ca-file",
        metavar="FILE",
        help=f"certificates in PEM that an https gateway is trusted by (or ${CA_FILE_VARIABLE})",
    )
    _add_name(parser)


def add_cluster_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of a command that asks the bus and the control plane."""
    parser.add_argument("--nats-url", help=f"the bus (or ${NATS_VARIABLE})")
    add_control_arguments(parser)


def add_control_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of a command that asks the control plane alone."""
    parser.add_argument("--etcd-url", help=f"the control plane (or ${ETCD_VARIABLE})")
    _add_name(parser)


def gateway_api(options: argparse.Namespace, *, timeout_s: float = TIMEOUT_S_DEFAULT) -> Api:
    """The gateway's API, with the key and the certificates that the environment names."""
    ca_file = options.ca_file or os.environ.get(CA_FILE_VARIABLE)
    return Api(
        api_url(options),
        timeout_s,
        key=os.environ.get(API_KEY_VARIABLE, ""),
        ca_file=Path(ca_file) if ca_file else None,
    )


def api_url(options: argparse.Namespace) -> str:
    return _first(options, options.url, URL_VARIABLE, lambda name: _running(name, "--url").url)


def cluster_urls(options: argparse.Namespace) -> tuple[str, str]:
    """URLs of NATS and of etcd."""
    instead = "--nats-url and --etcd-url"
    return (
        _first(options, options.nats_url, NATS_VARIABLE, lambda name: _running(name, instead).nats_url),
        _first(options, options.etcd_url, ETCD_VARIABLE, lambda name: _running(name, instead).etcd_url),
    )


def control_url(options: argparse.Namespace) -> str:
    """URL of etcd."""
    return _first(
        options, options.etcd_url, ETCD_VARIABLE, lambda name: _running(name, "--etcd-url").etcd_url
    )


def _add_name(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--name", help=f"the local stack of this --name (default {DEFAULT_NAME})")


def _first(
    options: argparse.Namespace, flag: str | None, variable: str, of_stack: Callable[[str], str]
) -> str:
    if flag:
        return flag
    if options.name:
        return of_stack(options.name)
    return os.environ.get(variable) or of_stack(DEFAULT_NAME)


def _running(name: str, instead: str) -> StackState:
    state = read_state(run_folder(name))
    if state is None:
        others = ", ".join(running_names())
        what_to_do = f"give --name, one of {others}," if others else "start one with `moonpool up`,"
        raise CommandError(f"no stack named {name!r} runs here; {what_to_do} or give {instead}")
    return state
