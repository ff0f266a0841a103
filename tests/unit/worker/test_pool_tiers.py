"""What the settings of the tiers come to, and what of them is refused."""

from pathlib import Path

import pytest

from cluster.errors import ConfigError
from cluster.logs import Level, Logger
from engine.layout import KVLayout
from kvindex.core import Tier
from kvpool import Arena, BlockPool, BlockStore
from worker.config import WorkerConfig
from worker.pool_tiers import TierSizes, open_tiers, ssd_identity, tier_sizes

pytestmark = pytest.mark.unit

BLOCK_BYTES = 1 << 17
LAYOUT = KVLayout(2, 2, 16, 8, "float32")


def config(**settings: object) -> WorkerConfig:
    return WorkerConfig(**{"pool_bytes": 4 << 20, **settings})


def opened(config: WorkerConfig, own_cache: bool = False) -> tuple[BlockPool, dict[Tier, BlockStore]]:
    sizes = tier_sizes(config, BLOCK_BYTES, own_cache)
    arena = Arena.create(sizes.arena_blocks, BLOCK_BYTES)
    return open_tiers(config, sizes, arena, b"identity", Logger(Level.ERROR))


def test_a_cpu_computes_on_all_of_its_dram() -> None:
    assert tier_sizes(config(), BLOCK_BYTES, own_cache=False) == TierSizes(Tier.DRAM, 32, 0)


def test_a_cache_of_its_own_has_its_mirror_in_dram_and_what_is_left_is_a_tier() -> None:
    assert tier_sizes(config(), BLOCK_BYTES, own_cache=True) == TierSizes(Tier.DEVICE, 32, 0)
    sizes = tier_sizes(config(device_bytes=(2 << 20) + 7), BLOCK_BYTES, own_cache=True)
    assert sizes == TierSizes(Tier.DEVICE, 16, 16)
    assert sizes.arena_blocks == 32


@pytest.mark.parametrize("own_cache", [False, True])
def test_a_pool_without_room_for_the_blocks_of_a_profile_is_refused(own_cache: bool) -> None:
    """Else the instance would end in the middle of its start."""
    least = 16 * BLOCK_BYTES
    assert tier_sizes(config(pool_bytes=least), BLOCK_BYTES, own_cache).compute_blocks == 16
    with pytest.raises(ConfigError, match=f"pool_bytes is {least - 1}, must be at least 16 blocks, {least}"):
        tier_sizes(config(pool_bytes=least - 1), BLOCK_BYTES, own_cache)


@pytest.mark.parametrize(
    ("device_bytes", "own_cache", "words"),
    [
        (1 << 20, False, "device_bytes must be 0"),
        ((2 << 20) - 1, True, "device_bytes is 2097151, must be at least 16 blocks, 2097152"),
        (8 << 20, True, "device_bytes is 8388608, must be at most pool_bytes, 4194304"),
    ],
)
def test_a_device_that_does_not_fit_is_refused(device_bytes: int, own_cache: bool, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        tier_sizes(config(device_bytes=device_bytes), BLOCK_BYTES, own_cache)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"ssd_bytes": 1, "ssd_folder": "FOLDER", "instance": "a"}, "ssd_bytes: .*at least"),
        ({"ssd_bytes": 1 << 20, "instance": "a"}, "ssd_folder is not set"),
        ({"ssd_bytes": 1 << 20, "ssd_folder": "FOLDER"}, "instance is not set"),
        ({"ssd_folder": "FOLDER"}, "ssd_folder is set, so ssd_bytes"),
        ({"ssd_bytes": 1 << 20, "ssd_folder": "/dev/null", "instance": "a"}, "ssd_folder: .*/dev/null"),
    ],
)
def test_settings_of_the_ssd_that_make_no_store_are_refused(
    tmp_path: Path, settings: dict[str, object], words: str
) -> None:
    if settings.get("ssd_folder") == "FOLDER":
        settings = {**settings, "ssd_folder": str(tmp_path)}
    with pytest.raises(ConfigError, match=words):
        opened(config(**settings))


def test_two_processes_of_one_name_do_not_share_a_store(tmp_path: Path) -> None:
    settings = config(ssd_bytes=4 << 20, ssd_folder=str(tmp_path), instance="a")
    _, stores = opened(settings)
    with pytest.raises(ConfigError, match="ssd_folder: "):
        opened(settings)
    stores[Tier.SSD].close()
    _, stores = opened(settings)
    stores[Tier.SSD].close()


def test_every_tier_has_its_store_and_its_place_in_the_pool(tmp_path: Path) -> None:
    settings = config(device_bytes=2 << 20, ssd_bytes=4 << 20, ssd_folder=str(tmp_path), instance="a")
    pool, stores = opened(settings, own_cache=True)
    assert [*stores] == [Tier.DRAM, Tier.SSD]
    assert pool.stats().blocks == 16
    assert [(use.tier, use.blocks) for use in pool.stats().tiers] == [
        (Tier.DRAM, 16),
        (Tier.SSD, stores[Tier.SSD].slots),
    ]
    assert 0 < stores[Tier.SSD].slots * BLOCK_BYTES <= 4 << 20
    stores[Tier.SSD].close()


def test_blocks_on_an_ssd_are_the_same_only_in_one_cluster_for_one_model_in_one_layout() -> None:
    identities = {
        ssd_identity(b"seed", "model", LAYOUT),
        ssd_identity(b"other", "model", LAYOUT),
        ssd_identity(b"seed", "other", LAYOUT),
        ssd_identity(b"seed", "model", KVLayout(1, 4, 16, 8, "float32")),
        ssd_identity(b"seed", "model", KVLayout(2, 2, 16, 8, "float16")),
    }
    assert len(identities) == 5
    assert ssd_identity(b"seed", "model", LAYOUT) in identities
