"""Which layers and which KV heads each shard of a layout holds, and the shape of its memory.

A shard is one tensor-parallel rank of one pipeline stage, and one array in memory (see `kv_layout`). Shards are numbered
stage-major: shard = stage * tensor_parallel + rank.
"""

from __future__ import annotations

from dataclasses import dataclass

from foundation.kv_layout import KvLayout


class LayoutError(ValueError):
    """A layout that cannot be: `field` says where, `problem` what is wrong there."""

    def __init__(self, field: str, problem: str) -> None:
        super().__init__(f"{field} {problem}")
        self.field = field
        self.problem = problem


@dataclass(frozen=True, slots=True)
class Shard:
    """Layers [first_layer, end_layer) and heads [first_head, end_head) of the whole model."""

    stage: int
    rank: int
    first_layer: int
    end_layer: int
    first_head: int
    end_head: int

    @property
    def heads(self) -> int:
        return self.end_head - self.first_head


def stage_layers(layout: KvLayout) -> tuple[tuple[int, int], ...]:
    """[first, end) layer of each pipeline stage; the remainder goes to the earlier stages. Raises LayoutError."""
    stages = layout.pipeline_parallel
    if not 1 <= stages <= layout.layers:
        raise LayoutError("pipeline_parallel", f"is {stages}; the model has {layout.layers} layers")
    share, rest = divmod(layout.layers, stages)
    ends = [share * (stage + 1) + min(stage + 1, rest) for stage in range(stages)]
    return tuple(zip([0, *ends[:-1]], ends, strict=True))


def rank_heads(layout: KvLayout) -> tuple[tuple[int, int], ...]:
    """[first, end) KV head of each tensor-parallel rank; with more ranks than heads several ranks hold the same one. Raises
    LayoutError."""
    ranks, heads = layout.tensor_parallel, layout.kv_heads
    if ranks < 1 or (ranks < heads and heads % ranks):
        raise LayoutError("tensor_parallel", f"is {ranks}; it must divide the {heads} KV heads or be larger")
    if ranks > heads:
        return tuple((rank * heads // ranks, rank * heads // ranks + 1) for rank in range(ranks))
    share = heads // ranks
    return tuple((rank * share, (rank + 1) * share) for rank in range(ranks))


def shards(layout: KvLayout) -> tuple[Shard, ...]:
    """All shards in the order in which a node lists their arrays. Raises LayoutError."""
    return tuple(
        Shard(stage, rank, *layers, *heads)
        for stage, layers in enumerate(stage_layers(layout))
        for rank, heads in enumerate(rank_heads(layout))
    )


def shard_shape(layout: KvLayout, shard: Shard, blocks: int) -> tuple[int, ...]:
    """Shape of a shard's array, in elements; see `kv_layout`. A stage of fewer layers than `layer_group` is one group. Raises
    LayoutError when layer groups do not fill the stage."""
    layers = shard.end_layer - shard.first_layer
    group = min(layout.layer_group, layers)
    if group < 1 or layers % group:
        raise LayoutError(
            "layer_group", f"is {layout.layer_group}; it must divide the {layers} layers of a pipeline stage"
        )
    inner = (layout.block_size, shard.heads) if layout.head_order == "NHD" else (shard.heads, layout.block_size)
    return (layers // group, blocks, group, 2, *inner, layout.head_dim)
