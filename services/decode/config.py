"""Settings of the decode service."""

from dataclasses import dataclass, field

from worker.config import WorkerConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeConfig(WorkerConfig):
    coupled: bool = field(
        default=False, metadata={"help": "prefill here too: requests may be placed on this instance alone"}
    )
