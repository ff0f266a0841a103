"""What is told of a tier whose disk fails."""

import pytest
from prometheus_client import CollectorRegistry
from tests.support.tier_world import TierWorld, chain

from kvindex.core import Tier
from worker.pool_metrics import PoolCollector, check_asked, pool_report

pytestmark = pytest.mark.unit


def failures(registry: CollectorRegistry, what: str) -> float | None:
    return registry.get_sample_value("moonpool_tier_failures_total", {"tier": "ssd", "what": what})


def tier_told(world: TierWorld) -> dict[str, object]:
    (tier,) = pool_report(world.pool, world.mover.counters, block_bytes=256, read_pins=0)["tiers"]
    return tier


async def test_a_disk_that_takes_no_writes_is_seen_until_it_does():
    async with TierWorld(blocks=6) as world:
        registry = CollectorRegistry()
        registry.register(PoolCollector(world.pool, world.mover.counters))
        world.ssd.fails_write = lambda slot: True
        world.start()
        world.keep(chain("a", 6))
        counted = world.mover.counters.tiers[Tier.SSD]
        await world.until(lambda: counted.backing_off)
        assert registry.get_sample_value("moonpool_tier_backing_off", {"tier": "ssd"}) == 1
        assert failures(registry, "write") == 4
        told = tier_told(world)
        assert (told["backing_off"], told["write_failed_total"]) == (True, 4)
        world.ssd.fails_write = lambda slot: False
        world.keep(chain("a", 6))
        await world.until(lambda: counted.sunk_blocks == 6)
        assert registry.get_sample_value("moonpool_tier_backing_off", {"tier": "ssd"}) == 0
        assert tier_told(world)["backing_off"] is False


async def test_slots_that_could_not_be_erased_are_counted():
    async with TierWorld() as world:
        registry = CollectorRegistry()
        registry.register(PoolCollector(world.pool, world.mover.counters))
        await world.sink(chain("a", 2))
        world.ssd.fails_erase = lambda slot: True
        world.ssd.corrupt(0)
        world.pool.release(await world.mover.rise(chain("a", 2), 10.0))
        world.start()
        await world.until(lambda: failures(registry, "erase"))
        told = tier_told(world)
        assert (told["corrupt_total"], told["erase_failed_total"] > 0) == (1, True)


def test_a_check_is_asked_for_in_one_way():
    assert check_asked([("check", "1")])
    assert not check_asked([])


@pytest.mark.parametrize(
    ("query", "said"),
    [
        ([("check", "yes")], "check: 'yes', must be 1"),
        ([("check", "1"), ("check", "")], "check: '', must be 1"),
        ([("check", "1"), ("chek", "1")], "chek: unknown"),
    ],
)
def test_what_else_is_asked_is_refused_by_name(query, said):
    with pytest.raises(ValueError, match=said):
        check_asked(query)
