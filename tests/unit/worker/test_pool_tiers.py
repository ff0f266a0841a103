"""What the settings of the tiers come to, and what of them is refused."""

import pytest

from cluster.errors import ConfigError
from engine.layout import KVLayout
from kvindex.core import Tier
from worker.config import WorkerConfig
from worker.pool_tiers import TierSizes, ssd_identity, tier_sizes

pytestmark = pytest.mark.unit

BLOCK_BYTES = 1 << 19
LAYOUT = KVLayout(2, 2, 16, 8, "float32")


def config(**settings: object) -> WorkerConfig:
    return WorkerConfig(**{"pool_bytes": 4 << 20, **settings})


def test_a_cpu_computes_on_all_of_its_dram() -> None:
    assert tier_sizes(config(), BLOCK_BYTES, own_cache=False) == TierSizes(Tier.DRAM, 8, 0, 0)


def test_a_cache_of_its_own_has_its_mirror_in_dram_and_what_is_left_is_a_tier() -> None:
    assert tier_sizes(config(), BLOCK_BYTES, own_cache=True) == TierSizes(Tier.DEVICE, 8, 0, 0)
    sizes = tier_sizes(config(device_bytes=(1 << 20) + 7), BLOCK_BYTES, own_cache=True)
    assert sizes == TierSizes(Tier.DEVICE, 2, 6, 0)
    assert sizes.arena_blocks == 8


@pytest.mark.parametrize(
    ("settings", "own_cache", "words"),
    [
        ({"device_bytes": 1 << 20}, False, "device_bytes must be 0"),
        ({"device_bytes": 1}, True, "device_bytes is 1, must be at least"),
        ({"device_bytes": 8 << 20}, True, "device_bytes is 8388608, must be at most pool_bytes, 4194304"),
        ({"ssd_bytes": 1, "ssd_folder": "/x", "instance": "a"}, False, "ssd_bytes is 1, must be at least"),
        ({"ssd_bytes": 1 << 20, "instance": "a"}, False, "ssd_folder is not set"),
        ({"ssd_bytes": 1 << 20, "ssd_folder": "/x"}, False, "instance is not set"),
        ({"ssd_folder": "/x"}, False, "ssd_folder is set but ssd_bytes is 0"),
    ],
)
def test_sizes_that_do_not_go_together_are_refused_by_name(
    settings: dict[str, object], own_cache: bool, words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        tier_sizes(config(**settings), BLOCK_BYTES, own_cache)


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
