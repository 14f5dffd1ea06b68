"""What a decoder layer does between its matrix products, one pass over memory each.

Arithmetic is float32 inside a kernel and rounded once at its end, so results differ from the CPU path's by its intermediate
roundings only.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from engine.kernels.overlap import OVERLAPPED

HEADS_A_PROGRAM = 8


@triton.jit
def _add_norm(
    hidden,
    delta,
    weight,
    normed,
    epsilon,
    WIDTH: tl.constexpr,
    LANES: tl.constexpr,
    ADDS: tl.constexpr,
    OVERLAPPED: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * WIDTH
    lane = tl.arange(0, LANES)
    inside = lane < WIDTH
    w = tl.load(weight + lane, mask=inside, other=0.0).to(tl.float32)
    if OVERLAPPED:
        gdc_wait()
        gdc_launch_dependents()
    x = tl.load(hidden + row + lane, mask=inside, other=0.0).to(tl.float32)
    if ADDS:
        x += tl.load(delta + row + lane, mask=inside, other=0.0).to(tl.float32)
        rounded = x.to(hidden.dtype.element_ty)
        tl.store(hidden + row + lane, rounded, mask=inside)
        x = rounded.to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x, axis=0) / WIDTH + epsilon)
    tl.store(normed + row + lane, (x * scale * w).to(normed.dtype.element_ty), mask=inside)


def add_norm(hidden: torch.Tensor, delta: torch.Tensor | None, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    """hidden += delta in place (both [T, width]), and the RMS norm of the sum (Zhang and Sennrich, 2019)."""
    normed = torch.empty_like(hidden)
    rows, width = hidden.shape
    if rows:
        lanes = triton.next_power_of_2(width)
        _add_norm[(rows,)](
            hidden,
            delta,
            weight,
            normed,
            epsilon,
            WIDTH=width,
            LANES=lanes,
            ADDS=delta is not None,
            OVERLAPPED=OVERLAPPED,
            launch_pdl=OVERLAPPED,
            num_warps=min(16, max(1, lanes // 512)),
        )
    return normed


@triton.jit
def _gate(gate_up, out, WIDTH: tl.constexpr, LANES: tl.constexpr, OVERLAPPED: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    if OVERLAPPED:
        gdc_wait()
        gdc_launch_dependents()
    lane = tl.program_id(1) * LANES + tl.arange(0, LANES)
    inside = lane < WIDTH
    gate = tl.load(gate_up + row * (2 * WIDTH) + lane, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * (2 * WIDTH) + WIDTH + lane, mask=inside, other=0.0).to(tl.float32)
    value = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(out + row * WIDTH + lane, value.to(out.dtype.element_ty), mask=inside)


def gate(gate_up: torch.Tensor) -> torch.Tensor:
    """silu(first half) * second half of [T, 2 * width]: [T, width]."""
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = gate_up.new_empty(rows, width)
    lanes = min(2048, triton.next_power_of_2(width))
    if rows:
        _gate[(rows, triton.cdiv(width, lanes))](
            gate_up, out, WIDTH=width, LANES=lanes, OVERLAPPED=OVERLAPPED, launch_pdl=OVERLAPPED, num_warps=4
        )
    return out


@triton.jit
def _head_norm(first, second, weight, lane, inside, epsilon, HALF: tl.constexpr):
    squares = tl.sum(first * first + second * second, axis=1)
    scale = tl.rsqrt(squares / (2 * HALF) + epsilon)[:, None]
    first_weight = tl.load(weight + lane, mask=inside, other=0.0).to(tl.float32)[None, :]
    second_weight = tl.load(weight + HALF + lane, mask=inside, other=0.0).to(tl.float32)[None, :]
    return first * scale * first_weight, second * scale * second_weight


@triton.jit
def _rotate_append(
    projected,
    positions,
    slots,
    cos,
    sin,
    query_norm,
    key_norm,
    keys,
    block_stride,
    side_stride,
    head_stride,
    position_stride,
    epsilon,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    LANES: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    PROGRAM_HEADS: tl.constexpr,
    NORMED: tl.constexpr,
    OVERLAPPED: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    if OVERLAPPED:
        gdc_wait()
        gdc_launch_dependents()
    head = tl.program_id(1) * PROGRAM_HEADS + tl.arange(0, PROGRAM_HEADS)
    lane = tl.arange(0, LANES)
    inside = lane < HALF
    live = (head < HEADS + 2 * KV_HEADS)[:, None] & inside[None, :]
    row = projected + token * ((HEADS + 2 * KV_HEADS) * 2 * HALF)
    source = row + head[:, None] * (2 * HALF) + lane[None, :]
    first = tl.load(source, mask=live, other=0.0).to(tl.float32)
    second = tl.load(source + HALF, mask=live, other=0.0).to(tl.float32)
    is_query = (head < HEADS)[:, None]
    turns = (head < HEADS + KV_HEADS)[:, None]
    turned, turned_second = first, second
    if NORMED:
        normed, normed_second = _head_norm(first, second, query_norm, lane, inside, epsilon, HALF)
        key, key_second = _head_norm(first, second, key_norm, lane, inside, epsilon, HALF)
        turned = tl.where(is_query, normed, key)
        turned_second = tl.where(is_query, normed_second, key_second)
    position = tl.load(positions + token).to(tl.int64)
    c = tl.load(cos + position * HALF + lane, mask=inside, other=0.0)[None, :]
    s = tl.load(sin + position * HALF + lane, mask=inside, other=0.0)[None, :]
    out = tl.where(turns, turned * c - turned_second * s, first).to(projected.dtype.element_ty)
    out_second = tl.where(turns, turned_second * c + turned * s, second).to(projected.dtype.element_ty)
    tl.store(source, out, mask=live & turns)
    tl.store(source + HALF, out_second, mask=live & turns)
    slot = tl.load(slots + token).to(tl.int64)
    stored_head = tl.maximum(head - HEADS, 0)
    inner = (stored_head // KV_HEADS) * side_stride + (stored_head % KV_HEADS) * head_stride
    cell = keys + (slot // BLOCK_SIZE) * block_stride + (slot % BLOCK_SIZE) * position_stride
    target = cell + inner[:, None] + lane[None, :]
    tl.store(target, out, mask=live & (head >= HEADS)[:, None])
    tl.store(target + HALF, out_second, mask=live & (head >= HEADS)[:, None])


def rotate_append(
    projected: torch.Tensor,
    positions: torch.Tensor,
    slots: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    layer_kv: torch.Tensor,
    heads: int,
    hnd: bool,
    norms: tuple[torch.Tensor, torch.Tensor] | None,
    epsilon: float,
) -> None:
    """Rotate queries and keys in place, and store keys and values in the pool.

    `projected` [T, (heads + 2 kv_heads) * head_dim] contiguous; `positions`, `slots` int32 [T] (slot = block * block_size +
    offset); `cos`, `sin` float32 [positions, head_dim / 2]; `layer_kv` [blocks, 2, *inner, head_dim], any block stride, `hnd`
    telling the order of inner; `norms`: weights of the norms on query and key heads (Qwen3).
    """
    inner_head, inner_position = (2, 3) if hnd else (3, 2)
    kv_heads, block_size = layer_kv.shape[inner_head], layer_kv.shape[inner_position]
    half = layer_kv.shape[-1] // 2
    query_norm, key_norm = norms or (None, None)
    _rotate_append[(len(projected), triton.cdiv(heads + 2 * kv_heads, HEADS_A_PROGRAM))](
        projected,
        positions,
        slots,
        cos,
        sin,
        query_norm,
        key_norm,
        layer_kv,
        layer_kv.stride(0),
        layer_kv.stride(1),
        layer_kv.stride(inner_head),
        layer_kv.stride(inner_position),
        epsilon,
        HEADS=heads,
        KV_HEADS=kv_heads,
        HALF=half,
        LANES=triton.next_power_of_2(half),
        BLOCK_SIZE=block_size,
        PROGRAM_HEADS=HEADS_A_PROGRAM,
        NORMED=norms is not None,
        OVERLAPPED=OVERLAPPED,
        launch_pdl=OVERLAPPED,
        num_warps=2,
    )
