"""Builders of views and requests for the tests of `policy`."""

from kvindex.core import InstanceId
from policy.core import (
    CostCoefficients,
    InstanceState,
    LoadSnapshot,
    QueuedRequest,
    RequestId,
    Role,
    RunningRequest,
    ScheduleRequest,
)
from policy.view import ClusterView, InstanceView

MODEL = "smollm2"
FINGERPRINT = "f0"
BLOCK_TOKENS = 16
P1, P2, D1, D2, C1 = (InstanceId(name) for name in ("p1", "p2", "d1", "d2", "c1"))

COST = CostCoefficients(
    prefill_fixed_s=0.01,
    prefill_per_token_s=1e-3,
    prefill_per_token_pair_s=1e-8,
    step_fixed_s=0.03,
    step_per_request_s=0.01,
    step_per_kv_token_s=1e-6,
    transfer_fixed_s=1e-3,
    transfer_bytes_per_s=1e9,
)


def instance(
    name: str,
    *roles: Role,
    load: LoadSnapshot | None = None,
    model: str = MODEL,
    fingerprint: str = FINGERPRINT,
    blocks: int = 4096,
    block_bytes: int = 700_000,
    heard_at_s: float = 0.0,
    incarnation: int = 1,
) -> InstanceView:
    return InstanceView(
        instance=InstanceId(name),
        incarnation=incarnation,
        roles=roles,
        host="127.0.0.1",
        model=model,
        fingerprint=fingerprint,
        blocks=blocks,
        block_bytes=block_bytes,
        block_tokens=BLOCK_TOKENS,
        heard_at_s=heard_at_s,
        load=load,
        load_seq=0 if load is None else 1,
    )


def prefill(
    name: str, *queued: QueuedRequest, cost: CostCoefficients = COST, **fields: object
) -> InstanceView:
    return instance(name, Role.PREFILL, load=snapshot(name, queued=queued, cost=cost), **fields)


def decode(
    name: str, *running: RunningRequest, free: int = 4096, cost: CostCoefficients = COST, **fields: object
) -> InstanceView:
    load = snapshot(name, running=running, blocks_free=free, cost=cost)
    return instance(name, Role.DECODE, load=load, **fields)


def coupled(name: str, cost: CostCoefficients = COST, **fields: object) -> InstanceView:
    load = snapshot(name, blocks_free=4096, cost=cost)
    return instance(name, Role.PREFILL, Role.DECODE, load=load, **fields)


def snapshot(
    name: str,
    *,
    queued: tuple[QueuedRequest, ...] = (),
    running: tuple[RunningRequest, ...] = (),
    blocks_free: int = 0,
    state: InstanceState = InstanceState.SERVING,
    cost: CostCoefficients | None = COST,
) -> LoadSnapshot:
    return LoadSnapshot(
        instance=InstanceId(name),
        roles=(),
        state=state,
        queued=queued,
        running=running,
        blocks=4096,
        blocks_free=blocks_free,
        cost=cost,
    )


def queued(request_id: str, new_tokens: int, decode_name: str = "d1", attempt: int = 1) -> QueuedRequest:
    return QueuedRequest(RequestId(request_id), attempt, InstanceId(decode_name), new_tokens, 0, 64)


def running(request_id: str, kv_tokens: int = 100, attempt: int = 1) -> RunningRequest:
    return RunningRequest(RequestId(request_id), attempt, kv_tokens, 10, 64, True)


def view_of(*instances: InstanceView) -> ClusterView:
    return ClusterView({known.instance: known for known in instances})


def request(
    name: str = "r", *, prompt_tokens: int = 1000, attempt: int = 1, **fields: object
) -> ScheduleRequest:
    values: dict[str, object] = {
        "model": MODEL,
        "fingerprint": FINGERPRINT,
        "output_tokens_max": 64,
        "block_hashes": b"",
        "deadline_s": 600.0,
        **fields,
    }
    return ScheduleRequest(request_id=RequestId(name), attempt=attempt, prompt_tokens=prompt_tokens, **values)
