"""Ports of this machine: whether one can be listened on, and keeping one for several processes."""

import os
import socket

from moonpool.errors import CommandError


def check_port(host: str, port: int) -> None:
    """CommandError where nobody could listen there."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        with socket.create_server((host, port), family=family):
            return
    except OSError as error:
        # Not strerror: create_server adds the address to it once more.
        reason = os.strerror(error.errno) if error.errno and error.errno > 0 else error.strerror or str(error)
        raise CommandError(
            f"cannot listen on {host} port {port}: {reason}; give another --host or --port"
        ) from error


def hold_port(host: str, port: int) -> socket.socket:
    """A port that several gateways can listen on, kept from others until the socket is closed: it is bound
    and does not listen, so that no connection comes to it. CommandError where it cannot be had."""
    held = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    try:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        held.bind((host, port))
        # Connections of the last run do not matter, but from here on only those who share it may bind it.
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 0)
    except OSError as error:
        held.close()
        raise CommandError(f"cannot hold {host} port {port}: {error.strerror}") from error
    return held
