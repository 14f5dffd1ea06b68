"""Where one parcel's bytes lie in the shards of a node.

A gather reads every byte from exactly one shard; a scatter writes it into every replica. Since no parcel straddles a shard,
a parcel has one source shard, and one target region for each rank that holds its heads.
"""

from __future__ import annotations

from dataclasses import dataclass

from foundation.kv_layout import KvLayout
from foundation.kv_shards import Shard, shards
from kv_transfer.plan.parcels import ParcelName


@dataclass(frozen=True, slots=True)
class Region:
    """A parcel inside one shard's array [groups, blocks, layer_group, 2, *inner]: group, layers in it, heads of the shard."""

    shard: int
    group: int
    first_layer: int
    end_layer: int
    first_head: int
    end_head: int


def target_regions(parcel: ParcelName, layout: KvLayout) -> tuple[Region, ...]:
    """One region for each shard that holds the parcel's layers and heads; at least one."""
    regions = tuple(
        _region(index, shard, parcel, layout.layer_group)
        for index, shard in enumerate(shards(layout))
        if _holds(shard, parcel)
    )
    assert regions, f"{parcel} straddles the shards of {layout}"
    return regions


def source_region(parcel: ParcelName, layout: KvLayout) -> Region:
    """The region of the first shard that holds the parcel."""
    return target_regions(parcel, layout)[0]


def _holds(shard: Shard, parcel: ParcelName) -> bool:
    return (
        shard.first_layer <= parcel.first_layer
        and parcel.end_layer <= shard.end_layer
        and shard.first_head <= parcel.first_head
        and parcel.end_head <= shard.end_head
    )


def _region(index: int, shard: Shard, parcel: ParcelName, layer_group: int) -> Region:
    group, first_layer = divmod(parcel.first_layer - shard.first_layer, layer_group)
    end_layer = first_layer + parcel.end_layer - parcel.first_layer
    assert end_layer <= layer_group, f"{parcel} straddles a layer group"
    return Region(
        index, group, first_layer, end_layer, parcel.first_head - shard.first_head, parcel.end_head - shard.first_head
    )
