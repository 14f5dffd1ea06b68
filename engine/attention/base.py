"""The interface of attention over the paged pool.

A backend is built once over the pool; `prepare` reads one step's layout (which rows, how long, which blocks) and everything it
needs for all layers is made there, once; `attend` is called for each layer in order.
"""

from __future__ import annotations

from typing import Protocol

import torch

from engine.step import StepPlan


class StepAttention(Protocol):
    def attend(self, layer: int, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """Store this step's keys and values [T, kv_heads, head_dim] in the pool, then attend causally from the rotated queries
        [T, heads, head_dim] to each row's whole context. Returns [T, heads * head_dim]."""


class AttentionBackend(Protocol):
    def prepare(self, plan: StepPlan, zero_unread: bool = False) -> StepAttention:
        """Only `slot_mapping`, `query_start`, `context_lengths` and `block_tables` of the plan are read.

        `zero_unread`: memory beyond a row's context may hold non-finite numbers, which must not reach the result even with
        weight zero; slower, so only asked for after a step came out non-finite.
        """
