"""Instance records as the registry gives them."""

from tests.support.views import BLOCK_TOKENS, FINGERPRINT, MODEL

from cluster.messages import InstanceRecord, ModelInfo
from kvindex.core import InstanceId
from policy.core import Role

MODEL_INFO = ModelInfo(MODEL, FINGERPRINT, 8192, BLOCK_TOKENS, 700_000, 30, "float32")


def worker(name: str, *roles: Role, incarnation: int = 1, blocks: int = 4096) -> InstanceRecord:
    return InstanceRecord(
        instance=InstanceId(name),
        incarnation=incarnation,
        roles=roles,
        host="127.0.0.1",
        http_url="http://127.0.0.1:1",
        model=MODEL_INFO,
        blocks=blocks,
    )


def gateway(name: str) -> InstanceRecord:
    return InstanceRecord(InstanceId(name), 1, (Role.GATEWAY,), "127.0.0.1", "http://127.0.0.1:1")


def registry(*records: InstanceRecord) -> dict[InstanceId, InstanceRecord]:
    return {record.instance: record for record in records}
