"""`python -m kvmeta`: one kvmeta, until SIGTERM."""

import sys

from cluster.service import run_service, service_main
from kvmeta.app import KvmetaApp
from kvmeta.config import KvmetaConfig
from policy.core import Role


def run(config: KvmetaConfig) -> int:
    return run_service(config, (Role.KVMETA,), lambda context: KvmetaApp(context, config))


if __name__ == "__main__":
    sys.exit(service_main(KvmetaConfig, Role.KVMETA, run))
