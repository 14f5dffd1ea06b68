"""Each fused kernel against its definition in float64, on fresh random inputs; a NaN in a result fails."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from engine.kernels.layer import add_norm, gate, rotate_append
from engine.kernels.product import product
from engine.kernels.unpack import unpack_rows, unpack_tokens

pytestmark = pytest.mark.gpu
DEVICE = torch.device("cuda")


def near(got: torch.Tensor, want: torch.Tensor, limit: float = 6e-3) -> None:
    """Relative error in the 2-norm; bfloat16 results land near 2e-3."""
    assert got.isfinite().all()
    error = float((got.double() - want.double()).norm() / want.double().norm())
    assert error < limit, error


def random(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(*shape, device=DEVICE).to(dtype)


@pytest.mark.parametrize(("rows", "width"), [(1, 4096), (3, 576), (257, 4096), (5, 100)])
def test_the_sum_joins_the_residual_stream_and_its_norm_is_returned(rows: int, width: int) -> None:
    hidden, delta, weight = random(rows, width), random(rows, width), random(width)
    want_sum = hidden.double() + delta.double()
    got = add_norm(hidden, delta, weight, 1e-5)
    near(hidden, want_sum)
    near(got, F.rms_norm(hidden.double(), (width,), weight.double(), 1e-5))
    near(add_norm(hidden, None, weight, 1e-5), F.rms_norm(hidden.double(), (width,), weight.double(), 1e-5))


@pytest.mark.parametrize(("rows", "width"), [(1, 14336), (7, 1536), (300, 2000)])
def test_the_gate_is_silu_of_the_first_half_times_the_second(rows: int, width: int) -> None:
    both = 3 * random(rows, 2 * width)
    want = F.silu(both[:, :width].double()) * both[:, width:].double()
    near(gate(both), want)


@pytest.mark.parametrize(("outputs", "inputs"), [(6144, 4096), (4096, 14336), (130, 1000)])
@pytest.mark.parametrize("rows", [1])
@pytest.mark.parametrize("gated", [False, True])
def test_few_rows_times_a_weight(outputs: int, inputs: int, rows: int, gated: bool) -> None:
    x, weight = random(rows, inputs), random(outputs, inputs) / inputs**0.5
    want = x.double() @ weight.double().t()
    if gated:
        want = F.silu(want[:, : outputs // 2]) * want[:, outputs // 2 :]
    near(product(x, weight, gated=gated), want)


@pytest.mark.parametrize("hnd", [True, False])
@pytest.mark.parametrize("normed", [True, False])
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(32, 8, 128), (9, 3, 64), (5, 1, 96)])
def test_queries_and_keys_turn_in_place_and_keys_and_values_reach_their_cells(
    hnd: bool, normed: bool, heads: int, kv_heads: int, head_dim: int
) -> None:
    tokens, blocks, block_size, layers = 70, 9, 16, 3
    inner = (kv_heads, block_size) if hnd else (block_size, kv_heads)
    pool = torch.full((blocks, layers, 2, *inner, head_dim), float("nan"), device=DEVICE, dtype=torch.bfloat16)
    projected = random(tokens, (heads + 2 * kv_heads) * head_dim)
    positions = torch.randint(0, 500, (tokens,), device=DEVICE, dtype=torch.int32)
    slots = torch.randperm(blocks * block_size, device=DEVICE)[:tokens].int()
    angles = torch.rand(500, head_dim // 2, device=DEVICE) * 6
    norms = (random(head_dim), random(head_dim)) if normed else None
    before = projected.double().view(tokens, -1, head_dim)
    rotate_append(projected, positions, slots, angles.cos(), angles.sin(), pool[:, 1], heads, hnd, norms, 1e-6)

    turning = before[:, : heads + kv_heads]
    if norms is not None:
        queries = F.rms_norm(turning[:, :heads], (head_dim,), norms[0].double(), 1e-6)
        turning = torch.cat((queries, F.rms_norm(turning[:, heads:], (head_dim,), norms[1].double(), 1e-6)), 1)
    cos, sin = angles[positions].cos().double()[:, None], angles[positions].sin().double()[:, None]
    first, second = turning.chunk(2, dim=-1)
    turned = torch.cat((first * cos - second * sin, second * cos + first * sin), -1)
    near(projected.view(tokens, -1, head_dim)[:, : heads + kv_heads], turned)
    block, offset = slots.long() // block_size, slots.long() % block_size
    cells = pool[block, 1, :, :, offset] if hnd else pool[block, 1, :, offset]
    near(cells[:, 0], turned[:, heads:])
    near(cells[:, 1], before[:, heads + kv_heads :])
    written = torch.zeros(blocks * block_size, dtype=torch.bool, device=DEVICE)
    written[slots.long()] = True
    order = (0, 3, 2, 1, 4) if hnd else (0, 2, 3, 1, 4)
    rest = pool[:, 1].permute(order).reshape(blocks * block_size, -1)[~written]
    assert rest.isnan().all()
    assert pool[:, 0].isnan().all()
    assert pool[:, 2].isnan().all()


def test_fed_back_tokens_and_page_tables_arrive_where_they_belong() -> None:
    rng = np.random.default_rng(0)
    tokens, rows, width = 1300, 7, 900
    given, positions, slots = (rng.integers(0, 1000, tokens).astype(np.int32) for _ in range(3))
    feedback = np.where(rng.random(tokens) < 0.5, rng.integers(0, 50, tokens), -1).astype(np.int32)
    sampled = torch.randint(0, 100_000, (50,), device=DEVICE)
    staged = torch.from_numpy(np.concatenate((given, feedback, positions, slots))).to(DEVICE)
    out = [torch.full((tokens + 5,), -7, dtype=torch.int32, device=DEVICE) for _ in range(3)]
    unpack_tokens(staged, sampled, out[0], out[1], out[2], tokens)
    want = np.where(feedback >= 0, sampled.cpu().numpy()[feedback], given)
    for got, expected in zip(out, (want, positions, slots), strict=True):
        assert got[:tokens].tolist() == expected.tolist()
        assert got[tokens:].tolist() == [-7] * 5

    counts = np.array([1, 900, 3, 512, 513, 2, 700])
    starts = np.concatenate(([0], np.cumsum(counts))).astype(np.int32)
    last, table = rng.integers(1, 17, rows).astype(np.int32), rng.integers(0, 9999, (rows, width)).astype(np.int32)
    staged = torch.from_numpy(np.concatenate((starts, last, table.reshape(-1)))).to(DEVICE)
    page_start, last_page_lengths, pages = (
        torch.zeros(size, dtype=torch.int32, device=DEVICE) for size in (rows + 1, rows, int(starts[-1]))
    )
    unpack_rows(staged, page_start, last_page_lengths, pages, rows, width)
    assert page_start.tolist() == starts.tolist()
    assert last_page_lengths.tolist() == last.tolist()
    assert pages.tolist() == np.concatenate([table[r, :n] for r, n in enumerate(counts)]).tolist()
