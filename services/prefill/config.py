"""Settings of the prefill service."""

from dataclasses import dataclass

from worker.config import WorkerConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillConfig(WorkerConfig):
    """Those of every worker."""
