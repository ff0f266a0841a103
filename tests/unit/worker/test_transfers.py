"""A worker's settings of transfers, and its counters as metrics."""

import os
from dataclasses import replace
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from cluster.errors import ConfigError
from cluster.logs import Level, Logger
from kvtransfer import TransferCounters, TransportKind
from worker.config import WorkerConfig
from worker.transfers import TransferCollector, start_endpoint, transfer_endpoint

pytestmark = pytest.mark.unit

CONFIG = WorkerConfig(cluster_secret="a secret of this cluster")


@pytest.mark.parametrize(
    ("setting", "value", "text"),
    [
        (
            "transfer_transports",
            ("tcp", "pigeon"),
            "transfer_transports: 'pigeon' is not one of rdma, shm, tcp",
        ),
        ("transfer_transports", ("tcp", "tcp"), "transfer_transports must name at least one"),
        ("transfer_transports", (), "transfer_transports must name at least one"),
        ("shm_folder", "/no/such/folder", "shm_folder: /no/such/folder is not a folder"),
    ],
)
def test_wrong_settings_are_named(setting: str, value: object, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        transfer_endpoint("w", replace(CONFIG, **{setting: value}))


async def test_a_machine_that_has_none_of_the_transports() -> None:
    config = replace(CONFIG, transfer_transports=("rdma",), rdma_devices=("no_such_device",))
    with pytest.raises(ConfigError, match="transfer_transports: rdma: "):
        await start_endpoint(transfer_endpoint("w", config), Logger(Level.ERROR))


async def test_a_setting_that_a_transport_cannot_use_is_named(tmp_path: Path) -> None:
    folder = tmp_path / ("long" * 30)
    folder.mkdir()
    config = replace(CONFIG, transfer_transports=("shm",), shm_folder=str(folder))
    with pytest.raises(ConfigError, match=r"shm_folder: .* has over"):
        await start_endpoint(transfer_endpoint("w", config), Logger(Level.ERROR))


async def test_the_endpoint_has_what_the_settings_say(tmp_path: Path) -> None:
    config = replace(CONFIG, transfer_transports=("tcp", "shm"), shm_folder=str(tmp_path))
    endpoint = transfer_endpoint("w", config)
    await start_endpoint(endpoint, Logger(Level.ERROR))
    try:
        assert len(os.listdir(tmp_path)) == 1
        assert endpoint.descriptor().index('"tcp"') < endpoint.descriptor().index('"shm"')
    finally:
        await endpoint.close()
    assert os.listdir(tmp_path) == []


def test_counters_of_each_transport_are_metrics() -> None:
    counted = {
        TransportKind.SHM: TransferCounters(
            writes=2, written_bytes=300, reads=1, read_bytes=50, transfer_s=1.5
        ),
        TransportKind.TCP: TransferCounters(failures=4),
    }
    registry = CollectorRegistry()
    registry.register(TransferCollector(lambda: counted))
    text = generate_latest(registry).decode()
    for line in (
        'moonpool_transfer_bytes_total{direction="write",transport="shm"} 300.0',
        'moonpool_transfer_bytes_total{direction="read",transport="shm"} 50.0',
        'moonpool_transfer_calls_total{result="done",transport="shm"} 3.0',
        'moonpool_transfer_calls_total{result="failed",transport="tcp"} 4.0',
        'moonpool_transfer_seconds_total{transport="shm"} 1.5',
    ):
        assert line in text
