"""Gather and scatter: one parcel between a pool's blocks and its wire layout [layer, 2 (K, V), position, head, dim].

Both are a single indexed copy of items: the pool's memory is seen as one long row of equal items, the largest that lie
contiguous on both sides, and an index array says which item comes where. A parcel lies in one layer group of one shard
(`kv_transfer.plan`), so three cases cover every layout:

    whole blocks, all heads of the shard (NHD), or one head (HND):   an item is a block's K or V of one layer
    NHD otherwise:                                                   an item is a run of heads at one position
    HND otherwise:                                                   an item is one head at one position

Must not know: slots, digests, threads.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd

import numpy as np
import numpy.typing as npt

from foundation.kv_layout import KvLayout
from kv_transfer.plan.parcels import ParcelName
from kv_transfer.plan.regions import Region, source_region, target_regions
from kv_transfer.transfer_blocks import TransferBlocks
from kv_transfer.transport.base import Bytes

Index = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class KvPool:
    """A node's KV memory as a transfer sees it.

    `shards[stage * tensor_parallel + rank]`: uint8 [groups, blocks, layer_group, 2, *inner, head bytes], C-contiguous, as
    `foundation.kv_layout` describes. `owner_words` [blocks] uint64: whose KV each block holds.
    """

    layout: KvLayout
    shards: tuple[Bytes, ...]
    owner_words: npt.NDArray[np.uint64]

    def __post_init__(self) -> None:
        for shard in self.shards:
            assert shard.dtype == np.uint8, f"a pool shard of {shard.dtype}"
            assert shard.flags.c_contiguous, "a pool shard that is not contiguous"
            assert shard.shape[-1] == self.layout.head_bytes, f"shard {shard.shape} for {self.layout}"


def gather_parcel(pool: KvPool, blocks: TransferBlocks, parcel: ParcelName, payload: Bytes) -> None:
    """Copy the parcel out of the transfer's blocks. `payload` is exactly its wire bytes."""
    region = source_region(parcel, pool.layout)
    shard = pool.shards[region.shard]
    item_bytes, index = _items(shard.shape, region, _ids(blocks, parcel, pool.layout), parcel, pool.layout)
    items = payload.view(f"V{item_bytes}")
    np.take(shard.reshape(-1).view(items.dtype), index, out=items, mode="clip")


def scatter_parcel(pool: KvPool, blocks: TransferBlocks, parcel: ParcelName, payload: Bytes) -> None:
    """Copy the parcel into the transfer's blocks, in every shard that holds its heads."""
    ids = _ids(blocks, parcel, pool.layout)
    for region in target_regions(parcel, pool.layout):
        shard = pool.shards[region.shard]
        item_bytes, index = _items(shard.shape, region, ids, parcel, pool.layout)
        items = payload.view(f"V{item_bytes}")
        shard.reshape(-1).view(items.dtype)[index] = items


def _ids(blocks: TransferBlocks, parcel: ParcelName, layout: KvLayout) -> Index:
    return blocks.ids[blocks.covering(parcel, layout.block_size)]


def _items(
    shape: tuple[int, ...], region: Region, blocks: Index, parcel: ParcelName, layout: KvLayout
) -> tuple[int, Index]:
    """Item size in bytes, and for each item of the payload, in wire order, its place in the shard, counted in items."""
    _, pool_blocks, layer_group, _, *inner, head_bytes = shape
    assert int(blocks.min()) >= 0, "a negative block id"
    assert int(blocks.max()) < pool_blocks, f"a block id beyond a pool of {pool_blocks}"
    nhd = layout.head_order == "NHD"
    block_size, heads = inner if nhd else inner[::-1]
    layers = np.arange(region.first_layer, region.end_layer)[:, None, None]
    planes = ((region.group * pool_blocks + blocks) * layer_group + layers) * 2 + np.arange(2)[:, None]
    taken = region.end_head - region.first_head
    whole_blocks = parcel.first_position % block_size == 0 and parcel.end_position % block_size == 0
    if whole_blocks and nhd and taken == heads:
        return block_size * heads * head_bytes, planes.reshape(-1)
    if whole_blocks and not nhd and taken == 1:
        return block_size * head_bytes, (planes * heads + region.first_head).reshape(-1)
    places = np.arange(block_size)[:, None]
    if nhd:
        run = gcd(heads, region.first_head, taken)
        item_bytes, items_a_plane = run * head_bytes, block_size * heads // run
        within = places * (heads // run) + np.arange(region.first_head // run, region.end_head // run)
    else:
        item_bytes, items_a_plane = head_bytes, heads * block_size
        within = places + np.arange(region.first_head, region.end_head) * block_size
    # Added by whole blocks, the longest rows there are: a row for each position, a few heads long, took three times as long.
    index = (planes * items_a_plane)[..., None] + within.reshape(-1)
    skipped = parcel.first_position % block_size
    wanted = slice(skipped, skipped + parcel.positions)
    return item_bytes, index.reshape(len(layers), 2, -1, within.shape[1])[:, :, wanted].reshape(-1)
