"""What a local stack is to be: its settings, its services in order, and their environment. Starts nothing."""

import os
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from kvindex.core import InstanceId
from moonpool.run_folder import moonpool_home

READY_S_MAX_DEFAULT = 120.0
DRAIN_S_MAX_DEFAULT = 30.0
SECRET_VARIABLE = "MOONPOOL_CLUSTER_SECRET"
SECRET_BYTES = 32
KERNELS_VARIABLE = "MOONPOOL_KERNELS_FOLDER"
OPENMP_SPINS = 2000
"""How often a thread of an engine looks for work before it sleeps, about 0.1 ms: longer than the gap between
two operations. OpenMP's own 15 ms burn the cores that the other processes of this machine wait for.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class StackConfig:
    """What a stack is to be. `port` 0 takes a free one."""

    name: str
    model: str
    prefill: int = 1
    decode: int = 1
    coupled: int = 0
    gateways: int = 1
    """More than one share the port."""
    host: str = "127.0.0.1"
    port: int = 0
    threads: int = 1
    pool_bytes: int | None = None
    """Memory for KV blocks of each worker; None leaves it to the worker."""
    ssd_bytes: int = 0
    """Files for KV blocks of each worker; 0: none."""
    ssd_folder: Path | None = None
    """Where they are, with the seed of their hashes, for the next stack too; None: in the run folder, as
    long as the stack runs."""
    ready_s_max: float = READY_S_MAX_DEFAULT
    drain_s_max: float = DRAIN_S_MAX_DEFAULT
    environment: Mapping[str, str] = field(default_factory=dict)
    """Added to the environment of every service, for settings that have no field here."""


@dataclass(frozen=True, slots=True)
class Member:
    """One service of a stack: `instance` is its id in the cluster and the name of its log."""

    instance: InstanceId
    role: str


def members(config: StackConfig) -> tuple[Member, ...]:
    """The services of a stack in the order in which they start; they stop the other way round."""
    counts = (
        ("kvmeta", 1),
        ("conductor", 1),
        ("prefill", config.prefill),
        ("decode", config.decode),
        ("coupled", config.coupled),
        ("gateway", config.gateways),
    )
    return tuple(
        Member(InstanceId(f"{role}-{number}"), role) for role, count in counts for number in range(count)
    )


def service_environment(config: StackConfig) -> dict[str, str]:
    """What is added to our environment for every service."""
    return {
        # OpenMP's own threads would outnumber the cores: the engine says how many it wants.
        "OMP_NUM_THREADS": str(config.threads),
        "GOMP_SPINCOUNT": str(OPENMP_SPINS),
        KERNELS_VARIABLE: os.environ.get(KERNELS_VARIABLE, str(moonpool_home() / "kernels")),
        # One that is set is known to those who are to join the stack.
        SECRET_VARIABLE: os.environ.get(SECRET_VARIABLE) or secrets.token_hex(SECRET_BYTES),
        **config.environment,
    }


STOP_ORDER = (("gateway",), ("prefill", "decode", "coupled"), ("conductor", "kvmeta"))
"""The gateway first, so that open answers end while the rest still serves them."""
