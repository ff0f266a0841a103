"""`python -m gateway`: one gateway, until SIGTERM."""

import sys

from cluster.http_options import HttpOptions
from cluster.service import run_service, service_main
from gateway.app import GatewayApp, load_folder
from gateway.config import GatewayConfig
from policy.core import Role


def run(config: GatewayConfig) -> int:
    folder = load_folder(config)
    return run_service(
        config,
        (Role.GATEWAY,),
        lambda context: GatewayApp(context, config, folder),
        http=HttpOptions(request_bytes_max=config.body_bytes_max),
    )


if __name__ == "__main__":
    sys.exit(service_main(GatewayConfig, Role.GATEWAY, run))
