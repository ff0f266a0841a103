"""A recorded live run as a run to simulate: its arrivals, its instances, and what they measured of
themselves.

Nothing is fitted: steps take what the instances announced, as many times as long as they really took then;
a message takes what the median of the recorded ones took. Who came or left during the run was there all the
time. Of a request that was placed several times the first question counts, for the simulation has its own
refusals.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from statistics import median

from cluster.folds import Decided, LoadHeard, Registered
from cluster.messages import InstanceRecord, ModelInfo
from cluster.recording import Begun, Line
from cluster.reporter import LOAD_GAP_S_MIN
from kvhash import HASH_BYTES
from kvindex.core import InstanceId
from policy.core import CostCoefficients, LoadSnapshot, RequestId, Role, ScheduleRequest
from simulator.setup import AnnouncedCost, ClusterSetup, NodeShape
from simulator.trace import TracedRequest

NO_TARGET_S = 3600.0
"""Stands for a target where none was set."""
SAME_MEMORY_BYTES_PER_S = 1e15
"""Blocks lie where they are computed on: nothing is brought up."""


class RunError(Exception):
    """The recorded run cannot be simulated; the text says why."""


@dataclass(frozen=True, slots=True)
class WorkerLimits:
    """Settings of the workers, which no message tells."""

    step_tokens_max: int = 512
    batch_requests_max: int = 64
    prefill_requests_max: int = 4
    queue_requests_max: int = 256


@dataclass(frozen=True, slots=True)
class RecordedRequest:
    request_id: RequestId
    asked_unix_s: float
    """When the gateway asked for a place, by the time of day."""
    traced: TracedRequest
    """`arrived_ms` counts from the first request. Its answer has as many tokens as it had, or where it did
    not end as many as it might have had."""
    ended: bool


@dataclass(frozen=True, slots=True)
class RecordedRun:
    requests: tuple[RecordedRequest, ...]
    """In the order in which they were asked for."""
    setup: ClusterSetup


@dataclass(frozen=True, slots=True)
class _Meter:
    """What an instance told of its steps, and when it did."""

    told_at_s: float
    step_s_total: float
    step_predicted_s_total: float


@dataclass(slots=True)
class _Read:
    """What the lines have said so far."""

    begun_s: float = 0.0
    begun_unix_s: float = 0.0
    booking_ttl_s: float = 0.0
    workers: dict[InstanceId, InstanceRecord] = field(default_factory=dict)
    costs: list[tuple[float, InstanceId, CostCoefficients]] = field(default_factory=list)
    """From when each holds."""
    meters: dict[InstanceId, "_Meter"] = field(default_factory=dict)
    output_tokens: dict[RequestId, int] = field(default_factory=dict)
    first: dict[RequestId, tuple[float, Decided]] = field(default_factory=dict)
    """Of each request the first decision, and when it was asked for."""
    lags_s: list[float] = field(default_factory=list)


def recorded_run(lines: Iterable[Line], limits: WorkerLimits) -> RecordedRun:
    """RunError where there is nothing to simulate, or no simulation of it."""
    read = _read(lines)
    if not read.first:
        raise RunError("the recording has no decision")
    workers = _of_one_model(read.workers.values())
    questions = sorted(read.first.values(), key=lambda question: question[0])
    first_s = questions[0][0]
    block_ids: dict[bytes, int] = {}
    requests = tuple(_request(read, asked_s, decided, first_s, block_ids) for asked_s, decided in questions)
    return RecordedRun(requests, _setup(read, workers, first_s, questions[0][1], limits))


def _read(lines: Iterable[Line]) -> _Read:
    read = _Read()
    for line in lines:
        match line.entry:
            case Begun(booking_ttl_s=booking_ttl_s, unix_s=unix_s):
                read.begun_s, read.begun_unix_s, read.booking_ttl_s = line.at_s, unix_s, booking_ttl_s
            case Registered(instances):
                workers = {record.instance: record for record in instances if record.model is not None}
                read.workers = {**read.workers, **workers}
            case LoadHeard(load=load, lag_s=lag_s):
                if lag_s is not None:
                    read.lags_s.append(lag_s)
                if load.cost is not None:
                    _read_cost(read, load, load.cost, line.at_s - (lag_s or 0.0))
                for ended in load.ended:
                    if ended.output_tokens is not None:
                        read.output_tokens[ended.request_id] = ended.output_tokens
            case Decided(request=request, came_at_s=came_at_s, lag_s=lag_s) as decided:
                read.lags_s.append(lag_s)
                read.first.setdefault(request.request_id, (came_at_s - lag_s, decided))
    return read


def _read_cost(read: _Read, load: LoadSnapshot, cost: CostCoefficients, told_at_s: float) -> None:
    """The first is taken as announced. After that it is known how long steps really took: those that a
    snapshot is the first to tell of are told for the time since the snapshot that told of the ones before, or
    since a little earlier, as that came late."""
    name, now = load.instance, _Meter(told_at_s, load.step_s_total, load.step_predicted_s_total)
    before = read.meters.setdefault(name, now)
    if before is now:
        read.costs.append((told_at_s - LOAD_GAP_S_MIN, name, cost))
    elif now.step_s_total != before.step_s_total:
        read.meters[name] = now
        elapsed_s = now.step_s_total - before.step_s_total
        predicted_s = now.step_predicted_s_total - before.step_predicted_s_total
        # Neither, where it began anew.
        if elapsed_s > 0.0 and predicted_s > 0.0:
            since_s = before.told_at_s - LOAD_GAP_S_MIN
            read.costs.append((since_s, name, _slower(cost, elapsed_s / predicted_s)))


def _slower(cost: CostCoefficients, times: float) -> CostCoefficients:
    """Whose steps take so many times as long."""
    return replace(
        cost,
        prefill_fixed_s=cost.prefill_fixed_s * times,
        prefill_per_token_s=cost.prefill_per_token_s * times,
        prefill_per_token_pair_s=cost.prefill_per_token_pair_s * times,
        step_fixed_s=cost.step_fixed_s * times,
        step_per_request_s=cost.step_per_request_s * times,
        step_per_kv_token_s=cost.step_per_kv_token_s * times,
    )


def _of_one_model(records: Iterable[InstanceRecord]) -> list[InstanceRecord]:
    """By their names."""
    workers = sorted(records, key=lambda record: record.instance)
    models = {record.model.fingerprint: record.model.name for record in workers if record.model is not None}
    if len(models) != 1:
        names = ", ".join(sorted(models.values())) or "none"
        raise RunError(f"one model can be simulated; the recording has {len(models)}: {names}")
    return workers


def _request(
    read: _Read, asked_s: float, decided: Decided, first_s: float, block_ids: dict[bytes, int]
) -> RecordedRequest:
    request = decided.request
    output_tokens = read.output_tokens.get(request.request_id)
    return RecordedRequest(
        request.request_id,
        asked_s - read.begun_s + read.begun_unix_s,
        TracedRequest(
            round((asked_s - first_s) * 1e3),
            request.prompt_tokens,
            request.output_tokens_max if output_tokens is None else output_tokens,
            tuple(block_ids.setdefault(one, len(block_ids)) for one in _hashes(request)),
            request.priority,
        ),
        ended=output_tokens is not None,
    )


def _hashes(request: ScheduleRequest) -> Iterator[bytes]:
    packed = request.block_hashes
    return (packed[start : start + HASH_BYTES] for start in range(0, len(packed), HASH_BYTES))


def _setup(
    read: _Read, workers: Sequence[InstanceRecord], first_s: float, first: Decided, limits: WorkerLimits
) -> ClusterSetup:
    kinds = {
        "prefill": [one for one in workers if Role.PREFILL in one.roles and Role.DECODE not in one.roles],
        "decode": [one for one in workers if Role.DECODE in one.roles and Role.PREFILL not in one.roles],
        "coupled": [one for one in workers if {Role.PREFILL, Role.DECODE} <= set(one.roles)],
    }
    names: dict[InstanceId, InstanceId] = {}
    for kind, records in kinds.items():
        for record in records:
            # As the simulation numbers its instances.
            names[record.instance] = InstanceId(f"{kind}-{len(names)}")
    prefilling = kinds["prefill"] or kinds["coupled"]
    decoding = kinds["decode"] or kinds["coupled"]
    if not prefilling or not decoding:
        raise RunError("the recording has no instance that prefills, or none that decodes")
    node = _shape(read, prefilling, limits)
    return ClusterSetup(
        prefill=len(kinds["prefill"]),
        decode=len(kinds["decode"]),
        coupled=len(kinds["coupled"]),
        node=node,
        decode_node=_shape(read, kinds["decode"], limits) if kinds["decode"] else None,
        announced=_announced(read, names, first_s),
        block_tokens=_model(workers[0]).block_tokens,
        placement=first.limits,
        ttft_s_max=_target_s(first.request.ttft_ms_max, first.limits.ttft_ms_default),
        tbt_s_max=_target_s(first.request.tbt_ms_max, first.limits.tbt_ms_default),
        message_s=max(0.0, median(read.lags_s)),
        booking_ttl_s=read.booking_ttl_s,
    )


def _shape(read: _Read, records: Sequence[InstanceRecord], limits: WorkerLimits) -> NodeShape:
    """RunError where none of them told its cost."""
    names = {record.instance for record in records}
    cost = next((cost for _, name, cost in read.costs if name in names), None)
    if cost is None:
        raise RunError(f"no cost was announced by {', '.join(sorted(names))}")
    model, blocks = _model(records[0]), min(record.blocks for record in records)
    return NodeShape(
        cost=cost,
        kv_bytes_per_token=model.block_bytes // model.block_tokens,
        card_bytes_per_s=cost.transfer_bytes_per_s,
        host_bytes_per_s=SAME_MEMORY_BYTES_PER_S,
        layers=model.layers,
        device_blocks=blocks,
        pool_blocks=blocks,
        prefill_step_tokens_max=limits.step_tokens_max,
        coupled_step_tokens_max=limits.step_tokens_max,
        batch_requests_max=limits.batch_requests_max,
        prefill_requests_max=limits.prefill_requests_max,
        queue_requests_max=limits.queue_requests_max,
    )


def _announced(read: _Read, names: dict[InstanceId, InstanceId], first_s: float) -> tuple[AnnouncedCost, ...]:
    """What was known before the first request holds from its arrival on. What a first token takes beside is
    measured once there were some: until then it is what was measured first."""
    measured: dict[InstanceId, float] = {}
    for _, name, cost in read.costs:
        if cost.first_token_fixed_s > 0.0:
            measured.setdefault(name, cost.first_token_fixed_s)
    announced = []
    for at_s, name, cost in read.costs:
        if name not in names:
            continue
        if cost.first_token_fixed_s == 0.0:
            cost = replace(cost, first_token_fixed_s=measured.get(name, 0.0))
        announced.append(AnnouncedCost(max(0.0, at_s - first_s), names[name], cost))
    return tuple(announced)


def _target_s(asked_ms: float | None, default_ms: float | None) -> float:
    target_ms = asked_ms if asked_ms is not None else default_ms
    return NO_TARGET_S if target_ms is None else max(target_ms / 1e3, 1e-3)


def _model(record: InstanceRecord) -> ModelInfo:
    assert record.model is not None, "only those that serve a model are workers"
    return record.model
