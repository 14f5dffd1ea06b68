"""Attention that gives a token the same bits in every step (`engine.kernels.invariant_attention`): a step cut into items.

Takes FlashInfer's place behind the same calls, and the same pinned memory. A decode is an item for each split of its context, so
that long contexts spread over the GPU; a chunk is an item for every few queries, each with all splits it reaches, longest first.
A decode's items depend on its context alone and their number stands beside them on the device, so that one captured graph serves
all contexts of a batch size.

Must not know: requests, graphs, who captures.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
import triton

from engine.attention.decode_plan import DecodePlan, DecodeShape
from engine.attention.flashinfer import PLAN_BYTES, FlashInferAttention, Int32, Pages
from engine.kernels.invariant_attention import ITEM_ROWS, ITEM_WORDS, SPLIT, attend, join_splits
from engine.kv_cache.device_storage import DeviceKvStorage
from foundation.errors import ConfigurationError

PROGRAMS_AT_LEAST = 128
"""For each KV head, where a batch is smaller: so many splits of long contexts run side by side."""
_PLAN_WORDS = PLAN_BYTES // 4


@dataclass(frozen=True, slots=True)
class ChunkPlan:
    items: int


class InvariantAttention:
    """Kernels for one pool. `plan_*` and the runs of its plan share the current stream."""

    def __init__(self, storage: DeviceKvStorage, heads: int, most_rows: int, row_blocks: int, most_tokens: int) -> None:
        """For steps of at most `most_rows` rows of `row_blocks` blocks and `most_tokens` tokens. Raises ConfigurationError where
        their items are too many."""
        layout = storage.layout
        device = storage.memory.device
        self.heads, self.kv_heads, self.head_dim = heads, layout.kv_heads, layout.head_dim
        self.block_size = layout.block_size
        self._hnd = layout.head_order == "HND"
        self._layers = [storage.layer(layer) for layer in range(layout.layers)]
        group = triton.next_power_of_2(heads // layout.kv_heads)
        assert group <= ITEM_ROWS, f"{heads} query heads for {layout.kv_heads} KV heads"
        self._item_queries = ITEM_ROWS // group
        self._most_splits = -(-row_blocks * self.block_size // SPLIT)
        places = most_rows * self._most_splits
        chunk_items = -(-most_tokens // self._item_queries) + most_rows
        for setting, words in (
            ("--max-num-seqs", (places + 1) * ITEM_WORDS + 2 * most_rows),
            ("--max-num-batched-tokens", (chunk_items + 1) * ITEM_WORDS),
        ):
            if words > _PLAN_WORDS:
                raise ConfigurationError(setting, "is too large for --batch-invariant with contexts of this length")
        self._partial = torch.empty(places, heads, layout.head_dim, dtype=torch.float32, device=device)
        self._sums = torch.empty(places, heads, 2, dtype=torch.float32, device=device)
        self._decode_words = torch.zeros(_PLAN_WORDS, dtype=torch.int32, device=device)
        self._chunk_words = torch.zeros(_PLAN_WORDS, dtype=torch.int32, device=device)

    def plan_decode(self, pinned: torch.Tensor, page_start: Int32) -> DecodePlan:
        """`pinned` uint8 [PLAN_BYTES]; `page_start` [R + 1] on the host. All plans of as many rows have one shape."""
        words = pinned.view(torch.int32)
        rows = len(page_start) - 1
        used = write_decode_items(words.numpy(), page_start, self.block_size)
        self._decode_words[:used].copy_(words[:used], non_blocking=True)
        return DecodePlan(DecodeShape(rows, rows * self._most_splits, True), [], used)

    def decode(self, layer: int, plan: DecodePlan, queries: torch.Tensor, pages: Pages, out: torch.Tensor) -> None:
        """`queries`, `out` [R, heads, head_dim]; the last two dimensions contiguous."""
        rows = plan.shape.rows
        programs = min(plan.shape.pieces, max(rows, PROGRAMS_AT_LEAST))
        items = self._decode_words[2 * rows_aligned(rows) :]
        self._attend(programs, layer, queries, pages, items, out)
        join_splits(self._partial, self._sums, self._decode_words, out)

    def plan_prefill(
        self, pinned: torch.Tensor, query_start: Int32, page_start: Int32, context_lengths: Int32
    ) -> ChunkPlan:
        """`query_start`, `page_start` [R + 1] and `context_lengths` [R] on the host, `query_start` from 0 on."""
        words = pinned.view(torch.int32)
        items = write_chunk_items(words.numpy(), query_start, page_start, context_lengths, self._item_queries)
        used = (items + 1) * ITEM_WORDS
        self._chunk_words[:used].copy_(words[:used], non_blocking=True)
        return ChunkPlan(items)

    def prefill(self, layer: int, plan: ChunkPlan, queries: torch.Tensor, pages: Pages, out: torch.Tensor) -> None:
        """`queries`, `out` [T, heads, head_dim] of chunks, each the end of its row's context."""
        self._attend(plan.items, layer, queries, pages, self._chunk_words, out)

    def _attend(
        self, programs: int, layer: int, queries: torch.Tensor, pages: Pages, items: torch.Tensor, out: torch.Tensor
    ) -> None:
        kv, lengths = self._layers[layer], pages.last_page_lengths
        attend(programs, queries, kv, self._hnd, pages.pages, lengths, items, out, self._partial, self._sums)


DeviceAttention = FlashInferAttention | InvariantAttention
MakeAttention = Callable[[DeviceKvStorage], DeviceAttention]


def rows_aligned(rows: int) -> int:
    """Rows whose parts stand before the items: items begin at a multiple of 16 bytes, as the kernel was compiled for."""
    return -(-rows // 8) * 8


def write_decode_items(out: Int32, page_start: Int32, block_size: int) -> int:
    """Parts and items of one query for each row with pages `page_start` [R + 1]; returns the words written.

    A row of one split has no partial result. A context that fills its last page less than wholly may have a last item without
    keys, which adds nothing.
    """
    counts = np.diff(page_start)
    rows = len(counts)
    splits = -(-counts * block_size // SPLIT)
    first = np.zeros(rows + 1, np.int32)
    np.cumsum(splits, out=first[1:])
    total = int(first[-1])
    parts = out[: 2 * rows].reshape(rows, 2)
    parts[:, 0] = first[:-1]
    parts[:, 1] = np.where(splits > 1, splits, 0)
    begin = 2 * rows_aligned(rows)
    out[begin] = total
    row = np.repeat(np.arange(rows, dtype=np.int32), splits)
    place = np.arange(total, dtype=np.int32)
    split = place - first[row]
    end = begin + (total + 1) * ITEM_WORDS
    items = out[begin + ITEM_WORDS : end].reshape(total, ITEM_WORDS)
    items[:, 0] = row
    items[:, 1] = 1
    items[:, 2] = (counts[row] - 1) * block_size - 1
    items[:, 3] = page_start[row]
    items[:, 4] = split
    items[:, 5] = split + 1
    items[:, 6] = np.where(splits[row] > 1, place, -1)
    items[:, 7] = row
    return end


def write_chunk_items(
    out: Int32, query_start: Int32, page_start: Int32, context_lengths: Int32, item_queries: int
) -> int:
    """Items of at most `item_queries` queries, those with most keys first; returns their number."""
    counts = np.diff(query_start)
    tiles = -(-counts // item_queries)
    first = np.zeros(len(counts) + 1, np.int32)
    np.cumsum(tiles, out=first[1:])
    total = int(first[-1])
    row = np.repeat(np.arange(len(counts), dtype=np.int32), tiles)
    offset = (np.arange(total, dtype=np.int32) - first[row]) * item_queries
    count = np.minimum(counts[row] - offset, item_queries)
    position = context_lengths[row] - counts[row] + offset
    order = np.argsort(-(position + count), kind="stable")
    out[0] = total
    items = out[ITEM_WORDS : (total + 1) * ITEM_WORDS].reshape(total, ITEM_WORDS)
    items[:, 0] = (query_start[row] + offset)[order]
    items[:, 1] = count[order]
    items[:, 2] = position[order]
    items[:, 3] = page_start[row][order]
    items[:, 4] = 0
    items[:, 5] = -(-(position + count)[order] // SPLIT)
    items[:, 6] = -1
    items[:, 7] = -1
    return total
