"""The prefill service: a worker that prefills and hands over."""

from cluster.context import ServiceContext
from cluster.service import run_service
from policy.core import Role
from prefill.config import PrefillConfig
from worker.app import WorkerApp


def run(config: PrefillConfig) -> int:
    """Serve until a signal; the exit status."""

    async def build(context: ServiceContext) -> WorkerApp:
        return await WorkerApp.open(context, config)

    return run_service(config, (Role.PREFILL,), build)
