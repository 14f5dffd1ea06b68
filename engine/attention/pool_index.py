"""Where positions lie in the pool, as row indices: computed once a step, the same for every layer of a pipeline stage.

A shard's memory is seen as rows of head_dim elements (to write) and as rows of the longest run that belongs to one head (to
read: block_size * head_dim elements for head order HND, head_dim for NHD). With a view that begins at a layer's first K or V
byte, a block's first row is block * `block_stride` in every layer, so no layer needs an index of its own.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from engine.attention.native import PoolStrides
from engine.kv_cache.storage import KvStorage, PoolShard

Int64 = npt.NDArray[np.int64]


class StageIndex:
    """Index arithmetic of one pipeline stage; all its ranks hold equally many heads, so they share indices."""

    def __init__(self, storage: KvStorage, shard: PoolShard) -> None:
        layout = storage.layout
        self.block_size = layout.block_size
        self.head_order = layout.head_order
        self.heads = shard.heads
        self.rows_per_block = shard.layer_group * 2 * layout.block_size * shard.heads
        self.run_positions = layout.block_size if layout.head_order == "HND" else 1

    def strides(self, head_dim: int) -> PoolStrides:
        hnd = self.head_order == "HND"
        return PoolStrides(
            block=self.rows_per_block * head_dim,
            head=(self.block_size if hnd else 1) * head_dim,
            position=(1 if hnd else self.heads) * head_dim,
            block_size=self.block_size,
            heads=self.heads,
        )

    def write_rows(self, slots: Int64) -> torch.Tensor:
        """[T * heads] rows of head_dim elements for slots [T]."""
        blocks, offsets = np.divmod(slots, self.block_size)
        heads = np.arange(self.heads)
        hnd = self.head_order == "HND"
        inner = heads * self.block_size + offsets[:, None] if hnd else offsets[:, None] * self.heads + heads
        return torch.from_numpy((blocks[:, None] * self.rows_per_block + inner).reshape(-1))

    def read_runs(self, tables: npt.NDArray[np.int32]) -> torch.Tensor:
        """[R * 2 * heads * n * block_size / run_positions] run indices for block tables [R, n]: gathered, they are
        [R, 2 (K, V), heads, n * block_size, head_dim]."""
        blocks = tables.astype(np.int64)[:, None, None, :] * (self.rows_per_block // self.run_positions)
        sides = np.arange(2)[:, None, None] * (self.heads * self.block_size // self.run_positions)
        runs = blocks + sides + np.arange(self.heads)[:, None]
        if self.head_order == "HND":
            return torch.from_numpy(runs.reshape(-1))
        offsets = np.arange(self.block_size) * self.heads
        return torch.from_numpy((runs[..., None] + offsets).reshape(-1))


class LayerRows:
    """One layer of one shard as row views that begin at its first K (and V) byte; see the module's head."""

    def __init__(self, memory: torch.Tensor, shard: PoolShard, layer: int, index: StageIndex) -> None:
        head_dim = memory.shape[-1]
        blocks = memory.shape[1]
        side_rows = index.block_size * index.heads
        group, in_group = divmod(layer - shard.first_layer, shard.layer_group)
        first_row = (group * blocks * shard.layer_group + in_group) * 2 * side_rows
        rows = memory.reshape(-1, head_dim)
        runs = memory.reshape(-1, index.run_positions * head_dim)
        self.key_rows, self.value_rows = rows[first_row:], rows[first_row + side_rows :]
        self.runs = runs[first_row // index.run_positions :]
