"""`python -m conductor`: one conductor, until SIGTERM."""

import sys

from cluster.service import run_service, service_main
from conductor.app import ConductorApp
from conductor.config import ConductorConfig
from policy.core import Role


def run(config: ConductorConfig) -> int:
    return run_service(config, (Role.CONDUCTOR,), lambda context: ConductorApp(context, config))


if __name__ == "__main__":
    sys.exit(service_main(ConductorConfig, Role.CONDUCTOR, run))
