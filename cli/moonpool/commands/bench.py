"""`moonpool bench NAME`: measurements, all printed in one form (DESIGN §10)."""

from moonpool.arguments import CommandGroup
from moonpool.benchmarks import prefix

GROUP = CommandGroup("bench", "measure something", (prefix.COMMAND,))
