"""`python -m tests.support.timed_worker prefill|decode|coupled`: a real worker whose engine takes time only.

Pool, transfers, bus and protocol are real. For load tests of a whole stack on a machine that could not
compute so much.
"""

import sys
from dataclasses import dataclass, field
from pathlib import Path

from tests.support.timed_engine import TimedEngine

from cluster.context import ServiceContext
from cluster.service import run_service, service_main
from engine.model_folder import ModelConfig
from policy.core import CostCoefficients, Role
from worker.app import WorkerApp
from worker.config import WorkerConfig
from worker.node import Node

ROLES = {
    "prefill": (Role.PREFILL,),
    "decode": (Role.DECODE,),
    "coupled": (Role.PREFILL, Role.DECODE),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedWorkerConfig(WorkerConfig):
    prefill_fixed_s: float = field(default=0.002, metadata={"help": "of a step with prefill", "min": 0.0})
    prefill_token_s: float = field(default=0.0005, metadata={"help": "of a prompt token", "min": 0.0})
    prefill_pair_s: float = field(default=0.0, metadata={"help": "of a pair of tokens", "min": 0.0})
    step_fixed_s: float = field(default=0.02, metadata={"help": "of a step with decodes", "min": 0.0})
    step_request_s: float = field(default=0.002, metadata={"help": "of a decode in it", "min": 0.0})
    step_kv_token_s: float = field(default=0.0, metadata={"help": "of a token of its KV", "min": 0.0})

    def cost(self) -> CostCoefficients:
        return CostCoefficients(
            self.prefill_fixed_s,
            self.prefill_token_s,
            self.prefill_pair_s,
            self.step_fixed_s,
            self.step_request_s,
            self.step_kv_token_s,
            self.transfer_fixed_s,
            self.transfer_bytes_per_s,
        )


class TimedNode(Node):
    """A node with another engine, and nothing else."""

    def _build_engine(self, folder: Path, blocks: int) -> TimedEngine:
        config = self.config
        assert isinstance(config, TimedWorkerConfig)
        return TimedEngine(
            self.layout,
            self.arena.buffer[: blocks * self.layout.block_bytes],
            blocks,
            config.cost(),
            vocab_size=ModelConfig.load(folder).vocab_size,
            context_tokens_max=self.model.context_tokens_max,
            swap_slots=self.swap_slots.slots,
        )


def run(role: str, config: TimedWorkerConfig) -> int:
    async def build(context: ServiceContext) -> WorkerApp:
        return WorkerApp(context, await TimedNode.open(context, config))

    return run_service(config, ROLES[role], build)


if __name__ == "__main__":
    role, *flags = sys.argv[1:]
    sys.exit(service_main(TimedWorkerConfig, role, lambda config: run(role, config), flags))
