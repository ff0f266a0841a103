"""A simulated instance as it is registered."""

from policy.view import InstanceView
from simulator.node import Node
from simulator.setup import ClusterSetup

MODEL = "simulated"


def registered(node: Node, setup: ClusterSetup, now_s: float) -> InstanceView:
    return InstanceView(
        instance=node.instance,
        incarnation=node.incarnation,
        roles=node.roles,
        host=node.instance,
        model=MODEL,
        fingerprint=MODEL,
        blocks=node.memory.blocks,
        block_bytes=setup.block_bytes,
        block_tokens=setup.block_tokens,
        heard_at_s=now_s,
    )
