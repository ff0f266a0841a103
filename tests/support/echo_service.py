"""`python -m tests.support.echo_service`: the smallest real service, for tests of processes."""

import asyncio
import sys
from dataclasses import dataclass, field

from tests.support.service import EchoApp

from cluster.service import ServiceConfig, ServiceContext, run_service, service_main
from policy.core import Role


@dataclass(frozen=True, slots=True, kw_only=True)
class EchoConfig(ServiceConfig):
    drain_for_s: float = field(default=0.0, metadata={"help": "how long its drain takes"})


class DrainingApp(EchoApp):
    def __init__(self, context: ServiceContext, drain_for_s: float) -> None:
        super().__init__(context)
        self._drain_for_s = drain_for_s

    async def drain(self, deadline_s: float) -> None:
        self.context.log.info("drain begins", loop=type(asyncio.get_running_loop()).__module__)
        await asyncio.sleep(min(deadline_s, self._drain_for_s))


def run(config: EchoConfig) -> int:
    return run_service(config, (Role.GATEWAY,), lambda context: DrainingApp(context, config.drain_for_s))


if __name__ == "__main__":
    sys.exit(service_main(EchoConfig, "gateway", run))
