"""Attention that gives a token the same bits in every step (`engine.kernels.invariant_attention`): a step cut into items.

Takes FlashInfer's place behind the same calls, and the same pinned memory. A decode is an item for each split of its context, so
that long contexts spread over the GPU; a chunk is an item for every few queries, each with all splits it reaches, longest first.
A decode's items depend on its context alone and their number stands beside them on the device, so that one captured graph serves
all contexts of a batch size.

Must not know: requests, graphs, who captures.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton

from engine.attention.decode_plan import DecodePlan, DecodeShape
from engine.attention.flashinfer import PLAN_BYTES, FlashInferAttention, Int32, Pages
from engine.attention.invariant_items import (
    ITEM_ROWS,
    ITEM_WORDS,
    SPLIT,
    rows_aligned,
    write_chunk_items,
    write_decode_items,
)
from engine.kernels.invariant_attention import attend, join_splits
from engine.kernels.unpack import fetch_words
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

    def __init__(
        self, storage: DeviceKvStorage, heads: int, most_rows: int, most_positions: int, most_tokens: int
    ) -> None:
        """For steps of at most `most_rows` rows of `most_positions` positions, and `most_tokens` tokens.

        Raises ConfigurationError where their items are too many."""
        layout = storage.layout
        device = storage.memory.device
        self.heads, self.kv_heads, self.head_dim = heads, layout.kv_heads, layout.head_dim
        self.block_size = layout.block_size
        self._hnd = layout.head_order == "HND"
        self._layers = [storage.layer(layer) for layer in range(layout.layers)]
        group = triton.next_power_of_2(heads // layout.kv_heads)
        assert group <= ITEM_ROWS, f"{heads} query heads for {layout.kv_heads} KV heads"
        self._item_queries = ITEM_ROWS // group
        row_blocks = -(-most_positions // self.block_size)
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
        fetch_words(words[:used], self._decode_words[:used])
        return DecodePlan(DecodeShape(rows, rows * self._most_splits, True), [], used)

    def decode(self, layer: int, plan: DecodePlan, queries: torch.Tensor, pages: Pages, out: torch.Tensor) -> None:
        """`queries`, `out` [R, heads, head_dim]; the last two dimensions contiguous."""
        rows = plan.shape.rows
        programs = min(plan.shape.pieces, max(rows, PROGRAMS_AT_LEAST))
        items = self._decode_words[2 * rows_aligned(rows) :]
        self._attend(programs, layer, queries, pages, items, out)
        if self._most_splits > 1:
            join_splits(self._partial, self._sums, self._decode_words, out)

    def plan_prefill(
        self, pinned: torch.Tensor, query_start: Int32, page_start: Int32, context_lengths: Int32
    ) -> ChunkPlan:
        """`query_start`, `page_start` [R + 1] and `context_lengths` [R] on the host, `query_start` from 0 on."""
        words = pinned.view(torch.int32)
        items = write_chunk_items(words.numpy(), query_start, page_start, context_lengths, self._item_queries)
        used = (items + 1) * ITEM_WORDS
        fetch_words(words[:used], self._chunk_words[:used])
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
