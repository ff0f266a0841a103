"""A gateway as the lifecycle drives it."""

import asyncio
from collections.abc import Iterable, Mapping
from pathlib import Path

from aiohttp import web

from cluster.bus import Handler
from cluster.context import ServiceContext
from cluster.messages import InstanceRecord
from cluster.registry import RegistryEvent
from gateway.access import Access
from gateway.answers.liveness import Liveness
from gateway.answers.requests import Requests
from gateway.capacity import KnownCapacity
from gateway.config import GatewayConfig
from gateway.loop_lag import LoopLag
from gateway.metrics import GatewayMetrics
from gateway.model_folder import ModelFolder, load_model_folder
from gateway.routes import Api
from gateway.tenants.tenant_use import TenantUse
from gateway.text_model import TextModel
from policy.core import InstanceState, LoadSnapshot, Role


def load_folder(config: GatewayConfig) -> ModelFolder:
    """What the settings name. Raises ConfigError: before any connection is made."""
    folder = Path(config.model_folder).resolve()
    return load_model_folder(
        folder, config.model_name or folder.name, config.dtype, weight_dtype=config.weight_dtype or None
    )


class GatewayApp:
    def __init__(
        self, context: ServiceContext, config: GatewayConfig, folder: ModelFolder, access: Access
    ) -> None:
        self._context = context
        self._config = config
        metrics = GatewayMetrics(context.metrics.registry)
        self._model = TextModel(folder, context.cluster_seed, threads=config.tokenize_threads)
        self._requests = Requests(context.bus, metrics, context.log, config.gateway_limits())
        self._liveness = Liveness(
            context.bus,
            context.registry,
            context.log,
            config.silence_limits(),
            self._requests.instance_lost,
        )
        self._identity = access.identity
        self._tenants = TenantUse(metrics, asyncio.get_running_loop().time)
        self._watched = access.watched(self._tenants, context.log)
        self._lag = LoopLag(metrics.loop_lag_s.observe)
        self._api = Api(
            self._model,
            self._requests,
            metrics,
            context.log,
            identity=access.identity,
            tenants=self._tenants,
            capacity=KnownCapacity(context.registry, folder.fingerprint),
            body_limits=config.body_limits(),
            write_timeout_s=config.write_timeout_s,
            keep_alive_s=config.keep_alive_s,
        )

    async def start(self) -> InstanceRecord:
        self._lag.start()
        await self._requests.start()
        await self._liveness.start()
        self._context.registry.on_change(self._gateways_changed)
        self._count_gateways()
        for files in self._watched:
            files.start()
        if self._identity.open:
            self._context.log.warning("open to everybody: neither api_keys_file nor api_keys is set")
        else:
            self._context.log.info("API keys are asked for", tenants=len(self._identity.tenants))
        return self._context.record()

    def load(self) -> LoadSnapshot:
        return LoadSnapshot(
            instance=self._context.instance,
            roles=self._context.roles,
            state=InstanceState.SERVING,
            requests=self._requests.in_progress,
            answered_total=self._requests.outcomes.answered,
            in_targets_total=self._requests.outcomes.in_targets,
            rejected_total=self._requests.outcomes.rejected,
        )

    def handlers(self) -> Mapping[type, Handler]:
        return {}

    def routes(self) -> Iterable[web.RouteDef]:
        return self._api.routes()

    async def drain(self, deadline_s: float) -> None:
        await self._requests.drain(deadline_s)

    async def close(self) -> None:
        self._lag.stop()
        watched = [files.close() for files in self._watched]
        await asyncio.gather(self._liveness.close(), self._requests.close(), *watched)
        self._model.close()

    def _gateways_changed(self, _: RegistryEvent) -> None:
        self._count_gateways()

    def _count_gateways(self) -> None:
        """Tenants' limits are divided among all, this one included before it is registered."""
        others = sum(
            Role.GATEWAY in record.roles and record.instance != self._context.instance
            for record in self._context.registry.instances.values()
        )
        self._tenants.share_among(1 + others)
