import pytest
from safetensors import safe_open
from tests.support.models import tiny_folder

from engine.layout import KVLayout
from engine.model_folder import ModelConfig
from moonpool.benchmarks.engine import CASES, Case, Phase, Sample, measure, summarise
from moonpool.benchmarks.engine_under_test import EngineUnderTest, decode_bytes

pytestmark = pytest.mark.unit

DECODE = Case(Phase.DECODE, 2, 20, 3)
PREFILL = Case(Phase.PREFILL, 1, 40, 0)


def test_cases_are_named_by_what_varies() -> None:
    assert [case.name for case in CASES] == [
        "prefill_512",
        "prefill_2048",
        "decode_1",
        "decode_8",
        "decode_32",
    ]


def test_a_prefill_is_its_rate_alone() -> None:
    (rate,) = summarise(
        PREFILL, [Sample(10.0, None), Sample(30.0, None), Sample(20.0, None)], 0, {"threads": 2}
    )
    assert (rate.bench, rate.case, rate.metric, rate.unit) == ("engine", "prefill_40", "rate", "tokens/s")
    assert (rate.value, rate.n, rate.min, rate.max) == (20.0, 3, 10.0, 30.0)
    assert rate.context == {"threads": 2, "sequences": 1, "tokens": 40}


def test_a_decode_is_compared_with_the_bandwidth_of_the_same_moment() -> None:
    """Two sequences, 100 bytes a step: at 1000 bytes/s memory allows 20 tokens/s."""
    rate, bound, share = summarise(DECODE, [Sample(10.0, 1000.0), Sample(10.0, 4000.0)], 100, {})
    assert rate.value == 10.0
    assert (bound.case, bound.min, bound.max) == ("decode_2/bandwidth_bound", 20.0, 80.0)
    assert (share.metric, share.min, share.max) == ("share_of_bandwidth_bound", 0.125, 0.5)
    assert share.context["step_bytes"] == 100


def test_every_case_gives_lines_and_the_bandwidth_is_told_once() -> None:
    results = measure(str(tiny_folder()), [PREFILL, DECODE], threads=1, backend=None, repeats=2)
    assert [(r.case, r.metric) for r in results] == [
        ("prefill_40", "rate"),
        ("decode_2", "rate"),
        ("decode_2/bandwidth_bound", "rate"),
        ("decode_2", "share_of_bandwidth_bound"),
        ("memory_read", "rate"),
    ]
    assert all(r.n == 2 and r.min > 0 for r in results)
    assert results[0].context["threads"] == 1


def test_copied_contexts_decode_as_computed_ones_do() -> None:
    engine = EngineUnderTest(tiny_folder(), threads=1, backend=None, sequences_max=3, tokens_max=64)
    prompt = list(range(5, 42))
    engine.start([prompt] * 3)
    computed = [engine.decode_step() for _ in range(4)]
    engine.start_copies(prompt, 3)
    assert [engine.decode_step() for _ in range(4)] == computed


def test_a_rewound_batch_never_outgrows_its_blocks() -> None:
    engine = EngineUnderTest(tiny_folder(), threads=1, backend=None, sequences_max=2, tokens_max=16)
    engine.start([[1, 2, 3]] * 2)
    for _ in range(4):
        for _ in range(12):
            engine.decode_step()
        engine.rewind(12)


def test_a_decode_step_reads_every_weight_and_each_context() -> None:
    """The tiny model has a head of its own: of its embedding a step reads a row a sequence, not counted."""
    folder = tiny_folder()
    with safe_open(folder / "model.safetensors", framework="np") as stored:
        sizes = {name: stored.get_tensor(name).nbytes for name in stored.keys()}  # noqa: SIM118 - no mapping
    weights = sum(sizes.values()) - sizes["model.embed_tokens.weight"]
    config = ModelConfig.load(folder)
    assert decode_bytes(config, 1, 0) == weights
    assert decode_bytes(config, 3, 10) == weights + 30 * KVLayout.of(config).token_bytes
