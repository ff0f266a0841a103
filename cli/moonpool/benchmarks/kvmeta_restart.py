"""`moonpool bench kvmeta-restart`: every kvmeta is killed and started again; how soon it knows what it knew.

Real NATS, etcd and kvmeta processes; the instances are real pools and reporters in this process. Times are
from the start of the processes, imports included.
"""

import argparse
import asyncio
import tempfile
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from moonpool.arguments import Command, whole_number
from moonpool.benchmarks.command_line import add_json_argument, print_results, say
from moonpool.benchmarks.services import start_service, until_ready
from moonpool.errors import EXIT_OK, CommandError
from moonpool.machine import machine_context
from moonpool.measurement import Measurement, measurement

if TYPE_CHECKING:
    from cluster.bus import Bus
    from kvindex.core import InstanceId
    from moonpool.processes import Child

NAME = "kvmeta-restart"
KNOWN_SHARE = 0.95
"""Of the earlier matches, which must be answered as they were before /ready says yes."""
PROMPTS = 64
REPEATS_MAX = 100
READY_S_MAX = 60.0
ASK_S_MAX = 5.0
POLL_S = 0.01
KVMETAS_MAX = 16
INSTANCES_MAX = 256
BLOCKS_MAX = 10_000_000
CHAIN_BLOCKS = 512


@dataclass(frozen=True, slots=True)
class Setting:
    kvmetas: int
    instances: int
    blocks: int
    """Of each instance."""


@dataclass(frozen=True, slots=True)
class Restart:
    """Seconds from the start of the processes."""

    first_right_s: float
    known_s: float
    ready_s: float
    known_share: float
    """Of the matches asked as soon as all were ready."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_json_argument(parser)
    for flag, most, default, text in (
        ("--repeats", REPEATS_MAX, 3, "restarts"),
        ("--kvmetas", KVMETAS_MAX, 1, "kvmeta processes side by side"),
        ("--instances", INSTANCES_MAX, 16, "instances that hold blocks"),
        ("--blocks", BLOCKS_MAX, 62_500, "blocks of each instance"),
    ):
        parser.add_argument(
            flag,
            type=whole_number(1, most),
            default=default,
            metavar="N",
            help=f"{text} (default {default})",
        )


def run(options: argparse.Namespace) -> int:
    setting = Setting(options.kvmetas, options.instances, options.blocks)
    print_results(asyncio.run(measure(setting, options.repeats)), as_json=options.json)
    return EXIT_OK


async def measure(setting: Setting, repeats: int) -> list[Measurement]:
    """CommandError where a kvmeta does not come back, or is ready before it knows what it knew."""
    # Here, and not above: other commands need none of it.
    from moonpool.benchmarks.simulated_holders import asked_prompts, running_holders
    from moonpool.cluster_client import bus, control_plane
    from moonpool.servers import etcd_server, nats_server

    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        nats = stack.enter_context(nats_server(folder))
        etcd = stack.enter_context(etcd_server(folder))
        control = await stack.enter_async_context(control_plane(etcd.url, timeout_s=READY_S_MAX))
        say(f"{setting.instances} instances with {setting.blocks} blocks each")
        holders = await stack.enter_async_context(
            running_holders(nats.url, control, setting.instances, setting.blocks, CHAIN_BLOCKS)
        )
        asker = await stack.enter_async_context(bus(nats.url, timeout_s=READY_S_MAX))
        prompts = asked_prompts(holders, PROMPTS, seed=1)
        restarts = []
        for _ in range(1 + repeats):
            kvmetas = Kvmetas(folder, nats.url, etcd.url, setting.kvmetas)
            try:
                restarts.append(await kvmetas.start(asker, prompts))
            finally:
                await kvmetas.kill()
            say(f"known after {restarts[-1].known_s:.2f} s, ready after {restarts[-1].ready_s:.2f} s")
    return summarise(restarts[1:], setting)


def summarise(restarts: Sequence[Restart], setting: Setting) -> list[Measurement]:
    context = {
        **machine_context(),
        "kvmetas": setting.kvmetas,
        "instances": setting.instances,
        "blocks": setting.instances * setting.blocks,
        "known_share": KNOWN_SHARE,
    }
    return [
        measurement(NAME, "restart", metric, unit, samples, context)
        for metric, unit, samples in (
            ("first_right_match", "s", [restart.first_right_s for restart in restarts]),
            ("matches_known", "s", [restart.known_s for restart in restarts]),
            ("ready", "s", [restart.ready_s for restart in restarts]),
            ("known_share_when_ready", "x", [restart.known_share for restart in restarts]),
        )
    ]


class Kvmetas:
    """All kvmeta of the bench's cluster, from one start to one kill."""

    def __init__(self, folder: Path, nats_url: str, etcd_url: str, count: int) -> None:
        from moonpool.servers import free_port

        self._folder = folder
        self._arguments = ("--nats-url", nats_url, "--etcd-url", etcd_url, "--log-level", "warning")
        self._ports = [free_port() for _ in range(count)]
        self._processes: list[Child] = []

    async def start(self, asker: "Bus", prompts: Sequence[tuple["InstanceId", bytes]]) -> Restart:
        """Return once all are ready."""
        loop = asyncio.get_running_loop()
        started_s = loop.time()
        for number, port in enumerate(self._ports):
            arguments = (*self._arguments, "--http-port", str(port))
            self._processes.append(await start_service(f"kvmeta-{number}", arguments, self._folder))
        try:
            async with asyncio.timeout(READY_S_MAX), asyncio.TaskGroup() as tasks:
                ready = tasks.create_task(self._all_ready(asker, prompts))
                first_right_s = await _until_right(asker, prompts[:1], 1.0) - started_s
                known_s = await _until_right(asker, prompts, KNOWN_SHARE) - started_s
                ready_at_s, known_share = await ready
        except TimeoutError:
            tails = "\n".join(child.log_tail() for child in self._processes)
            raise CommandError(f"not ready within {READY_S_MAX:g} s:\n{tails}") from None
        if known_share < KNOWN_SHARE:
            raise CommandError(f"ready, and only {known_share:.0%} of the matches are as they were")
        return Restart(first_right_s, known_s, ready_at_s - started_s, known_share)

    async def kill(self) -> None:
        await asyncio.gather(*(child.kill() for child in self._processes))

    async def _all_ready(
        self, asker: "Bus", prompts: Sequence[tuple["InstanceId", bytes]]
    ) -> tuple[float, float]:
        """(when the last of them said so, the share of right answers from then on)"""
        for port in self._ports:
            await until_ready(port)
        return asyncio.get_running_loop().time(), await _right_share(asker, prompts)


async def _until_right(asker: "Bus", prompts: Sequence[tuple["InstanceId", bytes]], share: float) -> float:
    """When `share` of the prompts were answered as by who holds them."""
    while True:
        if await _right_share(asker, prompts) >= share:
            return asyncio.get_running_loop().time()
        await asyncio.sleep(POLL_S)


async def _right_share(asker: "Bus", prompts: Sequence[tuple["InstanceId", bytes]]) -> float:
    right = await asyncio.gather(*(_is_right(asker, instance, packed) for instance, packed in prompts))
    return sum(right) / len(right)


async def _is_right(asker: "Bus", instance: "InstanceId", packed: bytes) -> bool:
    from cluster import subjects
    from cluster.errors import RetryableError
    from cluster.messages import MatchReply, MatchRequest
    from kvhash import HASH_BYTES

    try:
        reply = await asker.request(subjects.KVMETA_MATCH, MatchRequest(packed), timeout_s=ASK_S_MAX)
    except RetryableError:
        return False
    if not isinstance(reply, MatchReply):
        raise CommandError(f"kvmeta answered a match with {type(reply).__name__}")
    found = {match.instance: match.prefix_blocks for match in reply.matches}
    return found == {instance: len(packed) // HASH_BYTES}


COMMAND = Command(NAME, "how soon a killed kvmeta knows again what instances hold", add_arguments, run)
