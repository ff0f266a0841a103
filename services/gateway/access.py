"""Who may come in and how, read from settings before any connection is made: keys and certificates, what
watches their files, and what HTTP is told of it.
"""

import asyncio
import resource
import ssl
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

from cluster.http_options import HttpOptions
from cluster.logs import Logger
from cluster.tls import TlsFiles, reload, server_context, tls_files
from gateway.config import GatewayConfig
from gateway.cors import check_origins
from gateway.edge import Edge, error_form
from gateway.tenants.identity import Identity, KeySettings
from gateway.tenants.tenant_use import TenantUse
from gateway.tenants.watched_files import WatchedFiles

FILES_BESIDE = 256
"""Open files of a process that are no client's connections."""


@dataclass(frozen=True, slots=True)
class Tls:
    files: TlsFiles
    context: ssl.SSLContext


@dataclass(frozen=True, slots=True)
class Access:
    """`read_access` makes one."""

    keys: KeySettings
    identity: Identity
    tls: Tls | None
    origins: tuple[str, ...]

    def watched(self, tenants: TenantUse, log: Logger) -> tuple[WatchedFiles, ...]:
        """What reads changed files again, to be started."""
        found = []
        if self.keys.file is not None:
            found.append(WatchedFiles("api_keys_file", [self.keys.file], self._keys_again(tenants), log))
        if self.tls is not None:
            files = [self.tls.files.cert, self.tls.files.key]
            found.append(WatchedFiles("certificate", files, self._certificate_again, log))
        return tuple(found)

    def http_options(self, config: GatewayConfig) -> HttpOptions:
        edge = Edge(self.origins)
        return HttpOptions(
            request_bytes_max=config.body_bytes_max,
            connections_max=_room_for(config.connections_max),
            header_timeout_s=config.header_timeout_s,
            idle_timeout_s=config.idle_timeout_s,
            write_timeout_s=config.write_timeout_s,
            tls=None if self.tls is None else self.tls.context,
            reuse_port=config.reuse_port,
            error_form=error_form,
            answer_headers=edge.answer_headers,
            answer_first=edge.answer_first if self.origins else None,
        )

    def _keys_again(self, tenants: TenantUse) -> Callable[[], Awaitable[None]]:
        async def read_again() -> None:
            table = await asyncio.to_thread(self.keys.read)
            if table is not None:
                self.identity.replace(table)
                tenants.keep_only(table.tenants)

        return read_again

    async def _certificate_again(self) -> None:
        if self.tls is not None:
            await asyncio.to_thread(reload, self.tls.context, self.tls.files)


def read_access(config: GatewayConfig) -> Access:
    """What the settings name. Raises ConfigError."""
    keys = KeySettings(Path(config.api_keys_file) if config.api_keys_file else None, config.api_keys)
    files = tls_files(config.tls_cert_file, config.tls_key_file)
    return Access(
        keys=keys,
        identity=Identity(keys.read()),
        tls=None if files is None else Tls(files, server_context(files)),
        origins=check_origins(config.cors_origins),
    )


def _room_for(connections_max: int) -> int:
    """How many connections this process may open, having asked for as many as are wanted: login shells and
    containers often allow 1,024 files until somebody asks for more."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = connections_max + FILES_BESIDE
    unlimited = resource.RLIM_INFINITY
    if soft != unlimited and soft < wanted:
        soft = wanted if hard == unlimited else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return connections_max if soft == unlimited else max(1, min(connections_max, soft - FILES_BESIDE))
