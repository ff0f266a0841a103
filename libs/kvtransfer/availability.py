"""Which transports an endpoint has: made and started in the order asked for, each that this machine lacks
with its reason. A transport's package is imported once it is asked for.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from kvtransfer.errors import TransportUnavailable
from kvtransfer.kinds import TransportKind
from kvtransfer.transport import Address, Transport, TransportContext

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class TransportSettings:
    """Where the transports of one endpoint listen, and with what. rdma listens for control streams."""

    host: str
    tcp_port: int
    rdma_port: int
    advertised_host: str
    shm_folder: Path | None
    rdma_devices: tuple[str, ...] | None


@dataclass(frozen=True, slots=True)
class Started:
    """The transports that run, in the order asked for, their addresses, and why the others do not."""

    transports: Mapping[TransportKind, Transport]
    addresses: tuple[Address, ...]
    unavailable: Mapping[TransportKind, str]


async def start_transports(
    kinds: Sequence[TransportKind], context: TransportContext, settings: TransportSettings
) -> Started:
    """Raises TransportUnavailable if this machine has none of them, OSError if an address cannot be bound."""
    transports: dict[TransportKind, Transport] = {}
    addresses: list[Address] = []
    unavailable: dict[TransportKind, str] = {}
    try:
        for kind in kinds:
            try:
                transport = _made(kind, context, settings)
                addresses.append(await transport.start())
                transports[kind] = transport
                context.eras.watch(transport.end_sessions)
            except TransportUnavailable as error:
                unavailable[kind] = str(error)
                _log.info("%s: no %s: %s", context.name, kind, error)
        if not transports:
            raise TransportUnavailable("; ".join(f"{kind}: {text}" for kind, text in unavailable.items()))
    except BaseException:
        for transport in transports.values():
            await transport.close()
        raise
    return Started(transports, tuple(addresses), unavailable)


def _made(kind: TransportKind, context: TransportContext, settings: TransportSettings) -> Transport:
    try:
        match kind:
            case TransportKind.TCP:
                from kvtransfer.tcp.transport import TcpTransport

                return TcpTransport(context, settings.host, settings.tcp_port, settings.advertised_host)
            case TransportKind.SHM:
                from kvtransfer.shm.transport import ShmTransport

                return ShmTransport(context, settings.shm_folder)
            case TransportKind.RDMA:
                from kvtransfer.rdma.transport import RdmaTransport

                return RdmaTransport(
                    context,
                    settings.host,
                    settings.rdma_port,
                    settings.advertised_host,
                    settings.rdma_devices,
                )
    except ImportError as error:
        raise TransportUnavailable(str(error)) from error
