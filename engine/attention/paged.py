"""Attention over the paged pool on CPUs.

Rows with few queries are attended by compiled code where there is any (`native`); what follows is the way in plain PyTorch.

Rows with one query (decode) are attended together: their blocks are gathered through padded tables into [rows, kv_heads,
context, head_dim], and a KV head's query heads stand beside each other as its queries, so no head is ever repeated. Rows of
unlike length are cut into a few groups to bound the padding. Rows with several queries (prefill chunks) are attended one by
one, straight from this step's keys when they have no past. All indices and masks are made once a step.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F

from engine.attention.native import PoolStrides, RowQueries, rows_kernel
from engine.attention.pool_index import LayerRows, StageIndex
from engine.kv_cache.storage import KvStorage, PoolShard
from engine.step import StepPlan

GROUP_COST_BLOCKS = 24
"""A group of decode rows may be padded by as many blocks as gathering and attending another group would cost."""


NATIVE_QUERIES = 16
"""Rows with more queries gain more from a matrix product than from not being copied."""

Shape = tuple[int, int, int, int, int]
"""[rows, 2 (K, V), heads, positions, head_dim]."""


class Scratch:
    """Memory that every layer gathers into anew. Memory fresh from the allocator would cost more than the copy into it: its
    pages have to be mapped and zeroed, and it is in no cache."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._memory = torch.empty(0, dtype=dtype)

    def rows(self, count: int, width: int) -> torch.Tensor:
        """[count, width], with anything in it; what was handed out before is overwritten."""
        if self._memory.numel() < count * width:
            self._memory = torch.empty(count * width, dtype=self._memory.dtype)
        return self._memory[: count * width].view(count, width)


class PagedAttention:
    """Backend over host memory; `heads` is the number of query heads."""

    def __init__(self, storage: KvStorage, heads: int, dtype: torch.dtype) -> None:
        layout = storage.layout
        self.block_size = layout.block_size
        self.heads = heads
        self.kv_heads = layout.kv_heads
        self.head_dim = layout.head_dim
        self.dtype = dtype
        self.scratch = Scratch(dtype)
        plain = dtype == torch.float32 and layout.tensor_parallel == 1 and torch.get_num_threads() == 1
        self.kernel = rows_kernel(layout.head_dim, heads // layout.kv_heads) if plain else None
        self.stages: list[StageIndex] = []
        self.strides: list[PoolStrides] = []
        self.layers: list[_Layer] = []
        for stage in range(layout.pipeline_parallel):
            shards = [shard for shard in storage.shards if shard.stage == stage]
            index = StageIndex(storage, shards[0])
            self.stages.append(index)
            self.strides.append(index.strides(layout.head_dim))
            memories = [torch.from_numpy(shard.memory).view(dtype) for shard in shards]
            for layer in range(shards[0].first_layer, shards[0].end_layer):
                rows = [LayerRows(memory, s, layer, index) for memory, s in zip(memories, shards, strict=True)]
                self.layers.append(_Layer(stage, rows, shards))

    def prepare(self, plan: StepPlan, zero_unread: bool = False) -> PagedStep:
        return PagedStep(self, plan, zero_unread)


class _Layer:
    """One layer in all ranks of its stage. Replicated heads are written to every rank and read from the first."""

    def __init__(self, stage: int, ranks: list[LayerRows], shards: list[PoolShard]) -> None:
        self.stage = stage
        self.ranks = ranks
        self.heads = [(shard.first_head, shard.end_head) for shard in shards]
        first_heads = [first for first, _ in self.heads]
        self.readers = [rank for i, rank in enumerate(ranks) if first_heads.index(first_heads[i]) == i]

    def write(self, keys: torch.Tensor, values: torch.Tensor, rows: torch.Tensor) -> None:
        width = keys.shape[-1]
        for rank, (first, end) in zip(self.ranks, self.heads, strict=True):
            rank.key_rows.index_copy_(0, rows, keys[:, first:end].reshape(-1, width))
            rank.value_rows.index_copy_(0, rows, values[:, first:end].reshape(-1, width))

    def read(self, runs: torch.Tensor, shape: Shape, scratch: Scratch) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values [rows, kv_heads, positions, head_dim]; `shape` is that of one rank's share of both. With one rank
        they stand in `scratch` until the next read."""
        if len(self.readers) == 1:
            source = self.readers[0].runs
            gathered = torch.index_select(source, 0, runs, out=scratch.rows(len(runs), source.shape[1])).view(shape)
        else:
            gathered = torch.cat([rank.runs.index_select(0, runs).view(shape) for rank in self.readers], dim=2)
        return gathered[:, 0], gathered[:, 1]


@dataclass(frozen=True, slots=True)
class _DecodeGroup:
    """Rows of one query each, padded to the longest one's blocks."""

    tokens: torch.Tensor | None
    """[rows] token indices, or None when the group is the whole step in order."""
    runs: list[torch.Tensor]
    shapes: list[Shape]
    mask: torch.Tensor
    """[rows, 1, 1, positions] 0 or -inf, to be added to scores."""
    unread: torch.Tensor | None
    """[rows, 1, positions, 1] bool."""


@dataclass(frozen=True, slots=True)
class _PrefillRow:
    first: int
    end: int
    context: int
    runs: list[torch.Tensor]
    """Empty when the row has no past."""
    shapes: list[Shape]
    mask: torch.Tensor | None
    """[queries, context] 0, or -inf where a query may not look."""


class PagedStep:
    def __init__(self, backend: PagedAttention, plan: StepPlan, zero_unread: bool) -> None:
        self.backend = backend
        self.write_rows = [stage.write_rows(plan.slot_mapping) for stage in backend.stages]
        queries = np.diff(plan.query_start)
        single = np.flatnonzero(queries == 1)
        several = np.flatnonzero(queries > 1)
        self.native: RowQueries | None = None
        if backend.kernel is not None:
            self.native = _native_queries(plan, queries)
            single, several = np.array([], np.int64), np.flatnonzero(queries > NATIVE_QUERIES)
            longest = int(self.native.limits.max(initial=0))
            self.scores = torch.empty(backend.heads // backend.kv_heads * longest, dtype=backend.dtype)
        self.groups = [
            self._decode_group(plan, rows, alone=len(rows) == plan.tokens, zero_unread=zero_unread)
            for rows in decode_groups(single, plan.context_lengths[single], backend.block_size)
        ]
        self.prefills = [self._prefill_row(plan, int(row)) for row in several]

    def attend(self, layer: int, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        rows = self.backend.layers[layer]
        rows.write(keys, values, self.write_rows[rows.stage])
        if len(self.groups) == 1 and self.groups[0].tokens is None:
            return self._attend_group(self.groups[0], rows, queries)
        out = queries.new_empty(queries.shape[0], self.backend.heads * self.backend.head_dim)
        if self.native is not None and self.backend.kernel is not None:
            rank, strides = rows.ranks[0], self.backend.strides[rows.stage]
            self.backend.kernel.attend(queries, out, rank.key_rows, rank.value_rows, strides, self.native, self.scores)
        for group in self.groups:
            assert group.tokens is not None
            out[group.tokens] = self._attend_group(group, rows, queries[group.tokens])
        for prefill in self.prefills:
            self._attend_prefill(prefill, rows, queries, keys, values, out)
        return out

    def _attend_group(self, group: _DecodeGroup, layer: _Layer, queries: torch.Tensor) -> torch.Tensor:
        backend = self.backend
        keys, values = layer.read(group.runs[layer.stage], group.shapes[layer.stage], backend.scratch)
        if group.unread is not None:
            keys, values = keys.masked_fill(group.unread, 0), values.masked_fill(group.unread, 0)
        grouped = queries.reshape(len(queries), backend.kv_heads, -1, backend.head_dim)
        out = F.scaled_dot_product_attention(grouped, keys, values, attn_mask=group.mask)
        return out.reshape(len(queries), -1)

    def _attend_prefill(
        self,
        row: _PrefillRow,
        layer: _Layer,
        queries: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        out: torch.Tensor,
    ) -> None:
        part = slice(row.first, row.end)
        if row.mask is None:
            past_keys, past_values = keys[part].transpose(0, 1)[None], values[part].transpose(0, 1)[None]
        else:
            past_keys, past_values = layer.read(row.runs[layer.stage], row.shapes[layer.stage], self.backend.scratch)
            past_keys, past_values = past_keys[:, :, : row.context], past_values[:, :, : row.context]
        attended = F.scaled_dot_product_attention(
            queries[part].transpose(0, 1)[None],
            past_keys,
            past_values,
            attn_mask=row.mask,
            is_causal=row.mask is None,
            enable_gqa=True,
        )
        out[part] = attended[0].transpose(0, 1).reshape(row.end - row.first, -1)

    def _decode_group(self, plan: StepPlan, rows: np.ndarray, alone: bool, zero_unread: bool) -> _DecodeGroup:
        contexts = plan.context_lengths[rows]
        blocks = -(-int(contexts.max()) // self.backend.block_size)
        beyond = torch.from_numpy(np.arange(blocks * self.backend.block_size) >= contexts[:, None])
        mask = torch.zeros(beyond.shape, dtype=self.backend.dtype).masked_fill_(beyond, float("-inf"))
        runs, shapes = self._reads(plan.block_tables[rows, :blocks])
        return _DecodeGroup(
            tokens=None
            if alone and bool((np.diff(rows) == 1).all())
            else torch.from_numpy(plan.query_start[rows].astype(np.int64)),
            runs=runs,
            shapes=shapes,
            mask=mask[:, None, None, :],
            unread=beyond[:, None, :, None] if zero_unread else None,
        )

    def _prefill_row(self, plan: StepPlan, row: int) -> _PrefillRow:
        first, end = int(plan.query_start[row]), int(plan.query_start[row + 1])
        context = int(plan.context_lengths[row])
        past = context - (end - first)
        if past == 0:
            return _PrefillRow(first, end, context, [], [], None)
        blocks = -(-context // self.backend.block_size)
        runs, shapes = self._reads(plan.block_tables[row : row + 1, :blocks])
        later = torch.arange(context) > torch.arange(past, context)[:, None]
        mask = torch.zeros(later.shape, dtype=self.backend.dtype).masked_fill_(later, float("-inf"))
        return _PrefillRow(first, end, context, runs, shapes, mask)

    def _reads(self, tables: np.ndarray) -> tuple[list[torch.Tensor], list[Shape]]:
        """Run indices and gathered shape for each stage."""
        rows, blocks = tables.shape
        positions = blocks * self.backend.block_size
        stages = self.backend.stages
        return [stage.read_runs(tables) for stage in stages], [
            (rows, 2, stage.heads, positions, self.backend.head_dim) for stage in stages
        ]


def _native_queries(plan: StepPlan, queries: np.ndarray) -> RowQueries:
    """The queries of all rows that have few of them."""
    row_of_token = np.repeat(np.arange(len(queries)), queries)
    tokens = np.flatnonzero(queries[row_of_token] <= NATIVE_QUERIES)
    return RowQueries(
        tables=np.ascontiguousarray(plan.block_tables),
        tokens=tokens,
        rows=row_of_token[tokens],
        limits=plan.positions[tokens] + 1,
    )


def decode_groups(rows: np.ndarray, contexts: np.ndarray, block_size: int) -> list[np.ndarray]:
    """Cut `rows` into groups, each in ascending order, such that padding a group to its longest row wastes at most
    GROUP_COST_BLOCKS blocks. Greedy from the longest row on."""
    if len(rows) == 0:
        return []
    blocks = -(-contexts // block_size)
    order = np.argsort(-blocks, kind="stable")
    groups: list[np.ndarray] = []
    start, waste = 0, 0
    for i in range(1, len(order)):
        waste += int(blocks[order[start]] - blocks[order[i]])
        if waste > GROUP_COST_BLOCKS:
            groups.append(np.sort(rows[order[start:i]]))
            start, waste = i, 0
    groups.append(np.sort(rows[order[start:]]))
    return groups
