"""Real clients in tests may talk to this machine only: whatever else they look for is an error, and seen.

Clients fetch price lists and tokenizers, and report what they are used for, if they are let.
"""

import ipaddress
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

QUIET = {
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "LANGSMITH_TRACING": "false",
    "LANGCHAIN_TRACING_V2": "false",
    "NO_PROXY": "127.0.0.1,localhost,::1",
    "no_proxy": "127.0.0.1,localhost,::1",
}
"""Environment with which these clients ask for nothing beside the API, and go to it straight."""


class NotLoopbackError(AssertionError):
    """A client wanted to go elsewhere."""


@contextmanager
def only_loopback() -> Iterator[None]:
    """Within, no socket of this process connects to anything but this machine, and no other name is looked
    up. What goes past Python's own sockets is not seen."""
    with (
        mock.patch.dict("os.environ", QUIET),
        mock.patch.object(socket.socket, "connect", _checked(socket.socket.connect)),
        mock.patch.object(socket.socket, "connect_ex", _checked(socket.socket.connect_ex)),
        mock.patch.object(socket, "getaddrinfo", _checked_lookup(socket.getaddrinfo)),
    ):
        yield


def _checked(connect: Any) -> Any:
    def connect_here(connecting: socket.socket, address: Any) -> Any:
        if connecting.family != socket.AF_UNIX:
            _check(address[0])
        return connect(connecting, address)

    return connect_here


def _checked_lookup(getaddrinfo: Any) -> Any:
    def look_up_here(host: Any, *arguments: Any, **named: Any) -> Any:
        if host is not None:
            _check(host)
        return getaddrinfo(host, *arguments, **named)

    return look_up_here


def _check(host: str | bytes) -> None:
    name = host.decode() if isinstance(host, bytes) else host
    try:
        here = ipaddress.ip_address(name).is_loopback
    except ValueError:
        here = name == "localhost"
    if not here:
        raise NotLoopbackError(f"a client wanted to reach {name!r}")
