"""The decode service: a worker that decodes and, coupled, prefills as well."""

from cluster.context import ServiceContext
from cluster.service import run_service
from decode.config import DecodeConfig
from policy.core import Role
from worker.app import WorkerApp


def run(config: DecodeConfig) -> int:
    """Serve until a signal; the exit status."""

    async def build(context: ServiceContext) -> WorkerApp:
        return await WorkerApp.open(context, config)

    roles = (Role.PREFILL, Role.DECODE) if config.coupled else (Role.DECODE,)
    return run_service(config, roles, build)
