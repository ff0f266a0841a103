"""Checks of every kernel against a plain float64 reference; the same on the CPU's interpreter and on a GPU.

The cache is filled with NaN and holds numbers only where a token was written: a kernel that reads any other
slot into its result fails. Quirks of the interpreter that this copes with: bfloat16 products are garbage
there unless done in float32 (the kernels do that where they are interpreted), and every program runs in
Python, so shapes are tiny.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

# Of a result of about unit size: what rounding of inputs of products and of the result itself may do.
TOLERANCES = {torch.float32: 5e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}

SMALL_SHARED_BYTES = 99 * 1024


@dataclass(frozen=True, slots=True)
class AttentionCase:
    """Runs are (cached tokens, new tokens) of each sequence."""

    runs: tuple[tuple[int, int], ...]
    heads: int = 9
    kv_heads: int = 3
    head_dim: int = 64
    block_tokens: int = 16
    window_tokens: int | None = None
    dtype: torch.dtype = torch.float32

    def __str__(self) -> str:
        runs = "+".join(f"{context}:{new}" for context, new in self.runs)
        window = f"-w{self.window_tokens}" if self.window_tokens else ""
        dtype = str(self.dtype).removeprefix("torch.")
        return f"{runs}-h{self.heads}/{self.kv_heads}-d{self.head_dim}-t{self.block_tokens}{window}-{dtype}"


@dataclass(frozen=True, slots=True)
class PagedBatch:
    """A layer of a paged cache with some sequences in it, and the same keys and values unpaged."""

    keys: Tensor
    values: Tensor
    block_table: Tensor
    kv_tokens: Tensor
    query_starts: Tensor
    query: Tensor
    plain_keys: tuple[Tensor, ...]
    plain_values: tuple[Tensor, ...]


def paged_batch(case: AttentionCase, device: str, seed: int = 0) -> PagedBatch:
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(case.dtype)

    totals = [context + new for context, new in case.runs]
    block_counts = [-(-total // case.block_tokens) for total in totals]
    # Two layers, of which the second is used: a layer's blocks do not lie one behind the other.
    blocks = sum(block_counts) + 3
    cache = torch.full(
        (blocks, 2, 2, case.kv_heads, case.block_tokens, case.head_dim), float("nan"), dtype=case.dtype
    )
    order = torch.randperm(blocks, generator=generator).tolist()
    table = torch.zeros(len(totals), max(block_counts) + 1, dtype=torch.int32)
    plain_keys, plain_values = [], []
    for sequence, total in enumerate(totals):
        key, value = normal(total, case.kv_heads, case.head_dim), normal(total, case.kv_heads, case.head_dim)
        plain_keys.append(key.double())
        plain_values.append(value.double())
        for index in range(block_counts[sequence]):
            block_id = order.pop()
            table[sequence, index] = block_id
            part = slice(index * case.block_tokens, min((index + 1) * case.block_tokens, total))
            count = part.stop - part.start
            cache[block_id, 1, 0, :, :count] = key[part].transpose(0, 1)
            cache[block_id, 1, 1, :, :count] = value[part].transpose(0, 1)
    new = torch.tensor([0] + [new for _, new in case.runs])
    cache = cache.to(device)
    return PagedBatch(
        keys=cache[:, 1, 0],
        values=cache[:, 1, 1],
        block_table=table.to(device),
        kv_tokens=torch.tensor(totals, dtype=torch.int32, device=device),
        query_starts=new.cumsum(0).to(torch.int32).to(device),
        # Rows wider than the heads, as in a product of query, key and value together.
        query=normal(int(new.sum()), case.heads + 2, case.head_dim).to(device)[:, : case.heads],
        plain_keys=tuple(plain_keys),
        plain_values=tuple(plain_values),
    )


def attention_reference(case: AttentionCase, batch: PagedBatch, scale: float) -> Tensor:
    """[N, H, D] in float64, by the definition."""
    query = batch.query.cpu().double()
    group = case.heads // case.kv_heads
    results, row = [], 0
    for (context, new), keys, values in zip(case.runs, batch.plain_keys, batch.plain_values, strict=True):
        key_position = torch.arange(context + new)
        query_position = context + torch.arange(new)
        visible = key_position[None, :] <= query_position[:, None]
        if case.window_tokens is not None:
            visible &= key_position[None, :] > query_position[:, None] - case.window_tokens
        per_head = keys.repeat_interleave(group, dim=1)
        scores = torch.einsum("nhd,thd->hnt", query[row : row + new], per_head) * scale
        shares = scores.masked_fill(~visible, float("-inf")).softmax(-1)
        results.append(torch.einsum("hnt,thd->nhd", shares, values.repeat_interleave(group, dim=1)))
        row += new
    return torch.cat(results)


def check_decode_attention(
    case: AttentionCase, device: str, multiprocessors: int, item_tokens_min: int
) -> None:
    """A small chip with short items splits even tiny contexts."""
    from engine.triton_kernels.common import Chip
    from engine.triton_kernels.decode_attention import decode_attention

    batch = paged_batch(case, device)
    scale = case.head_dim**-0.5
    output = torch.full_like(batch.query, float("nan"))
    decode_attention(
        batch.query,
        batch.keys,
        batch.values,
        batch.kv_tokens,
        batch.block_table,
        output,
        scale=scale,
        window_tokens=case.window_tokens,
        chip=Chip(multiprocessors, SMALL_SHARED_BYTES),
        item_tokens_min=item_tokens_min,
    )
    _assert_close(output, attention_reference(case, batch, scale), case.dtype)


def check_decode_of_nothing(device: str) -> None:
    """A padded row has no token: it gets zeros, and its neighbours what they get alone."""
    from engine.triton_kernels.common import Chip
    from engine.triton_kernels.decode_attention import decode_attention

    case = AttentionCase(runs=((16, 1), (4, 1), (39, 1)))
    batch = paged_batch(case, device)
    expected = attention_reference(case, batch, 0.125)
    expected[1] = 0.0
    batch.kv_tokens[1] = 0
    output = torch.full_like(batch.query, float("nan"))
    decode_attention(
        batch.query, batch.keys, batch.values, batch.kv_tokens, batch.block_table, output,
        scale=0.125, window_tokens=None, chip=Chip(1, SMALL_SHARED_BYTES), item_tokens_min=32,
    )  # fmt: skip
    _assert_close(output, expected, case.dtype)


def check_prefill_attention(
    case: AttentionCase,
    device: str,
    shared_bytes: int | None = SMALL_SHARED_BYTES,
    multiprocessors: int = 1,
    part_tokens_min: int = 512,
) -> None:
    """`shared_bytes` decides the size of the tiles; None: that of the device.

    The context is cut into parts where there are many multiprocessors and parts may be short.
    """
    from engine.triton_kernels.common import Chip
    from engine.triton_kernels.prefill_attention import prefill_attention

    batch = paged_batch(case, device)
    scale = case.head_dim**-0.5
    output = torch.full_like(batch.query, float("nan"))
    prefill_attention(
        batch.query,
        batch.keys,
        batch.values,
        batch.query_starts,
        batch.kv_tokens,
        batch.block_table,
        output,
        first_row=0,
        query_tokens_max=max(new for _, new in case.runs),
        kv_tokens_max=max(context + new for context, new in case.runs),
        scale=scale,
        window_tokens=case.window_tokens,
        chip=Chip.of(torch.device(device)) if shared_bytes is None else Chip(multiprocessors, shared_bytes),
        part_tokens_min=part_tokens_min,
    )
    _assert_close(output, attention_reference(case, batch, scale), case.dtype)


def check_far_block(device: str) -> None:
    """Keys and values that lie more than 2**31 numbers into the cache, which takes 4 GiB."""
    from engine.triton_kernels.cache_moves import gather_layer, write_kv
    from engine.triton_kernels.common import Chip
    from engine.triton_kernels.decode_attention import decode_attention
    from engine.triton_kernels.prefill_attention import prefill_attention

    kv_heads, head_dim, layers = 8, 128, 32
    block_numbers = layers * 2 * kv_heads * 16 * head_dim
    blocks = 2**31 // block_numbers + 2
    memory = torch.empty(blocks * block_numbers, dtype=torch.bfloat16, device=device)
    layer = memory.view(blocks, layers, 2, kv_heads, 16, head_dim)[:, -1]
    layer[-1] = float("nan")
    key, value = torch.randn(2, 1, kv_heads, head_dim, dtype=torch.bfloat16, device=device)
    write_kv(layer[:, 0], layer[:, 1], key, value, torch.tensor([(blocks - 1) * 16], device=device))
    assert torch.equal(layer[-1, 1, :, 0], value[0])
    table = torch.tensor([[blocks - 1]], dtype=torch.int32, device=device)
    one = torch.ones(1, dtype=torch.int32, device=device)
    query = torch.randn(1, 4 * kv_heads, head_dim, dtype=torch.bfloat16, device=device)
    expected = value.repeat_interleave(4, dim=1)  # one token sees itself alone
    chip = Chip.of(torch.device(device))
    output = torch.zeros_like(query)
    decode_attention(
        query, layer[:, 0], layer[:, 1], one, table, output, scale=0.1, window_tokens=None, chip=chip
    )
    assert torch.equal(output, expected)
    starts = torch.tensor([0, 1], dtype=torch.int32, device=device)
    output.zero_()
    prefill_attention(
        query, layer[:, 0], layer[:, 1], starts, one, table, output,
        first_row=0, query_tokens_max=1, kv_tokens_max=1, scale=0.1, window_tokens=None, chip=chip,
    )  # fmt: skip
    assert torch.equal(output, expected)
    gathered = torch.empty((1, *layer.shape[1:]), dtype=torch.bfloat16, device=device)
    gather_layer(layer, torch.tensor([blocks - 1], device=device), gathered)
    assert torch.equal(gathered[0, 1, :, 0], value[0])


def check_write_kv(dtype: torch.dtype, kv_heads: int, head_dim: int, device: str) -> None:
    """A negative slot is written nowhere, and no other slot is touched."""
    from engine.triton_kernels.cache_moves import write_kv

    generator = torch.Generator().manual_seed(1)
    cache = torch.full((5, 2, 2, kv_heads, 16, head_dim), -1.0, dtype=dtype, device=device)
    new = torch.randn(4, 2 * kv_heads + 1, head_dim, generator=generator).to(dtype).to(device)
    key, value = new[:, :kv_heads], new[:, kv_heads : 2 * kv_heads]
    slots = torch.tensor([3 * 16 + 15, 0, -1, 4 * 16 + 1], device=device)
    expected = cache.clone()
    for row, slot in enumerate(slots.tolist()):
        if slot >= 0:
            expected[slot // 16, 1, 0, :, slot % 16] = key[row]
            expected[slot // 16, 1, 1, :, slot % 16] = value[row]
    write_kv(cache[:, 1, 0], cache[:, 1, 1], key, value, slots)
    assert torch.equal(cache, expected)


def check_gather_scatter(dtype: torch.dtype, block_tokens: int, head_dim: int, device: str) -> None:
    from engine.triton_kernels.cache_moves import gather_layer, scatter_layer

    generator = torch.Generator().manual_seed(2)
    cache = torch.randn(6, 3, 2, 3, block_tokens, head_dim, generator=generator).to(dtype).to(device)
    block_ids = torch.tensor([4, 0, 5], device=device)
    blocks = torch.full((3, 2, 3, block_tokens, head_dim), float("nan"), dtype=dtype, device=device)
    gather_layer(cache[:, 1], block_ids, blocks)
    assert torch.equal(blocks, cache[:, 1][block_ids])
    other = torch.zeros_like(cache)
    scatter_layer(other[:, 2], block_ids, blocks)
    expected = torch.zeros_like(cache)
    expected[:, 2][block_ids] = blocks
    assert torch.equal(other, expected)


def check_rotate(dtype: torch.dtype, heads: int, kv_heads: int, head_dim: int, device: str) -> None:
    from engine.triton_kernels.elementwise import rotate_

    generator = torch.Generator().manual_seed(3)
    fused = torch.randn(3, heads + kv_heads + 1, head_dim, generator=generator).to(dtype).to(device)
    angles = torch.rand(3, head_dim // 2, generator=generator) * 6
    cos, sin = angles.cos().to(device), angles.sin().to(device)
    expected = fused.cpu().double()
    for row in range(3):
        for head in range(heads + kv_heads):
            first, second = fused[row, head].cpu().double().chunk(2)
            c, s = angles[row].cos().double(), angles[row].sin().double()
            expected[row, head] = torch.cat((first * c - second * s, second * c + first * s))
    rotate_(fused[:, :heads], fused[:, heads : heads + kv_heads], cos, sin)
    _assert_close(fused, expected, dtype)


def check_norms(dtype: torch.dtype, width: int, device: str) -> None:
    """Rows of two and of three dimensions, with strides; with a residual too."""
    from engine.triton_kernels.elementwise import add_rms_norm, rms_norm

    generator = torch.Generator().manual_seed(4)
    wide = torch.randn(5, 4, width + 3, generator=generator).to(dtype).to(device)
    weight = torch.randn(width, generator=generator).to(dtype).to(device)
    rows = wide[:, :3, :width]
    _assert_close(rms_norm(rows, weight, 1e-5), _norm_reference(rows, weight), dtype)
    _assert_close(rms_norm(rows[:, 0], weight, 1e-5), _norm_reference(rows[:, 0], weight), dtype)
    residual = torch.randn(5, width, generator=generator).to(dtype).to(device)
    summed = (residual.cpu().double() + rows[:, 1].cpu().double()).to(dtype)
    normed = add_rms_norm(rows[:, 1], residual, weight, 1e-5)
    _assert_close(residual, summed.double(), dtype)
    _assert_close(normed, _norm_reference(residual, weight), dtype)


def check_gate(dtype: torch.dtype, width: int, device: str) -> None:
    from engine.triton_kernels.elementwise import gate

    generator = torch.Generator().manual_seed(5)
    gate_up = torch.randn(3, 2 * width, generator=generator).to(dtype).to(device)
    held, up = gate_up.cpu().double().chunk(2, dim=-1)
    _assert_close(gate(gate_up), torch.nn.functional.silu(held) * up, dtype)


def _norm_reference(rows: Tensor, weight: Tensor) -> Tensor:
    exact = rows.cpu().double()
    return exact * (exact.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * weight.cpu().double()


def _assert_close(got: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    tolerance = TOLERANCES[dtype]
    torch.testing.assert_close(got.cpu().double(), expected, atol=tolerance, rtol=tolerance)


def check_draw(vocabulary: int, device: str) -> None:
    """Every parameter alone and together, ties, masked tokens, and draws at both ends of [0, 1]."""
    from engine.draw import Draw, DrawParameters
    from engine.draw import draw as draw_in_torch
    from engine.triton_kernels.sampling import draw

    rows = [
        Draw(),
        Draw(temperature=1.0, top_k=1, uniform=0.9),
        Draw(temperature=0.8, uniform=0.0),
        Draw(temperature=0.8, uniform=1.0),
        Draw(temperature=1.3, top_k=7, uniform=0.99),
        Draw(temperature=1.0, top_p=0.9, uniform=0.97),
        Draw(temperature=0.7, top_k=40, top_p=0.5, uniform=0.75),
        Draw(temperature=1.0, min_p=0.1, uniform=0.999),
        Draw(temperature=1.5, top_k=50, top_p=0.95, min_p=0.05, uniform=0.3),
        Draw(temperature=0.01, top_k=5, top_p=0.99, uniform=0.6),
        Draw(temperature=1.0, top_k=vocabulary + 5, top_p=0.001, uniform=0.5),
    ]
    generator = torch.Generator().manual_seed(6)
    logits = torch.randn(len(rows), vocabulary, generator=generator) * 4
    logits[:, ::3] = (logits[:, ::3] * 2).round() / 2  # many ties
    logits[:, 5:40] = float("-inf")
    parameters = DrawParameters.of(rows, torch.device(device))
    got = draw(logits.to(device), parameters).tolist()
    expected = [_draw_reference(row, one) for row, one in zip(logits, rows, strict=True)]
    assert got == expected
    assert got == draw_in_torch(logits.to(device), parameters).tolist()


def check_draw_of_what_is_not_finite(device: str) -> None:
    """The chosen logit shows it, whatever the parameters; the row beside it is drawn as ever."""
    from engine.draw import Draw, DrawParameters
    from engine.triton_kernels.sampling import draw

    logits = torch.zeros(5, 50)
    logits[0, 7] = float("nan")
    logits[1, 8] = float("inf")
    logits[2] = float("-inf")
    logits[3, 9] = 50.0
    logits[4, 9] = float("nan")
    rows = [Draw(temperature=1.0, top_p=0.5, uniform=0.5)] * 4 + [Draw()]
    got = draw(logits.to(device), DrawParameters.of(rows, torch.device(device))).cpu()
    chosen = logits.gather(1, got.unsqueeze(1)).squeeze(1)
    assert chosen.isfinite().tolist() == [False, False, False, True, False]
    assert got[3] == 9


def _draw_reference(logits: Tensor, one: Any) -> int:
    """In float64 with a full sort; parameters rounded to float32, in which they are passed."""
    if one.temperature == 0.0 or one.top_k == 1:
        return int(logits.argmax())
    temperature, top_p, min_p = torch.tensor([one.temperature, one.top_p, one.min_p]).double().tolist()
    weights = ((logits.double() - logits.double().max()) / temperature).exp()
    if 0 < one.top_k < weights.numel():
        weights[logits < logits.sort(descending=True).values[one.top_k - 1]] = 0.0
    if one.top_p < 1.0:
        largest = weights.sort(descending=True).values
        reached = int((largest.cumsum(0) >= top_p * weights.sum()).nonzero()[0])
        weights[weights < largest[reached]] = 0.0
    weights[weights < min_p] = 0.0
    beyond = (weights.cumsum(0) > one.uniform * weights.sum()).nonzero()
    return int(beyond[0]) if beyond.numel() else int(weights.nonzero()[-1])
