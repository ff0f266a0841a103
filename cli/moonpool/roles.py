"""Which module serves which role, and with which flags: the one place that spells the services' flags."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from kvindex.core import InstanceId

SERVICE_OF_ROLE: Final[Mapping[str, tuple[str, ...]]] = {
    "gateway": ("gateway",),
    "conductor": ("conductor",),
    "kvmeta": ("kvmeta",),
    "prefill": ("prefill",),
    "decode": ("decode",),
    "coupled": ("decode", "--coupled"),
}
"""The module that `python -m` runs, then the flags that make it play the role."""

WORKER_ROLES: Final = frozenset({"prefill", "decode", "coupled"})

EVERY_ADDRESS: Final = frozenset({"", "0.0.0.0", "::"})
"""Where one may listen, but where nobody can be found."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceSettings:
    """What every service of one stack is told alike; each takes what concerns its role."""

    nats_url: str
    etcd_url: str
    model_folder: Path
    gateway_bind: str
    gateway_port: int
    gateways_share_port: bool = False
    threads: int
    pool_bytes: int | None
    ssd_bytes: int
    ssd_folder: Path
    drain_s_max: float


def service_arguments(
    role: str,
    instance: InstanceId,
    settings: ServiceSettings,
    services: Mapping[str, tuple[str, ...]] = SERVICE_OF_ROLE,
) -> tuple[str, ...]:
    """What follows `python` to run one service, of those that `services` names."""
    module, *implied = services[role]
    arguments = ["-m", module, *implied, "--instance", instance]
    arguments += ["--nats-url", settings.nats_url, "--etcd-url", settings.etcd_url]
    arguments += ["--drain-s-max", f"{settings.drain_s_max:g}"]
    if role == "gateway":
        arguments += ["--bind", settings.gateway_bind, "--http-port", str(settings.gateway_port)]
        if settings.gateways_share_port:
            arguments.append("--reuse-port")
        if settings.gateway_bind not in EVERY_ADDRESS:
            arguments += ["--host", settings.gateway_bind]
        arguments += ["--model-folder", str(settings.model_folder)]
    if role in WORKER_ROLES:
        arguments += ["--model-folder", str(settings.model_folder), "--threads", str(settings.threads)]
        if settings.pool_bytes is not None:
            arguments += ["--pool-bytes", str(settings.pool_bytes)]
        if settings.ssd_bytes:
            arguments += ["--ssd-bytes", str(settings.ssd_bytes), "--ssd-folder", str(settings.ssd_folder)]
    return tuple(arguments)
