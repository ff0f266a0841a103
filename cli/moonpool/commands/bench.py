"""`moonpool bench NAME`: measurements, all printed in one form (DESIGN §10)."""

from moonpool.arguments import CommandGroup
from moonpool.benchmarks import attention, engine, handover, prefix, transfer

GROUP = CommandGroup(
    "bench",
    "measure something",
    (prefix.COMMAND, engine.COMMAND, attention.COMMAND, transfer.COMMAND, handover.COMMAND),
)
