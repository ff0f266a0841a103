"""A gateway as the lifecycle drives it."""

import asyncio
from collections.abc import Iterable, Mapping
from pathlib import Path

from aiohttp import web

from cluster.bus import Handler
from cluster.context import ServiceContext
from cluster.messages import InstanceRecord
from gateway.config import GatewayConfig
from gateway.liveness import Liveness
from gateway.metrics import GatewayMetrics
from gateway.requests import Requests
from gateway.routes import Api
from gateway.text import ModelFolder, TextModel, load_model_folder
from policy.core import InstanceState, LoadSnapshot


def load_folder(config: GatewayConfig) -> ModelFolder:
    """What the settings name. Raises ConfigError: before any connection is made."""
    folder = Path(config.model_folder).resolve()
    return load_model_folder(
        folder, config.model_name or folder.name, config.dtype, weight_dtype=config.weight_dtype or None
    )


class GatewayApp:
    def __init__(self, context: ServiceContext, config: GatewayConfig, folder: ModelFolder) -> None:
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
        self._api = Api(
            self._model,
            self._requests,
            metrics,
            context.log,
            body_limits=config.body_limits(),
            write_timeout_s=config.write_timeout_s,
        )

    async def start(self) -> InstanceRecord:
        await self._requests.start()
        await self._liveness.start()
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
        await asyncio.gather(self._liveness.close(), self._requests.close())
        self._model.close()
