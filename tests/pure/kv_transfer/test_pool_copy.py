"""Gather and scatter against a reference that moves one head of one position of one layer at a time."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
from hypothesis import given, settings
from hypothesis import strategies as st

from foundation.kv_layout import KvLayout
from foundation.kv_shards import shards
from kv_transfer.plan.parcels import ParcelName, cut_parcels
from kv_transfer.pool_copy import KvPool, gather_parcel, scatter_parcel
from kv_transfer.transfer_blocks import TransferBlocks

LAYERS, HEADS, HEAD_DIM = 6, 3, 2

layouts = st.builds(
    KvLayout,
    layers=st.just(LAYERS),
    kv_heads=st.just(HEADS),
    head_dim=st.just(HEAD_DIM),
    dtype=st.just("float32"),
    block_size=st.sampled_from([1, 2, 3, 4]),
    head_order=st.sampled_from(["NHD", "HND"]),
    layer_group=st.sampled_from([1, 2]),
    tensor_parallel=st.sampled_from([1, 3, 6]),
    pipeline_parallel=st.sampled_from([1, 3]),
)


def empty_pool(layout: KvLayout, blocks: int) -> KvPool:
    def memory(layers: int, heads: int) -> npt.NDArray[np.uint8]:
        inner = (layout.block_size, heads) if layout.head_order == "NHD" else (heads, layout.block_size)
        group = min(layout.layer_group, layers)
        return np.zeros((layers // group, blocks, group, 2, *inner, layout.head_bytes), np.uint8)

    arrays = tuple(memory(it.end_layer - it.first_layer, it.end_head - it.first_head) for it in shards(layout))
    return KvPool(layout, arrays, np.zeros(blocks, np.uint64))


def places(
    pool: KvPool, blocks: TransferBlocks, parcel: ParcelName
) -> Iterator[tuple[tuple[int, ...], Iterator[npt.NDArray[np.uint8]]]]:
    """For each (layer, K or V, position, head) of the parcel: the head's bytes in every shard that holds it."""
    layout = pool.layout

    def copies(layer: int, kv: int, position: int, head: int) -> Iterator[npt.NDArray[np.uint8]]:
        block, offset = blocks.ids[position // layout.block_size], position % layout.block_size
        for shard, array in zip(shards(layout), pool.shards, strict=True):
            if shard.first_layer <= layer < shard.end_layer and shard.first_head <= head < shard.end_head:
                group, inside = divmod(layer - shard.first_layer, array.shape[2])
                inner = (offset, head - shard.first_head)
                yield array[(group, block, inside, kv, *(inner if layout.head_order == "NHD" else inner[::-1]))]

    for layer in range(parcel.first_layer, parcel.end_layer):
        for kv in range(2):
            for position in range(parcel.first_position, parcel.end_position):
                for head in range(parcel.first_head, parcel.end_head):
                    where = layer - parcel.first_layer, kv, position - parcel.first_position, head - parcel.first_head
                    yield where, copies(layer, kv, position, head)


def wire_shape(parcel: ParcelName, layout: KvLayout) -> tuple[int, ...]:
    layers, heads = parcel.end_layer - parcel.first_layer, parcel.end_head - parcel.first_head
    return layers, 2, parcel.positions, heads, layout.head_bytes


@settings(max_examples=80, deadline=None)
@given(source=layouts, target=layouts, data=st.data())
def test_what_lands_is_what_was_there_and_nothing_else_changes(
    source: KvLayout, target: KvLayout, data: st.DataObject
) -> None:
    end = data.draw(st.integers(1, 17), label="end")
    from_position = data.draw(st.integers(0, end - 1), label="from_position")
    slot_bytes = data.draw(st.sampled_from([16, 64, 200, 1000, 100_000]), label="slot_bytes")
    random = np.random.default_rng(end)
    pools, tables = [], []
    for layout in (source, target):
        blocks = -(-end // layout.block_size)
        pool = empty_pool(layout, blocks + 3)
        tables.append(TransferBlocks.of(random.permutation(blocks + 3)[:blocks]))
        for array in pool.shards:
            array[...] = random.integers(0, 256, array.shape, dtype=np.uint8)
        pools.append(pool)
    expected = [array.copy() for array in pools[1].shards]
    reference = KvPool(target, tuple(expected), pools[1].owner_words)
    for parcel in cut_parcels(from_position, end, source, target, slot_bytes):
        payload = np.zeros(parcel.wire_bytes(source), np.uint8)
        gather_parcel(pools[0], tables[0], parcel, payload)
        wire = payload.reshape(wire_shape(parcel, source))
        for where, copies in places(pools[0], tables[0], parcel):
            # Replicas of a head hold random bytes here; the first one is what a gather reads.
            assert np.array_equal(wire[where], next(copies))
        for where, copies in places(reference, tables[1], parcel):
            for copy in copies:
                copy[...] = wire[where]
        scatter_parcel(pools[1], tables[1], parcel, payload)
    assert all(np.array_equal(ours, theirs) for ours, theirs in zip(pools[1].shards, expected, strict=True))
