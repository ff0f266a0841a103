"""Real servers for tests: one NATS and one etcd per test session, started when first asked for.

A test that ends or pauses a server starts one of its own with `moonpool.servers`.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest

from moonpool.servers import ServerProcess, etcd_server, nats_server


@pytest.fixture(scope="session")
def nats(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with nats_server(tmp_path_factory.mktemp("nats")) as server:
        yield server


@pytest.fixture(scope="session")
def etcd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with etcd_server(tmp_path_factory.mktemp("etcd")) as server:
        yield server


@pytest.fixture
def own_nats(tmp_path: Path) -> Iterator[ServerProcess]:
    """A NATS that the test may end."""
    with nats_server(tmp_path) as server:
        yield server


@pytest.fixture
def own_etcd(tmp_path: Path) -> Iterator[ServerProcess]:
    """An etcd that the test may end."""
    with etcd_server(tmp_path) as server:
        yield server
