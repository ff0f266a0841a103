"""Instances with real pools, several followers with real directories, and a network that loses, repeats,
delays and reorders what they say to each other. One clock, one seed, no threads.

The followers do what kvmeta's synchroniser does with the effects of `protocol.inventory`; here it is all
synchronous, so that a run is the same every time.
"""

import heapq
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from tests.support.prompt_tree import chain, parent_of, path_of

from cluster.messages import BlockEvents
from kvhash import BlockHash, HashInputError
from kvindex.core import HeldRun, InstanceId, Tier
from kvindex.directory import Directory
from kvindex.inventory import InventoryError
from kvindex.places import Replacement
from kvpool import BlockPool, NoBlocksError
from protocol import inventory as sync
from worker.pool_reporter import HEARTBEAT_S, event_messages

TICK_S = 0.5
"""How often followers are told that time passes."""
CHUNK_BLOCKS = 5

Truth = dict[BlockHash, Tier]


@dataclass(frozen=True, slots=True)
class Weather:
    """What the network does to one message."""

    lost: float = 0.0
    repeated: float = 0.0
    late: float = 0.0
    """Share of messages that take up to `late_s_max`; the others arrive in order."""
    late_s_max: float = 2.0
    delay_s: float = 0.002


FAIR = Weather()


class Clock:
    def __init__(self, rng: random.Random) -> None:
        self.now_s = 0.0
        self.rng = rng
        self.weather = FAIR
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._number = 0

    def after(self, delay_s: float, call: Callable[[], None]) -> None:
        self._number += 1
        heapq.heappush(self._queue, (self.now_s + delay_s, self._number, call))

    def every(self, interval_s: float, call: Callable[[], None]) -> None:
        def again() -> None:
            call()
            self.after(interval_s, again)

        self.after(interval_s * self.rng.random(), again)

    def run_until(self, end_s: float) -> None:
        while self._queue and self._queue[0][0] <= end_s:
            self.now_s, _, call = heapq.heappop(self._queue)
            call()
        self.now_s = end_s

    def send(self, call: Callable[[], None]) -> None:
        """Have `call` happen at the receiver, as the weather allows."""
        weather, rng = self.weather, self.rng
        for _ in range(1 + (rng.random() < weather.repeated)):
            if rng.random() < weather.lost:
                continue
            late = rng.random() < weather.late
            self.after(rng.random() * weather.late_s_max if late else weather.delay_s, call)


class SimulatedInstance:
    """A pool with two tiers under random use, and its reporter."""

    def __init__(self, name: str, clock: Clock) -> None:
        self.name = InstanceId(name)
        self.incarnation = 0
        self.truths: dict[tuple[int, int], Truth] = {}
        """What was held as of (incarnation, event number), wherever somebody could have been told it."""
        self.followers: list[Follower] = []
        self.silent = False
        """Events pile up, as when the event loop is busy with something else."""
        self._clock = clock
        self._heartbeat_at_s = 0.0
        self.restart()

    def restart(self) -> None:
        """Another process of the same name: nothing is left, and numbers begin again."""
        self.incarnation += 1
        self.pool = BlockPool(24, lower=((Tier.SSD, 30),), sink_ahead_blocks=12)
        self._note(0)

    def use(self) -> None:
        """One request: what is held of a random prompt is used, the rest computed."""
        rng = self._clock.rng
        hashes = chain(tuple(rng.choices((0, 1, 2), k=rng.randint(1, 8))))
        pinned = self.pool.acquire(hashes)
        for rise in self.pool.begin_rise(hashes):
            if rng.random() < 0.9:
                block_id = self.pool.risen(rise)
                pinned += [] if block_id is None else [block_id]
            else:
                self.pool.rise_failed(rise, lost=rng.random() < 0.5)
        held = self.pool.match(hashes)
        try:
            fresh = self.pool.allocate(len(hashes) - held)
        except NoBlocksError:
            fresh = []
        for block_id, place in zip(fresh, range(held, len(hashes)), strict=False):
            self.pool.store(block_id, hashes[place], hashes[place - 1] if place else None)
        self.pool.release([*fresh, *pinned])
        for sink in self.pool.take_sinks(rng.randint(1, 8)):
            if rng.random() < 0.95:
                self.pool.sunk(sink)
            else:
                self.pool.sink_failed(sink)

    def report(self) -> None:
        """What `PoolReporter.run` does in one turn."""
        if self.silent:
            return
        first_number, events = self.pool.take_events()
        if not events and self._clock.now_s < self._heartbeat_at_s:
            return
        self._heartbeat_at_s = self._clock.now_s + HEARTBEAT_S
        self._note(first_number + len(events) - 1)
        for message in event_messages(first_number, events):
            for follower in self.followers:
                self._tell(follower, message)

    def snapshot(self) -> tuple[int, list[HeldRun]]:
        as_of_number, snapshot = self.pool.inventory_snapshot()
        self._note(as_of_number)
        return as_of_number, [part.pack() for part in snapshot.parts(CHUNK_BLOCKS)]

    def truth(self) -> Truth:
        return {block_hash: tier for block_hash, _, tier in self.pool.inventory()[1]}

    def _tell(self, follower: "Follower", message: BlockEvents) -> None:
        name, incarnation = self.name, self.incarnation
        came = sync.EventsCame(incarnation, message.first_number, message.events)
        self._clock.send(lambda: follower.feed(name, came))

    def _note(self, number: int) -> None:
        self.truths[self.incarnation, number] = self.truth()


class Follower:
    """One kvmeta: a directory, and a machine for each instance that it knows of."""

    def __init__(self, clock: Clock, instances: list[SimulatedInstance], inventory_s_max: float) -> None:
        self.directory = Directory()
        self.syncs: dict[InstanceId, sync.Sync] = {}
        self.inventories = 0
        self.contradictions = 0
        self.checks = 0
        self._clock = clock
        self._inventory_s_max = inventory_s_max
        self._instances = {instance.name: instance for instance in instances}
        self._fetching: dict[InstanceId, object] = {}
        for instance in instances:
            instance.followers.append(self)
        clock.every(TICK_S, self._tick)

    def registered(self, instance: SimulatedInstance) -> None:
        name, incarnation = instance.name, instance.incarnation
        if name in self.syncs:
            if self.syncs[name].incarnation != incarnation:
                self._fetching.pop(name, None)
            self.feed(name, sync.Appeared(incarnation))
        else:
            self._take(name, sync.begin(incarnation, self._clock.now_s), None)

    def gone(self, name: InstanceId) -> None:
        self.syncs.pop(name, None)
        self._fetching.pop(name, None)
        self.directory.drop(name)

    def feed(self, name: InstanceId, event: sync.Event, replacement: Replacement | None = None) -> None:
        if name in self.syncs:
            self._take(name, sync.step(self.syncs[name], event, self._clock.now_s), replacement)

    def is_true_to(self, instance: SimulatedInstance) -> bool:
        known = self.syncs.get(instance.name)
        return known is not None and known.synchronised and self.tells(instance.name, instance.truth())

    def tells(self, name: InstanceId, truth: Truth) -> bool:
        """Whether the directory says this of an instance, and no more: asked for every prompt of it."""
        if self.directory.blocks_of(name) != len(truth):
            return False
        told: Truth = {}
        for block_hash in truth.keys() - {parent_of(path_of(block_hash)) for block_hash in truth}:
            hashes = chain(path_of(block_hash))
            for match in self.directory.match(b"".join(hashes)):
                if match.instance == name:
                    tiers = [run.tier for run in match.runs for _ in range(run.blocks)]
                    told.update(zip(hashes, tiers, strict=False))
        return told == truth

    def check(self, name: InstanceId) -> None:
        """A follower that takes itself for synchronised tells the truth as of the event it has come to."""
        known = self.syncs[name]
        truth = self._instances[name].truths.get((known.incarnation, (known.next_number or 0) - 1))
        if known.synchronised and truth is not None:
            self.checks += 1
            assert self.tells(name, truth)

    def _take(self, name: InstanceId, outcome: sync.Outcome, replacement: Replacement | None) -> None:
        self.syncs[name], effects = outcome
        try:
            for effect in effects:
                self._carry_out(name, effect, replacement)
        except (InventoryError, HashInputError):
            self.contradictions += 1
            self.syncs[name], _ = sync.begin(self.syncs[name].incarnation, self._clock.now_s)
        self.directory.sweep(7)
        self.check(name)

    def _carry_out(self, name: InstanceId, effect: sync.Effect, replacement: Replacement | None) -> None:
        match effect:
            case sync.AskInventory():
                self._fetch(name)
            case sync.Apply(events):
                for event in events:
                    self.directory.apply(name, event)
            case sync.Replace():
                assert replacement is not None
                self.directory.commit(replacement)
            case sync.Drop():
                self.directory.drop(name)

    def _fetch(self, name: InstanceId) -> None:
        """Ask, and take the answer run by run; it fails as a whole where anything of it is lost."""
        if name in self._fetching:
            return
        ticket, incarnation = object(), self.syncs[name].incarnation
        self._fetching[name] = ticket
        instance = self._instances[name]

        def asked() -> None:
            if instance.incarnation == incarnation:
                as_of_number, runs = instance.snapshot()
                self._clock.send(lambda: self._answered(name, ticket, incarnation, as_of_number, runs))

        def given_up() -> None:
            if self._fetching.get(name) is ticket:
                del self._fetching[name]

        self._clock.send(asked)
        self._clock.after(self._inventory_s_max, given_up)

    def _answered(
        self, name: InstanceId, ticket: object, incarnation: int, as_of_number: int, runs: list[HeldRun]
    ) -> None:
        if self._fetching.get(name) is not ticket:
            return
        replacement = self.directory.replacement(name)
        seconds_a_run = self._clock.rng.random() * self._inventory_s_max / (len(runs) + 1)

        def take(number: int) -> None:
            if self._fetching.get(name) is not ticket:
                self.directory.abandon(replacement)
            elif number < len(runs):
                self.directory.extend(replacement, runs[number])
                self._clock.after(seconds_a_run, lambda: take(number + 1))
            else:
                del self._fetching[name]
                self.inventories += 1
                self.feed(name, sync.InventoryCame(incarnation, as_of_number), replacement)
                self.directory.abandon(replacement)

        take(0)

    def _tick(self) -> None:
        for name in tuple(self.syncs):
            self.feed(name, sync.TimePassed())


@dataclass
class World:
    seed: int
    instances_count: int = 3
    followers_count: int = 2
    inventory_s_max: float = 0.4
    quiet: bool = False
    """No requests come."""
    clock: Clock = field(init=False)
    instances: list[SimulatedInstance] = field(init=False)
    followers: list[Follower] = field(init=False)

    def __post_init__(self) -> None:
        self.clock = Clock(random.Random(self.seed))
        self.instances = [SimulatedInstance(f"i{n}", self.clock) for n in range(self.instances_count)]
        self.followers = [
            Follower(self.clock, self.instances, self.inventory_s_max) for _ in range(self.followers_count)
        ]
        for instance in self.instances:
            self.clock.every(0.03, self._unless_quiet(instance.use))
            self.clock.every(0.04, instance.report)
            self.register(instance)

    def _unless_quiet(self, use: Callable[[], None]) -> Callable[[], None]:
        def call() -> None:
            if not self.quiet:
                use()

        return call

    def register(self, instance: SimulatedInstance) -> None:
        """The control plane shows each follower, in its own time, what is registered then."""
        for follower in self.followers:
            self.clock.after(0.3 * self.clock.rng.random(), partial(follower.registered, instance))

    def run(self, seconds: float) -> None:
        self.clock.run_until(self.clock.now_s + seconds)

    def untrue(self) -> list[tuple[int, InstanceId]]:
        return [
            (number, instance.name)
            for number, follower in enumerate(self.followers)
            for instance in self.instances
            if not follower.is_true_to(instance)
        ]
