"""Which layers and which KV heads each shard of a layout holds.

A shard is one tensor-parallel rank of one pipeline stage, and one array in memory (see `foundation.kv_layout`). Shards are
numbered stage-major: shard = stage * tensor_parallel + rank.
"""

from __future__ import annotations

from dataclasses import dataclass

from foundation.kv_layout import KvLayout


@dataclass(frozen=True, slots=True)
class Shard:
    """Layers [first_layer, end_layer) and heads [first_head, end_head) of the whole model."""

    stage: int
    rank: int
    first_layer: int
    end_layer: int
    first_head: int
    end_head: int


def stage_layers(layout: KvLayout) -> tuple[tuple[int, int], ...]:
    """[first, end) layer of each pipeline stage; the remainder goes to the earlier stages."""
    stages = layout.pipeline_parallel
    if not 1 <= stages <= layout.layers:
        raise ValueError(f"pipeline_parallel is {stages}; it must be from 1 to the number of layers, {layout.layers}")
    share, rest = divmod(layout.layers, stages)
    ends = [share * (stage + 1) + min(stage + 1, rest) for stage in range(stages)]
    return tuple(zip([0, *ends[:-1]], ends, strict=True))


def rank_heads(layout: KvLayout) -> tuple[tuple[int, int], ...]:
    """[first, end) KV head of each tensor-parallel rank; with more ranks than heads several ranks hold the same one."""
    ranks, heads = layout.tensor_parallel, layout.kv_heads
    if ranks < 1 or (ranks < heads and heads % ranks):
        raise ValueError(f"tensor_parallel is {ranks}; it must divide the {heads} KV heads or be larger")
    if ranks > heads:
        return tuple((rank * heads // ranks, rank * heads // ranks + 1) for rank in range(ranks))
    share = heads // ranks
    return tuple((rank * share, (rank + 1) * share) for rank in range(ranks))


def shards(layout: KvLayout) -> tuple[Shard, ...]:
    """All shards in the order in which a node lists their arrays."""
    return tuple(
        Shard(stage, rank, *layers, *heads)
        for stage, layers in enumerate(stage_layers(layout))
        for rank, heads in enumerate(rank_heads(layout))
    )


def shard_shape(layout: KvLayout, shard: Shard, blocks: int) -> tuple[int, ...]:
    """Shape of a shard's array; see `foundation.kv_layout`. Raises ValueError when layer groups do not fill its stage."""
    layers, heads = shard.end_layer - shard.first_layer, shard.end_head - shard.first_head
    group = min(layout.layer_group, layers)
    if layers % group:
        raise ValueError(f"layer_group is {layout.layer_group}; it must divide the {layers} layers of a pipeline stage")
    inner = (layout.block_size, heads) if layout.head_order == "NHD" else (heads, layout.block_size)
    return (layers // group, blocks, group, 2, *inner, layout.head_dim)


def layer_cuts(layout: KvLayout) -> frozenset[int]:
    """Layers at which a run of layers that lies together in one array begins; the number of layers included.

    A stage's layers are grouped from its first one on; a stage of fewer layers than `layer_group` is one group.
    """
    if layout.layer_group < 1:
        raise ValueError(f"layer_group is {layout.layer_group}; it must be at least 1")
    begins = (layer for first, end in stage_layers(layout) for layer in range(first, end, layout.layer_group))
    return frozenset((*begins, layout.layers))


def head_cuts(layout: KvLayout) -> frozenset[int]:
    """Heads at which some rank's share begins; the number of heads included."""
    return frozenset((*(first for first, _ in rank_heads(layout)), layout.kv_heads))
