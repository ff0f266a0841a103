"""Directories that follow instances over a hostile network: never wrong for longer than one resync."""

import random

import pytest
from tests.support.directory_world import FAIR, TICK_S, Follower, Weather, World

from kvpool import events as pool_events
from protocol import inventory
from worker.pool_reporter import HEARTBEAT_S

pytestmark = pytest.mark.sim

FOUL = Weather(lost=0.15, repeated=0.15, late=0.2)
SEEDS = [*range(4), random.SystemRandom().randrange(2**32)]
"""The last one is another in every run; the name of the test tells it."""

RESYNC_S_MAX = (
    HEARTBEAT_S + FOUL.late_s_max + inventory.RETRY_INTERVAL_S + TICK_S + 2 * World.inventory_s_max + 0.5
)
"""Once nothing is lost any more: what is still under way arrives, a heartbeat shows what is missing, what was
asked in vain is given up and asked again, and the answer comes."""

PUBLISHED_S = 0.05
"""Longer than until the next report arrives, too short for an inventory."""


@pytest.mark.parametrize("seed", SEEDS)
def test_after_lost_repeated_and_late_messages_every_directory_is_exact_within_one_resync(seed: int) -> None:
    """That a synchronised follower tells the truth as of its event is checked at every single step."""
    print(f"seed {seed}")
    world = World(seed)
    for _ in range(2):
        world.clock.weather = FOUL
        world.run(5.0)
        world.clock.weather = FAIR
        world.run(RESYNC_S_MAX)
        assert_exact(world)
    for follower in world.followers:
        assert follower.checks > 100
        assert follower.inventories > len(world.instances), "something was lost, and repaired"
        assert follower.contradictions == 0, "numbers alone tell what was missed"


@pytest.mark.parametrize("seed", SEEDS)
def test_restarts_with_events_of_the_dead_still_under_way(seed: int) -> None:
    print(f"seed {seed}")
    world = World(seed)
    rng = world.clock.rng
    world.clock.weather = FOUL
    for _ in range(6):
        world.run(2.0 * rng.random())
        instance = rng.choice(world.instances)
        instance.restart()
        world.register(instance)
    world.run(0.5)
    lost, *left = world.instances
    for follower in world.followers:
        follower.gone(lost.name)
        assert follower.tells(lost.name, {})
    world.instances = left
    world.clock.weather = FAIR
    world.run(RESYNC_S_MAX)
    assert_exact(world)
    for follower in world.followers:
        assert follower.tells(lost.name, {})
        assert set(follower.directory.instances()) == {instance.name for instance in left}


@pytest.mark.parametrize("seed", SEEDS)
def test_a_backlog_that_overflows_is_a_gap_like_any_other(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    print(f"seed {seed}")
    monkeypatch.setattr(pool_events, "BACKLOG_BLOCKS_MAX", 40)
    world = World(seed)
    world.run(1.0)
    for instance in world.instances:
        instance.silent = True
    before = [instance.pool.inventory()[0] for instance in world.instances]
    world.run(3.0)
    after = [instance.pool.inventory()[0] for instance in world.instances]
    assert min(b - a for a, b in zip(before, after, strict=True)) > 10
    for instance in world.instances:
        instance.silent = False
    asked = [follower.inventories for follower in world.followers]
    world.run(RESYNC_S_MAX)
    assert_exact(world)
    for follower, inventories in zip(world.followers, asked, strict=True):
        assert follower.inventories >= inventories + len(world.instances)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_stream_that_overflows_what_is_held_is_caught_up_with(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the time that some inventories take more happens than may be held; the stream never stops."""
    print(f"seed {seed}")
    monkeypatch.setattr(inventory, "HELD_EVENTS_MAX", 60)
    world = World(seed)
    world.clock.weather = FOUL
    dropped = 0

    def count_dropped() -> None:
        nonlocal dropped
        for follower in world.followers:
            for known in follower.syncs.values():
                held = known.held.messages
                dropped += bool(held) and known.held.events > 50

    world.clock.every(0.05, count_dropped)
    world.run(8.0)
    world.clock.weather = FAIR
    world.run(2 * RESYNC_S_MAX)
    assert dropped, "nothing came near the bound"
    assert_exact(world)


@pytest.mark.parametrize("seed", SEEDS[:3])
def test_a_follower_that_starts_again_knows_all_at_once(seed: int) -> None:
    """Nothing is kept of what it knew; in the meantime the other one is complete."""
    print(f"seed {seed}")
    world = World(seed)
    world.run(4.0)
    assert_exact(world)
    _, other = world.followers
    for instance in world.instances:
        instance.followers = [other]
    assert all(other.is_true_to(instance) for instance in world.instances)
    world.followers = [other, Follower(world.clock, world.instances, world.inventory_s_max)]
    for instance in world.instances:
        world.register(instance)
    world.run(0.3 + world.inventory_s_max + 0.1)
    assert_exact(world)


def assert_exact(world: World) -> None:
    """As soon as what was done until now is published and has arrived."""
    world.quiet = True
    world.run(PUBLISHED_S)
    world.quiet = False
    assert not world.untrue(), f"seed {world.seed}, {world.clock.now_s:.2f} s"
