"""Attention over the paged pool in an order that only a query's own position decides.

Keys are taken in splits of `SPLIT` positions counted from position 0, within a split in tiles of `TILE`: each split has a running
softmax of its own (Milakov and Gimelshein, 2018), and splits are joined in their order. Which program computes a split, and which
queries stand beside this one, changes nothing: tiles beyond a query's position add zeros to it, exactly. So a token has the
same bits whether its query comes alone or in a chunk of any size.

One compiled kernel serves both, by items (`engine.attention.invariant_items`): an item with all splits of its queries writes the
result, one with a part of them a partial result, which `join_splits` takes up with the arithmetic that the kernel itself uses.
Multiplications and additions are not fused, so that both round alike.

Must not know: rows, how a step was cut.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from engine.attention.invariant_items import ITEM_ROWS, ITEM_WORDS, SPLIT
from engine.kernels.overlap import OVERLAPPED

TILE = 64
_LOG2_E = 1.4426950408889634
_LOWEST = tl.constexpr(float("-inf"))


@triton.jit
def _joined(best, other):
    """The greater maximum, and the weights of sums that were taken against either; -inf stands for no key."""
    greater = tl.maximum(best, other)
    safe = tl.where(greater == _LOWEST, 0.0, greater)
    return greater, tl.exp2(best - safe), tl.exp2(other - safe)


@triton.jit
def _attend(
    queries,
    keys,
    values,
    pages,
    last_page_lengths,
    items,
    out,
    partial,
    sums,
    query_stride,
    block_stride,
    head_stride,
    position_stride,
    scale,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_LANES: tl.constexpr,
    DIM: tl.constexpr,
    LANES: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ITEM_ROWS: tl.constexpr,
    ITEM_WORDS: tl.constexpr,
    SPLIT: tl.constexpr,
    TILE: tl.constexpr,
    OVERLAPPED: tl.constexpr,
):
    if OVERLAPPED:
        gdc_wait()
        gdc_launch_dependents()
    kv_head = tl.program_id(1)
    lane_row = tl.arange(0, ITEM_ROWS)
    query = lane_row // GROUP_LANES
    head = kv_head * GROUP + lane_row % GROUP_LANES
    dim = tl.arange(0, LANES)
    inside = (dim < DIM)[None, :]
    head_keys, head_values = keys + kv_head * head_stride, values + kv_head * head_stride
    for item in range(tl.program_id(0), tl.load(items), tl.num_programs(0)):
        words = items + (item + 1) * ITEM_WORDS
        token = tl.load(words)
        count = tl.load(words + 1)
        position = tl.load(words + 2)
        row_pages = pages + tl.load(words + 3)
        first_split = tl.load(words + 4)
        end_split = tl.load(words + 5)
        place = tl.load(words + 6)
        row = tl.load(words + 7)
        position += tl.load(last_page_lengths + row, mask=row >= 0, other=0)
        end = position + count
        live = ((query < count) & (lane_row % GROUP_LANES < GROUP))[:, None] & inside
        token_rows = (token + query).to(tl.int64)
        q = tl.load(
            queries + token_rows[:, None] * query_stride + head[:, None] * DIM + dim[None, :], mask=live, other=0.0
        )
        best = tl.full((ITEM_ROWS,), _LOWEST, tl.float32)
        total = tl.zeros((ITEM_ROWS,), tl.float32)
        result = tl.zeros((ITEM_ROWS, LANES), tl.float32)
        for split in range(first_split, end_split):
            split_best = tl.full((ITEM_ROWS,), _LOWEST, tl.float32)
            split_total = tl.zeros((ITEM_ROWS,), tl.float32)
            split_result = tl.zeros((ITEM_ROWS, LANES), tl.float32)
            for start in range(split * SPLIT, tl.minimum((split + 1) * SPLIT, end), TILE):
                key = start + tl.arange(0, TILE)
                stored = key < end
                block = tl.load(row_pages + key // BLOCK_SIZE, mask=stored, other=0).to(tl.int64)
                cell = block * block_stride + (key % BLOCK_SIZE) * position_stride
                cells = cell[:, None] + dim[None, :]
                k = tl.load(head_keys + cells, mask=stored[:, None] & inside, other=0.0)
                scores = tl.dot(q, k.T) * scale
                scores = tl.where(key[None, :] <= position + query[:, None], scores, _LOWEST)
                split_best, kept, _ = _joined(split_best, tl.max(scores, axis=1))
                safe = tl.where(split_best == _LOWEST, 0.0, split_best)
                weights = tl.exp2(scores - safe[:, None])
                split_total = split_total * kept + tl.sum(weights, axis=1)
                v = tl.load(head_values + cells, mask=stored[:, None] & inside, other=0.0)
                split_result = tl.dot(weights.to(v.dtype), v, split_result * kept[:, None])
            best, kept, added = _joined(best, split_best)
            total = total * kept + split_total * added
            result = result * kept[:, None] + split_result * added[:, None]
        if place < 0:
            target = out + token_rows[:, None] * (HEADS * DIM) + head[:, None] * DIM + dim[None, :]
            tl.store(target, (result / total[:, None]).to(out.dtype.element_ty), mask=live)
        else:
            part = place.to(tl.int64) * HEADS + head
            tl.store(partial + part[:, None] * DIM + dim[None, :], result, mask=live)
            live_head = (query < count) & (lane_row % GROUP_LANES < GROUP)
            tl.store(sums + 2 * part, best, mask=live_head)
            tl.store(sums + 2 * part + 1, total, mask=live_head)


@triton.jit
def _join_splits(
    partial,
    sums,
    parts,
    out,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    LANES: tl.constexpr,
    OVERLAPPED: tl.constexpr,
):
    if OVERLAPPED:
        gdc_wait()
        gdc_launch_dependents()
    row = tl.program_id(0)
    head = tl.program_id(1)
    dim = tl.arange(0, LANES)
    first = tl.load(parts + 2 * row)
    count = tl.load(parts + 2 * row + 1)
    if count > 0:
        best = tl.full((LANES,), _LOWEST, tl.float32)
        total = tl.zeros((LANES,), tl.float32)
        result = tl.zeros((LANES,), tl.float32)
        for place in range(first, first + count):
            # A vector of equal numbers, so that the same instructions are used as in the other kernel.
            part = (tl.zeros((LANES,), tl.int64) + place) * HEADS + head
            split_result = tl.load(partial + part * DIM + dim, mask=dim < DIM, other=0.0)
            best, kept, added = _joined(best, tl.load(sums + 2 * part))
            total = total * kept + tl.load(sums + 2 * part + 1) * added
            result = result * kept + split_result * added
        target = out + (row.to(tl.int64) * HEADS + head) * DIM + dim
        tl.store(target, (result / total).to(out.dtype.element_ty), mask=dim < DIM)


def attend(
    programs: int,
    queries: torch.Tensor,
    layer_kv: torch.Tensor,
    hnd: bool,
    pages: torch.Tensor,
    last_page_lengths: torch.Tensor,
    items: torch.Tensor,
    out: torch.Tensor,
    partial: torch.Tensor,
    sums: torch.Tensor,
) -> None:
    """`queries`, `out` [T, heads, head_dim], the last two dimensions contiguous, `out` wholly; `layer_kv` [blocks, 2, *inner,
    head_dim], `hnd` telling the order of inner; `items` int32, as `invariant_items` says; `partial` [places, heads, head_dim] and
    `sums` [places, heads, 2] float32. `programs` for each KV head share the items."""
    heads, dim = queries.shape[1:]
    inner_head, inner_position = (2, 3) if hnd else (3, 2)
    kv_heads, block_size = layer_kv.shape[inner_head], layer_kv.shape[inner_position]
    group = heads // kv_heads
    _attend[(programs, kv_heads)](
        queries,
        layer_kv[:, 0],
        layer_kv[:, 1],
        pages,
        last_page_lengths,
        items,
        out,
        partial,
        sums,
        queries.stride(0),
        layer_kv.stride(0),
        layer_kv.stride(inner_head),
        layer_kv.stride(inner_position),
        dim**-0.5 * _LOG2_E,
        HEADS=heads,
        GROUP=group,
        GROUP_LANES=triton.next_power_of_2(group),
        DIM=dim,
        LANES=triton.next_power_of_2(dim),
        BLOCK_SIZE=block_size,
        ITEM_ROWS=ITEM_ROWS,
        ITEM_WORDS=ITEM_WORDS,
        SPLIT=SPLIT,
        TILE=TILE,
        OVERLAPPED=OVERLAPPED,
        launch_pdl=OVERLAPPED,
        enable_fp_fusion=False,
        num_warps=4,
        num_stages=3,
    )


def join_splits(partial: torch.Tensor, sums: torch.Tensor, parts: torch.Tensor, out: torch.Tensor) -> None:
    """Into `out` [R, heads, head_dim]; `parts` int32 [R, 2]: each row's first place, and how many partial results it has."""
    rows, heads, dim = out.shape
    _join_splits[(rows, heads)](
        partial,
        sums,
        parts,
        out,
        HEADS=heads,
        DIM=dim,
        LANES=triton.next_power_of_2(dim),
        OVERLAPPED=OVERLAPPED,
        launch_pdl=OVERLAPPED,
        enable_fp_fusion=False,
        num_warps=1,
    )
