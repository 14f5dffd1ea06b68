"""Attention written from its definition, one token and one head at a time, in float64: the oracle of the others.

It finds a position's bytes through `foundation.kv_layout`'s words alone, so it shares no index arithmetic with fast paths.
"""

from __future__ import annotations

import torch

from engine.kv_cache.storage import KvStorage, PoolShard
from engine.step import StepPlan


class ReferenceAttention:
    """Backend over host memory; `heads` is the number of query heads."""

    def __init__(self, storage: KvStorage, heads: int, dtype: torch.dtype) -> None:
        self.storage = storage
        self.heads = heads
        self.tensors = [torch.from_numpy(shard.memory).view(dtype) for shard in storage.shards]

    def prepare(self, plan: StepPlan, zero_unread: bool = False) -> ReferenceStep:
        return ReferenceStep(self, plan)

    def cell(self, shard: PoolShard, layer: int, block: int, offset: int, head: int) -> torch.Tensor:
        """[2, head_dim] view of K and V of one head of one position; `layer` and `head` are the model's."""
        group, in_group = divmod(layer - shard.first_layer, shard.layer_group)
        block_memory = self.tensors[self.storage.shards.index(shard)][group, block, in_group]
        inner = (offset, head - shard.first_head)
        if self.storage.layout.head_order == "HND":
            inner = inner[::-1]
        return block_memory[:, inner[0], inner[1]]


class ReferenceStep:
    def __init__(self, backend: ReferenceAttention, plan: StepPlan) -> None:
        self.backend = backend
        self.plan = plan

    def attend(self, layer: int, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        backend, plan = self.backend, self.plan
        block_size = backend.storage.layout.block_size
        shards = backend.storage.shards_of_layer(layer)
        for token, slot in enumerate(plan.slot_mapping.tolist()):
            for shard in shards:
                for head in range(shard.first_head, shard.end_head):
                    cell = backend.cell(shard, layer, slot // block_size, slot % block_size, head)
                    cell[0], cell[1] = keys[token, head], values[token, head]
        out = torch.empty_like(queries)
        group = backend.heads // backend.storage.layout.kv_heads
        for row in range(plan.rows):
            first, end = int(plan.query_start[row]), int(plan.query_start[row + 1])
            for token in range(first, end):
                context = int(plan.context_lengths[row]) - (end - 1 - token)
                for head in range(backend.heads):
                    kv_head = head // group
                    shard = next(s for s in shards if s.first_head <= kv_head < s.end_head)
                    table = plan.block_tables[row].tolist()
                    cells = torch.stack(
                        [
                            backend.cell(shard, layer, table[p // block_size], p % block_size, kv_head)
                            for p in range(context)
                        ]
                    ).double()
                    scores = cells[:, 0] @ queries[token, head].double() / queries.shape[-1] ** 0.5
                    out[token, head] = (scores.softmax(0) @ cells[:, 1]).to(out.dtype)
        return out.flatten(1)
