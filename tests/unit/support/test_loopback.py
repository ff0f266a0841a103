"""The guard around real clients lets this machine through and nothing else."""

import asyncio
import os
import socket

import pytest
from tests.support.loopback import NotLoopbackError, only_loopback

pytestmark = pytest.mark.unit

ELSEWHERE = "192.0.2.1"
"""An address that is nobody's (RFC 5737)."""


def test_this_machine_is_reached() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, only_loopback():
        port = server.getsockname()[1]
        socket.create_connection(("localhost", port), timeout=5).close()
        assert os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] == "True"


def test_no_other_address_is_connected_to() -> None:
    with only_loopback(), socket.socket() as outward, pytest.raises(NotLoopbackError, match=ELSEWHERE):
        outward.connect((ELSEWHERE, 80))


def test_no_other_name_is_looked_up() -> None:
    with only_loopback(), pytest.raises(NotLoopbackError, match=r"example\.invalid"):
        socket.create_connection(("example.invalid", 80), timeout=5)


async def test_an_event_loop_is_held_to_it_too() -> None:
    with only_loopback(), pytest.raises(NotLoopbackError, match=ELSEWHERE):
        await asyncio.open_connection(ELSEWHERE, 80)
