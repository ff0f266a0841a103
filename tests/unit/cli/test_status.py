import pytest

from cluster.messages import InstanceRecord, ModelInfo
from kvindex.core import InstanceId, Tier
from moonpool.cluster_client import DescribedInstance
from moonpool.commands.status import as_object, as_table
from policy.core import InstanceState, LoadSnapshot, QueuedRequest, RequestId, Role, RunningRequest, TierUse

pytestmark = pytest.mark.unit

MODEL = ModelInfo("tiny", "f" * 32, 2048, 16, 4096, 2, "float32")
NUMBERS = (
    "requests",
    "queued",
    "running",
    "blocks",
    "blocks_free",
    "blocks_cached",
    "blocks_in_use",
    "blocks_indexed",
    "prefill_tokens_total",
    "cached_tokens_total",
    "decode_tokens_total",
)


def described(
    name: str, role: Role, load: LoadSnapshot | None, model: ModelInfo | None = None
) -> DescribedInstance:
    record = InstanceRecord(InstanceId(name), 7, (role,), "127.0.0.1", f"http://{name}:1", model)
    return DescribedInstance(record, load)


def loaded(name: str, role: Role, **numbers: object) -> DescribedInstance:
    load = LoadSnapshot(InstanceId(name), (role,), InstanceState.SERVING, **numbers)
    return described(name, role, load, MODEL)


PREFILL = loaded(
    "prefill-0",
    Role.PREFILL,
    queued=(QueuedRequest(RequestId("r1"), 1, InstanceId("decode-0"), 10, 0, 5),),
    requests=1,
    blocks=100,
    blocks_free=60,
    blocks_cached=30,
    blocks_in_use=10,
    prefill_tokens_total=500,
    cached_tokens_total=32,
)
DECODE = loaded(
    "decode-0",
    Role.DECODE,
    running=(
        RunningRequest(RequestId("r2"), 1, 20, 3, 5, True),
        RunningRequest(RequestId("r3"), 1, 20, 3, 5, False),
    ),
    requests=2,
    blocks=50,
    blocks_free=46,
    blocks_in_use=4,
    decode_tokens_total=7,
)
SILENT = described("kvmeta-0", Role.KVMETA, None)


def test_totals_are_the_sums_of_those_that_answered() -> None:
    totals = as_object([DECODE, SILENT, PREFILL])["totals"]
    assert totals == {
        "instances": 3,
        "unreachable": 1,
        "requests": 3,
        "queued": 1,
        "running": 2,
        "blocks": 150,
        "blocks_free": 106,
        "blocks_cached": 30,
        "blocks_in_use": 14,
        "blocks_indexed": 0,
        "prefill_tokens_total": 500,
        "cached_tokens_total": 32,
        "decode_tokens_total": 7,
    }


def test_an_instance_that_does_not_answer_is_listed_without_numbers() -> None:
    (row,) = as_object([SILENT])["instances"]
    assert row == {
        "instance": "kvmeta-0",
        "roles": ["kvmeta"],
        "state": "unreachable",
        "incarnation": 7,
        "host": "127.0.0.1",
        "http_url": "http://kvmeta-0:1",
        "model": None,
        **dict.fromkeys(NUMBERS),
        "lower_tiers": None,
    }


def test_a_row_tells_what_the_instance_told() -> None:
    (row,) = as_object([PREFILL])["instances"]
    assert row["model"] == "tiny"
    assert row["state"] == "serving"
    assert {name: row[name] for name in NUMBERS} == {
        "requests": 1,
        "queued": 1,
        "running": 0,
        "blocks": 100,
        "blocks_free": 60,
        "blocks_cached": 30,
        "blocks_in_use": 10,
        "blocks_indexed": 0,
        "prefill_tokens_total": 500,
        "cached_tokens_total": 32,
        "decode_tokens_total": 0,
    }


def test_the_table_has_a_row_for_each_and_one_for_all() -> None:
    header, *rows = as_table([DECODE, SILENT]).splitlines()
    names = "queued running blocks free cached in use indexed prefilled from cache decoded"
    assert header.split() == ["instance", "roles", "state", *names.split()]
    assert [row.split() for row in rows] == [
        ["decode-0", "decode", "serving", "0", "2", "50", "46", "0", "4", "0", "0", "0", "7"],
        ["kvmeta-0", "kvmeta", "unreachable", *"-" * 10],
        ["total", "0", "2", "50", "46", "0", "4", "0", "0", "0", "7"],
    ]


def test_tiers_below_are_shown_where_there_are_any() -> None:
    both = loaded("a", Role.PREFILL, lower_tiers=(TierUse(Tier.DRAM, 40, 5), TierUse(Tier.SSD, 100, 7)))
    ssd = loaded("b", Role.DECODE, lower_tiers=(TierUse(Tier.SSD, 10, 3),))
    header, *rows = as_table([both, ssd, SILENT]).splitlines()
    assert header.split()[-4:] == ["in", "dram", "in", "ssd"]
    assert [row.split()[-2:] for row in rows] == [
        ["5/40", "7/100"],
        ["-", "3/10"],
        ["-", "-"],
        ["5/40", "10/110"],
    ]
    shown = as_object([both, PREFILL])["instances"]
    assert [row["lower_tiers"] for row in shown] == [
        [{"tier": "dram", "blocks": 40, "blocks_used": 5}, {"tier": "ssd", "blocks": 100, "blocks_used": 7}],
        [],
    ]


def test_an_empty_cluster_is_no_error() -> None:
    assert as_object([])["instances"] == []
    assert len(as_table([]).splitlines()) == 2
