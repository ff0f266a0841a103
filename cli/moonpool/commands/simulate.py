"""`moonpool simulate [NAME]`: what policies would do, without a cluster. Without a name: `cluster`."""

from moonpool.arguments import CommandGroup
from moonpool.simulations import cache, cluster, decisions, recording

GROUP = CommandGroup(
    "simulate",
    "try policies on a trace, without a cluster",
    (cache.COMMAND, cluster.COMMAND, decisions.COMMAND, recording.COMMAND),
    default=cluster.COMMAND,
)
