"""How a registered instance enters the view that decisions are made on."""

from cluster.messages import InstanceRecord
from policy.view import InstanceView


def instance_view(record: InstanceRecord, now_s: float) -> InstanceView | None:
    """None where the instance serves no model: nothing is ever placed there."""
    if record.model is None:
        return None
    return InstanceView(
        instance=record.instance,
        incarnation=record.incarnation,
        roles=record.roles,
        host=record.host,
        model=record.model.name,
        fingerprint=record.model.fingerprint,
        blocks=record.blocks,
        block_bytes=record.model.block_bytes,
        block_tokens=record.model.block_tokens,
        heard_at_s=now_s,
    )
