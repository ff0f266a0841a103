"""`python -m decode`."""

import sys

from cluster.service import service_main
from decode.app import run
from decode.config import DecodeConfig

if __name__ == "__main__":
    sys.exit(service_main(DecodeConfig, "decode", run))
