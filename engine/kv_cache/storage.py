"""The KV pool's memory on a host: one array for each shard, and an owner word for each block.

Plain numpy, so that transfers read and write it without a tensor library; the attention wraps the same bytes as tensors.
The memory is touched only by the runner (positions of a launched plan) and by transfers (blocks they own).
Owner words are written by whoever hands blocks out, and read by gathers before and after they copy.

Must not know: requests, which blocks are free, torch.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from foundation.errors import ConfigurationError
from foundation.kv_layout import DTYPE_BYTES, KvLayout
from foundation.kv_shards import LayoutError, Shard, shard_shape, shards

Bytes = npt.NDArray[np.uint8]

SETTINGS = {
    "layer_group": "--kv-layer-group",
    "pipeline_parallel": "--pipeline-parallel-size",
    "tensor_parallel": "--tensor-parallel-size",
}
"""Who asks for a field of the layout."""


@dataclass(frozen=True, slots=True)
class PoolShard(Shard):
    """A shard and its memory, in the shape that `foundation.kv_layout` gives.

    `memory` is uint8 [layers / layer_group, blocks, layer_group, 2, *inner, head_dim * dtype bytes], C-contiguous.
    """

    layer_group: int
    memory: Bytes


class KvStorage:
    """All shards of one node's pool, numbered as `foundation.kv_shards` does."""

    def __init__(self, layout: KvLayout, num_blocks: int) -> None:
        """Raises ConfigurationError naming the setting that does not fit the model."""
        self.layout = layout
        self.num_blocks = num_blocks
        self.owner_words: npt.NDArray[np.uint64] = np.zeros(num_blocks, np.uint64)
        if layout.layer_group > layout.layers:
            raise ConfigurationError(
                "--kv-layer-group", f"is {layout.layer_group}; the model has {layout.layers} layers"
            )
        try:
            self.shards: tuple[PoolShard, ...] = tuple(_allocate(layout, num_blocks, shard) for shard in shards(layout))
        except LayoutError as error:
            raise ConfigurationError(SETTINGS[error.field], error.problem) from error

    def pool_views(self) -> tuple[Bytes, ...]:
        """One uint8 array a shard (see `PoolShard.memory`); writing to it writes the pool."""
        return tuple(shard.memory for shard in self.shards)

    def copy_blocks(self, copies: npt.NDArray[np.int64]) -> None:
        """All KV of the blocks in the first column of `copies` [C, 2] into those of the second."""
        for shard in self.shards:
            shard.memory[:, copies[:, 1]] = shard.memory[:, copies[:, 0]]

    def shards_of_layer(self, layer: int) -> tuple[PoolShard, ...]:
        """The ranks of the stage that holds `layer`."""
        return tuple(shard for shard in self.shards if shard.first_layer <= layer < shard.end_layer)


def _allocate(layout: KvLayout, num_blocks: int, shard: Shard) -> PoolShard:
    *outer, head_dim = shard_shape(layout, shard, num_blocks)
    memory = np.zeros((*outer, head_dim * DTYPE_BYTES[layout.dtype]), np.uint8)
    layers, heads = (shard.first_layer, shard.end_layer), (shard.first_head, shard.end_head)
    return PoolShard(shard.stage, shard.rank, *layers, *heads, layer_group=memory.shape[2], memory=memory)
