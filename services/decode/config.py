"""Settings of the decode service: those of every worker."""

from worker.config import WorkerConfig as Config

__all__ = ["Config"]
