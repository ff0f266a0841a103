"""Every compiled operation against float64, over odd sizes, strides, ragged batches, windows and threads."""

import math
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from engine.native.build import build_library
from engine.native.kernel_library import NativeLibrary
from engine.native.native_ops import NativeOps
from engine.native.packing import WeightDtype, WeightPacker
from engine.native.weight_store import WeightStore
from engine.ops import StepTensors
from engine.torch_ops import TorchOps

pytestmark = pytest.mark.unit

VARIANTS = {"native": (), "avx2": ("-mno-avx512f",), "plain": ("-mno-avx512f", "-mno-avx2")}
SEED = 20240607
EXAMPLES = 25


@pytest.fixture(scope="module")
def libraries(request: pytest.FixtureRequest) -> dict[str, NativeLibrary]:
    folder = request.config.cache.mkdir("native")  # kept between runs: compiling takes longer than the tests
    return {name: NativeLibrary(build_library(folder, extra_flags=flags)) for name, flags in VARIANTS.items()}


@pytest.fixture(scope="module", params=VARIANTS)
def ops(
    request: pytest.FixtureRequest,
    libraries: dict[str, NativeLibrary],
    tmp_path_factory: pytest.TempPathFactory,
) -> NativeOps:
    return _ops(libraries[request.param], tmp_path_factory.mktemp("weights"))


def _ops(library: NativeLibrary, folder: Path, weight_dtype: WeightDtype = WeightDtype.FLOAT32) -> NativeOps:
    return NativeOps(library, WeightPacker(library, WeightStore(folder), weight_dtype))


@pytest.fixture(params=[1, 2], ids=["1-thread", "2-threads"])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def _random(*shape: int, seed: int = SEED) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def _close(actual: Tensor, expected: Tensor, tolerance: float = 2e-6) -> None:
    scale = max(1.0, float(expected.abs().max()))
    torch.testing.assert_close(actual.double(), expected.double(), atol=tolerance * scale, rtol=0)


class TestLinear:
    @settings(max_examples=EXAMPLES)
    @given(
        count=st.integers(1, 40),
        in_features=st.integers(1, 90),
        outs=st.lists(st.integers(1, 75), min_size=1, max_size=3),
        with_bias=st.booleans(),
        padding=st.integers(0, 3),
    )
    def test_any_size_and_any_parts(
        self, ops: NativeOps, count: int, in_features: int, outs: list[int], with_bias: bool, padding: int
    ) -> None:
        parts = [_random(out, in_features, seed=i) for i, out in enumerate(outs)]
        biases = [_random(out, seed=9 + i) for i, out in enumerate(outs)]
        rows = _random(count, in_features + padding)[:, :in_features]
        packed = ops.pack(parts, biases if with_bias else None)
        expected = rows.double() @ torch.cat(parts).double().T
        if with_bias:
            expected += torch.cat(biases).double()
        assert (packed.in_features, packed.out_features) == (in_features, sum(outs))
        _close(ops.linear(rows, packed), expected)

    @settings(max_examples=EXAMPLES)
    @given(
        count=st.integers(1, 30),
        in_features=st.integers(1, 70),
        out=st.integers(1, 75),
        with_bias=st.booleans(),
    )
    def test_gate_and_up(
        self, ops: NativeOps, count: int, in_features: int, out: int, with_bias: bool
    ) -> None:
        gate, up, rows = (
            _random(out, in_features),
            _random(out, in_features, seed=2),
            _random(count, in_features),
        )
        biases = [_random(out, seed=3), None] if with_bias else None
        packed = ops.pack([gate, up], biases)
        gated = rows.double() @ gate.double().T
        if biases is not None:
            gated += biases[0].double()
        _close(
            ops.gated_linear(rows, packed),
            torch.nn.functional.silu(gated) * (rows.double() @ up.double().T),
        )

    def test_a_gate_far_from_zero(self, ops: NativeOps) -> None:
        gate, up = torch.tensor([[1.0]]), torch.tensor([[1.0]])
        rows = torch.tensor([[-1e30], [-200.0], [-88.0], [0.0], [88.0], [200.0]])
        out = ops.gated_linear(rows, ops.pack([gate, up]))
        expected = torch.nn.functional.silu(rows.double()) * rows.double()
        torch.testing.assert_close(out.double(), expected, rtol=1e-6, atol=1e-30)

    @pytest.mark.parametrize("count", [1, 2, 12, 13, 33, 700])
    def test_threads_do_not_change_a_bit(self, ops: NativeOps, count: int) -> None:
        packed, rows = ops.pack([_random(100, 200)]), _random(count, 200)
        results = []
        for threads in (1, 2, 3, 1):
            torch.set_num_threads(threads)
            results.append(ops.linear(rows, packed))
        torch.set_num_threads(1)
        assert all(torch.equal(result, results[0]) for result in results)
        _close(results[0], rows.double() @ _random(100, 200).double().T)

    def test_half_precision_weights_are_widened(self, ops: NativeOps) -> None:
        weight = _random(33, 40).bfloat16()
        _close(ops.linear(_random(3, 40), ops.pack([weight])), _random(3, 40).double() @ weight.double().T)


@pytest.fixture(scope="module")
def int8_ops(ops: NativeOps, tmp_path_factory: pytest.TempPathFactory) -> NativeOps:
    return _ops(ops._library, tmp_path_factory.mktemp("weights"), WeightDtype.INT8)


class TestInt8Weights:
    """Compared with the same product of the rounded weights: rounding itself is tested apart."""

    @settings(max_examples=EXAMPLES)
    @given(
        count=st.integers(1, 45),
        in_features=st.integers(1, 90),
        outs=st.lists(st.integers(1, 75), min_size=1, max_size=3),
        with_bias=st.booleans(),
    )
    def test_any_size_and_any_parts(
        self, int8_ops: NativeOps, count: int, in_features: int, outs: list[int], with_bias: bool
    ) -> None:
        parts = [_random(out, in_features, seed=i) for i, out in enumerate(outs)]
        biases = [_random(out, seed=9 + i) for i, out in enumerate(outs)]
        rows = _random(count, in_features)
        expected = rows.double() @ torch.cat([_rounded(part) for part in parts]).T
        if with_bias:
            expected += torch.cat(biases).double()
        _close(int8_ops.linear(rows, int8_ops.pack(parts, biases if with_bias else None)), expected)

    @pytest.mark.parametrize("count", [1, 5, 40])
    @pytest.mark.parametrize(("in_features", "out"), [(64, 64), (63, 37)])
    def test_gate_and_up(self, int8_ops: NativeOps, count: int, in_features: int, out: int) -> None:
        gate, up = _random(out, in_features), _random(out, in_features, seed=2)
        rows = _random(count, in_features, seed=3)
        gated = torch.nn.functional.silu(rows.double() @ _rounded(gate).T)
        _close(
            int8_ops.gated_linear(rows, int8_ops.pack([gate, up])), gated * (rows.double() @ _rounded(up).T)
        )

    def test_rounding_is_within_half_a_step_of_each_output(self, int8_ops: NativeOps) -> None:
        weight = _random(40, 30) * torch.logspace(-6, 6, 40).unsqueeze(1)
        weight[7] = 0.0
        product = int8_ops.linear(torch.eye(30), int8_ops.pack([weight])).T
        steps = weight.abs().amax(1, keepdim=True) / 127
        assert bool(((product - weight).abs() <= steps * 0.5001).all())

    def test_what_is_no_number_is_not_rounded_away(self, int8_ops: NativeOps) -> None:
        weight = _random(40, 30)
        weight[3, 4], weight[5, 6], weight[8] = math.nan, -math.inf, weight[8] * 1e-38
        product = int8_ops.linear(torch.eye(30), int8_ops.pack([weight])).T
        assert product.isfinite().all(1).logical_not().nonzero().flatten().tolist() == [3, 5]
        assert bool(((product - weight)[8].abs() <= weight[8].abs().max() / 127 * 0.51).all())


def _rounded(weight: Tensor) -> Tensor:
    step = weight.double().abs().amax(1, keepdim=True) / 127
    return (weight.double() / step).round() * step


class TestRowOperations:
    @settings(max_examples=EXAMPLES)
    @given(count=st.integers(1, 9), heads=st.integers(1, 4), width=st.integers(1, 100))
    def test_rms_norm_of_strided_heads(self, ops: NativeOps, count: int, heads: int, width: int) -> None:
        product = _random(count, heads + 2, width)
        rows, weight = product[:, 1 : heads + 1], _random(width, seed=1)
        expected = torch.nn.functional.rms_norm(rows.double(), (width,), weight.double(), 1e-5)
        _close(ops.rms_norm(rows, weight, 1e-5), expected)
        _close(ops.rms_norm(rows[:, 0], weight, 1e-5), expected[:, 0])

    @pytest.mark.parametrize("shape", [(20,), (3, 20), (2, 3, 20), (2, 3, 4, 20)])
    def test_rms_norm_of_any_dimensions(self, ops: NativeOps, shape: tuple[int, ...]) -> None:
        rows, weight = _random(20, *shape[:-1]).movedim(0, -1), _random(20, seed=1)
        expected = torch.nn.functional.rms_norm(rows.double(), (20,), weight.double(), 1e-5)
        _close(ops.rms_norm(rows, weight, 1e-5), expected)

    def test_no_rows(self, ops: NativeOps) -> None:
        weight = ops.pack([_random(7, 20)])
        assert ops.linear(torch.empty(0, 20), weight).shape == (0, 7)
        assert ops.rms_norm(torch.empty(0, 20), torch.ones(20), 1e-5).shape == (0, 20)

    @pytest.mark.parametrize("shape", [(1, 7), (5, 576), (200, 1000)])
    def test_add_rms_norm(self, ops: NativeOps, threads: int, shape: tuple[int, int]) -> None:
        delta, residual, weight = _random(*shape), _random(*shape, seed=1), _random(shape[1], seed=2)
        total = residual.double() + delta.double()
        normed = ops.add_rms_norm(delta, residual, weight, 1e-6)
        _close(residual, total)
        _close(normed, torch.nn.functional.rms_norm(total, (shape[1],), weight.double(), 1e-6))

    @pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(9, 3, 64), (4, 4, 16), (2, 1, 80), (3, 1, 6)])
    @pytest.mark.parametrize("count", [1, 3, 300])
    def test_rotate(
        self, ops: NativeOps, threads: int, count: int, heads: int, kv_heads: int, dim: int
    ) -> None:
        product = _random(count, heads + 2 * kv_heads, dim)
        twin = product.double()
        angles = _random(count, dim // 2)
        cos, sin = angles.cos(), angles.sin()
        ops.rotate_(product[:, :heads], product[:, heads : heads + kv_heads], cos, sin)
        TorchOps().rotate_(twin[:, :heads], twin[:, heads : heads + kv_heads], cos.double(), sin.double())
        _close(product, twin)

    @pytest.mark.parametrize("count", [1, 5, 300])
    def test_write_kv(self, ops: NativeOps, threads: int, count: int) -> None:
        heads, dim, block_tokens, blocks = 3, 20, 16, 40
        product = _random(count, 5 * heads, dim)
        key, value = product[:, heads : 2 * heads], product[:, 2 * heads : 3 * heads]
        cache = torch.full((blocks, 2, 2, heads, block_tokens, dim), math.nan)
        twin = cache.clone()
        slots = torch.randperm(blocks * block_tokens, generator=torch.Generator().manual_seed(1))[:count]
        ops.write_kv(cache[:, 1, 0], cache[:, 1, 1], key, value, slots)
        TorchOps().write_kv(twin[:, 1, 0], twin[:, 1, 1], key, value, slots)
        assert torch.equal(cache.nan_to_num(-1.0), twin.nan_to_num(-1.0))


class Scene:
    """Sequences over a paged cache whose other slots are NaN, and the attention they must get, in float64."""

    def __init__(
        self,
        sequences: list[tuple[int, int]],
        *,
        heads: int = 9,
        kv_heads: int = 3,
        dim: int = 16,
        block_tokens: int = 16,
        window: int | None = None,
        decodes: int | None = None,
    ) -> None:
        self.window, self.scale = window, dim**-0.5
        news = [new for _, new in sequences]
        totals = [context + new for context, new in sequences]
        block_counts = [-(-total // block_tokens) for total in totals]
        blocks = sum(block_counts) + 3
        order = torch.randperm(blocks, generator=torch.Generator().manual_seed(7)).to(torch.int32)
        cache = torch.full((blocks, 2, 2, kv_heads, block_tokens, dim), math.nan)
        self.keys, self.values = cache[:, 1, 0], cache[:, 1, 1]
        table = torch.zeros(len(sequences), max(block_counts) + 1, dtype=torch.int32)
        product = _random(sum(news), heads + 2, dim)
        self.query = product[:, :heads]
        self.expected = torch.empty(sum(news), heads, dim, dtype=torch.float64)
        used, row = 0, 0
        for index, (context, new) in enumerate(sequences):
            total, count = context + new, block_counts[index]
            ids = order[used : used + count]
            used += count
            table[index, :count] = ids
            keys, values = (_random(total, kv_heads, dim, seed=10 * index + i) for i in (1, 2))
            slots = ids.long()[torch.arange(total) // block_tokens] * block_tokens
            slots += torch.arange(total) % block_tokens
            TorchOps().write_kv(self.keys, self.values, keys, values, slots)
            self.expected[row : row + new] = _reference(
                self.query[row : row + new].double(), keys.double(), values.double(), self.scale, window
            )
            row += new
        self.step = StepTensors(
            token_ids=torch.zeros(row, dtype=torch.int64),
            positions=torch.zeros(row, dtype=torch.int64),
            slots=torch.zeros(row, dtype=torch.int64),
            query_starts=torch.tensor([0, *news], dtype=torch.int32).cumsum(0, dtype=torch.int32),
            kv_tokens=torch.tensor(totals, dtype=torch.int32),
            block_table=table,
            decodes=next((i for i, new in enumerate(news) if new > 1), len(news))
            if decodes is None
            else decodes,
            query_tokens_max=max(news),
            kv_tokens_max=max(totals),
        )

    def attend(self, ops: NativeOps) -> Tensor:
        return ops.attend(self.query, self.keys, self.values, self.step, self.scale, self.window)

    def check(self, ops: NativeOps) -> None:
        _close(self.attend(ops), self.expected)


def _reference(query: Tensor, keys: Tensor, values: Tensor, scale: float, window: int | None) -> Tensor:
    """[n, H, D] over [tokens, K, D], as the formula says it."""
    new, heads, _ = query.shape
    tokens, kv_heads, _ = keys.shape
    group = heads // kv_heads
    scores = torch.einsum("nhd,thd->hnt", query, keys.repeat_interleave(group, 1)) * scale
    position = torch.arange(tokens - new, tokens).unsqueeze(1)
    seen = torch.arange(tokens) <= position
    if window is not None:
        seen &= torch.arange(tokens) > position - window
    weights = scores.masked_fill(~seen, -math.inf).softmax(-1)
    return torch.einsum("hnt,thd->nhd", weights, values.repeat_interleave(group, 1))


SHAPES = [(9, 3, 64), (8, 2, 128), (4, 4, 16), (5, 1, 32), (6, 1, 80), (2, 2, 96), (3, 1, 24)]


class TestAttention:
    @pytest.mark.parametrize(("heads", "kv_heads", "dim"), SHAPES)
    @pytest.mark.parametrize("window", [None, 1, 21])
    def test_head_shapes(
        self, ops: NativeOps, heads: int, kv_heads: int, dim: int, window: int | None
    ) -> None:
        sequences = [(0, 1), (40, 1), (0, 70), (33, 20)]
        Scene(sequences, heads=heads, kv_heads=kv_heads, dim=dim, window=window).check(ops)

    @pytest.mark.parametrize("tokens", [1, 15, 16, 17, 63, 64, 65, 127, 128, 129, 256, 257])
    def test_lengths_around_blocks_and_tiles(self, ops: NativeOps, tokens: int, threads: int) -> None:
        Scene([(tokens - 1, 1), (0, tokens), (5, tokens)], kv_heads=1, heads=3, decodes=1).check(ops)

    @pytest.mark.parametrize("window", [1, 100, 128, 300])
    def test_windows_over_more_than_two_tiles(self, ops: NativeOps, window: int) -> None:
        """With tiles that the window cuts, tiles before it, and tiles within that it does not touch."""
        Scene([(0, 400), (290, 130)], kv_heads=1, heads=3, window=window).check(ops)

    @settings(max_examples=EXAMPLES)
    @given(
        decodes=st.lists(st.tuples(st.integers(0, 150), st.just(1)), max_size=4),
        prefills=st.lists(st.tuples(st.integers(0, 150), st.integers(1, 150)), max_size=3),
        window=st.none() | st.integers(1, 170),
        block_tokens=st.sampled_from([1, 4, 7, 16, 32]),
    )
    def test_ragged_batches(
        self,
        ops: NativeOps,
        decodes: list[tuple[int, int]],
        prefills: list[tuple[int, int]],
        window: int | None,
        block_tokens: int,
    ) -> None:
        sequences = decodes + prefills
        if sequences:
            Scene(sequences, window=window, block_tokens=block_tokens, decodes=len(decodes)).check(ops)

    @pytest.mark.parametrize("window", [None, 4200])
    def test_a_context_of_more_chunks_than_there_may_be(
        self, ops: NativeOps, threads: int, window: int | None
    ) -> None:
        Scene([(4500, 1), (64 * 64 - 1, 1), (64 * 64, 1)], heads=2, kv_heads=1, window=window).check(ops)

    def test_more_decodes_than_partial_results_are_kept_for(self, ops: NativeOps, threads: int) -> None:
        Scene([(900, 1)] * 150 + [(20, 3)], heads=2, kv_heads=1, dim=16, decodes=150).check(ops)

    def test_scores_of_any_size(self, ops: NativeOps) -> None:
        scene = Scene([(100, 1), (30, 50)])
        scene.scale = 60.0
        keys = torch.nan_to_num(scene.keys)
        twin = TorchOps().attend(
            scene.query.double(),
            keys.double(),
            torch.nan_to_num(scene.values).double(),
            scene.step,
            60.0,
            None,
        )
        _close(scene.attend(ops), twin, tolerance=2e-5)

    def test_a_sequence_gets_the_same_bits_in_any_batch_and_with_any_threads(self, ops: NativeOps) -> None:
        results = []
        for threads in (1, 2, 3, 3):
            torch.set_num_threads(threads)
            results.append(Scene([(300, 1), (77, 1), (10, 40)]).attend(ops))
        torch.set_num_threads(1)
        assert all(torch.equal(result, results[0]) for result in results)
        alone, among = Scene([(300, 1)]), Scene([(300, 1), (77, 1), (10, 40)])
        among.query[0] = alone.query[0]
        assert torch.equal(among.attend(ops)[0], alone.attend(ops)[0])


class TestSharedWeights:
    def test_a_second_engine_maps_what_the_first_packed(
        self, libraries: dict[str, NativeLibrary], tmp_path: Path
    ) -> None:
        parts, rows = [_random(600, 500), _random(200, 500, seed=3)], _random(3, 500)
        first, second = (_ops(libraries["native"], tmp_path) for _ in range(2))
        packed = first.pack(parts)
        again = second.pack([part.clone() for part in parts])
        assert len(list(tmp_path.iterdir())) == 1
        assert torch.equal(first.linear(rows, packed), second.linear(rows, again))
        _close(second.linear(rows, again), rows.double() @ torch.cat(parts).double().T)

    def test_other_numbers_or_another_cut_is_another_weight(
        self, libraries: dict[str, NativeLibrary], tmp_path: Path
    ) -> None:
        ops = _ops(libraries["native"], tmp_path)
        matrix = _random(800, 500)
        changed = matrix.clone()
        changed[799, 499] += 1
        for parts in ([matrix], [changed], list(matrix.split([300, 500])), list(matrix.split(400))):
            ops.pack(parts)
        assert len(list(tmp_path.iterdir())) == 4
