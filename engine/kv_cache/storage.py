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

Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class PoolShard:
    """Memory of one tensor-parallel rank of one pipeline stage, in the shape that `foundation.kv_layout` gives.

    `memory` is uint8 [layers / layer_group, blocks, layer_group, 2, *inner, head_dim * dtype bytes], C-contiguous.
    """

    stage: int
    rank: int
    first_layer: int
    end_layer: int
    first_head: int
    end_head: int
    layer_group: int
    memory: Bytes

    @property
    def heads(self) -> int:
        return self.end_head - self.first_head


class KvStorage:
    """All shards of one node's pool, numbered stage-major: shard = stage * tensor_parallel + rank."""

    def __init__(self, layout: KvLayout, num_blocks: int) -> None:
        self.layout = layout
        self.num_blocks = num_blocks
        self.owner_words: npt.NDArray[np.uint64] = np.zeros(num_blocks, np.uint64)
        self.shards: tuple[PoolShard, ...] = tuple(
            _allocate(layout, num_blocks, stage, rank, layers, heads)
            for stage, layers in enumerate(_stage_layers(layout))
            for rank, heads in enumerate(_rank_heads(layout))
        )

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


def _allocate(
    layout: KvLayout, num_blocks: int, stage: int, rank: int, layers: tuple[int, int], heads: tuple[int, int]
) -> PoolShard:
    if layout.layer_group > layout.layers:
        raise ConfigurationError("--kv-layer-group", f"is {layout.layer_group}; the model has {layout.layers} layers")
    count = layers[1] - layers[0]
    group = min(layout.layer_group, count)
    if count % group:
        raise ConfigurationError(
            "--kv-layer-group", f"is {layout.layer_group}; it must divide the {count} layers of a pipeline stage"
        )
    share = heads[1] - heads[0]
    inner = (layout.block_size, share) if layout.head_order == "NHD" else (share, layout.block_size)
    row_bytes = layout.head_dim * DTYPE_BYTES[layout.dtype]
    memory = np.zeros((count // group, num_blocks, group, 2, *inner, row_bytes), np.uint8)
    return PoolShard(stage, rank, *layers, *heads, group, memory)


def _stage_layers(layout: KvLayout) -> list[tuple[int, int]]:
    stages = layout.pipeline_parallel
    if not 1 <= stages <= layout.layers:
        raise ConfigurationError("--pipeline-parallel-size", f"is {stages}; the model has {layout.layers} layers")
    share, rest = divmod(layout.layers, stages)
    ends = [share * (stage + 1) + min(stage + 1, rest) for stage in range(stages)]
    return list(zip([0, *ends[:-1]], ends, strict=True))


def _rank_heads(layout: KvLayout) -> list[tuple[int, int]]:
    ranks, heads = layout.tensor_parallel, layout.kv_heads
    if ranks < 1 or (ranks < heads and heads % ranks):
        raise ConfigurationError(
            "--tensor-parallel-size", f"is {ranks}; it must divide the {heads} KV heads or be larger"
        )
    if ranks > heads:
        return [(rank * heads // ranks, rank * heads // ranks + 1) for rank in range(ranks)]
    share = heads // ranks
    return [(rank * share, (rank + 1) * share) for rank in range(ranks)]
