"""`python -m prefill`."""

import sys

from cluster.service import service_main
from prefill.app import run
from prefill.config import PrefillConfig

if __name__ == "__main__":
    sys.exit(service_main(PrefillConfig, "prefill", run))
