"""`python -m gateway`: one gateway, until SIGTERM."""

import sys

from cluster.service import run_service, service_main
from gateway.access import read_access
from gateway.app import GatewayApp, load_folder
from gateway.config import GatewayConfig
from policy.core import Role


def run(config: GatewayConfig) -> int:
    access = read_access(config)
    folder = load_folder(config)
    return run_service(
        config,
        (Role.GATEWAY,),
        lambda context: GatewayApp(context, config, folder, access),
        http=access.http_options(config),
    )


if __name__ == "__main__":
    sys.exit(service_main(GatewayConfig, Role.GATEWAY, run))
