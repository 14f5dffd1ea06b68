"""The cut of a transfer: one partition, in token-major order, never across a shard, never larger than a slot."""

from __future__ import annotations

import itertools
import random
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foundation.kv_layout import KvLayout
from foundation.kv_shards import shard_shape, shards
from kv_transfer.plan.parcels import (
    PARCELS_AT_MOST,
    ParcelName,
    TooManyParcels,
    cut_parcels,
    partition_error,
    verified_prefix,
)
from kv_transfer.plan.regions import source_region, target_regions
from kv_transfer.pool_copy import KvPool, gather_parcel, scatter_parcel
from kv_transfer.transfer_blocks import TransferBlocks

HEAD_DIM = 2
ELEMENT_BYTES = 4


@st.composite
def layout_pairs(draw: st.DrawFn) -> tuple[KvLayout, KvLayout]:
    kv_heads = draw(st.sampled_from([1, 2, 3, 6]))
    layers = draw(st.sampled_from([3, 6]))
    return tuple(draw(layouts(layers, kv_heads)) for _ in range(2))  # type: ignore[return-value]


@st.composite
def layouts(draw: st.DrawFn, layers: int, kv_heads: int) -> KvLayout:
    ranks = [tp for tp in (1, 2, 3, 6) if tp > kv_heads or kv_heads % tp == 0]
    pipeline = draw(st.sampled_from([1, 2, 3]))
    stage_sizes = {layers // pipeline, -(-layers // pipeline)}
    groups = [g for g in range(1, layers + 1) if all(size % min(g, size) == 0 for size in stage_sizes)]
    return KvLayout(
        layers=layers,
        kv_heads=kv_heads,
        head_dim=HEAD_DIM,
        dtype="float32",
        block_size=draw(st.sampled_from([1, 3, 4, 8])),
        head_order=draw(st.sampled_from(["NHD", "HND"])),
        layer_group=draw(st.sampled_from(groups)),
        tensor_parallel=draw(st.sampled_from(ranks)),
        pipeline_parallel=pipeline,
    )


@st.composite
def transfers(draw: st.DrawFn) -> tuple[KvLayout, KvLayout, int, int, int]:
    source, target = draw(layout_pairs())
    from_position = draw(st.integers(0, 3)) * target.block_size
    end_position = from_position + draw(st.integers(0, 40))
    slot_bytes = draw(st.sampled_from([16, 17, 64, 100, 256, 1000, 4096, 1 << 20]))
    return source, target, from_position, end_position, slot_bytes


def reference_write(pools: list[np.ndarray], layout: KvLayout, blocks: list[int], kv: np.ndarray) -> None:
    """kv: [layer, 2, position, head, dim] of the whole model, written element by element wherever a replica lives."""
    for pool, shard in zip(pools, shards(layout), strict=True):
        group_size = pool.shape[2]
        for layer in range(shard.first_layer, shard.end_layer):
            group, within = divmod(layer - shard.first_layer, group_size)
            for position in range(kv.shape[2]):
                block, offset = blocks[position // layout.block_size], position % layout.block_size
                for head in range(shard.first_head, shard.end_head):
                    place = (offset, head - shard.first_head)
                    inner = place if layout.head_order == "NHD" else place[::-1]
                    for half in range(2):
                        pool[(group, block, within, half, *inner)] = kv[layer, half, position, head]


def pools_of(layout: KvLayout, blocks: int) -> list[np.ndarray]:
    return [np.full(shard_shape(layout, shard, blocks), -1, np.float32) for shard in shards(layout)]


def as_pool(layout: KvLayout, arrays: list[np.ndarray]) -> KvPool:
    views = tuple(array.view(np.uint8) for array in arrays)
    return KvPool(layout, views, np.zeros(arrays[0].shape[1], np.uint64))


@given(transfers())
def test_parcels_partition_what_is_wanted_in_token_major_order_within_a_slot(
    transfer: tuple[KvLayout, KvLayout, int, int, int],
) -> None:
    source, target, from_position, end_position, slot_bytes = transfer
    plan = cut_parcels(from_position, end_position, source, target, slot_bytes)
    wanted = ParcelName(from_position, end_position, 0, source.layers, 0, source.kv_heads)
    assert partition_error(plan, wanted) is None
    assert all(0 < parcel.wire_bytes(source) <= slot_bytes for parcel in plan)
    assert [p.first_position for p in plan] == sorted(p.first_position for p in plan)
    assert len(set(plan)) == len(plan)
    for parcel in plan:
        assert source_region(parcel, source)
        assert target_regions(parcel, target)


@given(transfers())
def test_a_side_that_is_source_or_target_cuts_alike(transfer: tuple[KvLayout, KvLayout, int, int, int]) -> None:
    source, target, *rest = transfer
    assert cut_parcels(rest[0], rest[1], source, target, rest[2]) == cut_parcels(
        rest[0], rest[1], target, source, rest[2]
    )


@settings(max_examples=60)
@given(transfers(), st.randoms(use_true_random=False))
def test_what_lands_is_what_was_there_whatever_the_layouts(
    transfer: tuple[KvLayout, KvLayout, int, int, int], random: object
) -> None:
    source, target, from_position, end_position, slot_bytes = transfer
    kv = np.arange(source.layers * 2 * end_position * source.kv_heads * HEAD_DIM, dtype=np.float32)
    kv = kv.reshape(source.layers, 2, end_position, source.kv_heads, HEAD_DIM)
    sides = []
    for layout in (source, target):
        count = -(-end_position // layout.block_size)
        blocks = list(range(count + 2))
        random.shuffle(blocks)  # type: ignore[attr-defined]
        sides.append((layout, pools_of(layout, count + 2), blocks))
    reference_write(sides[0][1], source, sides[0][2], kv)
    expected = pools_of(target, len(sides[1][2]))
    reference_write(expected, target, sides[1][2], kv)
    reference_write(sides[1][1], target, sides[1][2], kv[:, :, :from_position])
    (_, source_arrays, source_blocks), (_, target_arrays, target_blocks) = sides
    source_pool, target_pool = as_pool(source, source_arrays), as_pool(target, target_arrays)
    for parcel in cut_parcels(from_position, end_position, source, target, slot_bytes):
        wire = np.empty(parcel.wire_bytes(source), np.uint8)
        gather_parcel(source_pool, TransferBlocks.of(source_blocks), parcel, wire)
        scatter_parcel(target_pool, TransferBlocks.of(target_blocks), parcel, wire)
    for landed, wanted in zip(sides[1][1], expected, strict=True):
        np.testing.assert_array_equal(landed, wanted)


@given(transfers(), st.data())
def test_a_missing_a_double_and_a_stray_parcel_are_each_told_apart(
    transfer: tuple[KvLayout, KvLayout, int, int, int], data: st.DataObject
) -> None:
    source, target, from_position, end_position, slot_bytes = transfer
    plan = cut_parcels(from_position, end_position, source, target, slot_bytes)
    wanted = ParcelName(from_position, end_position, 0, source.layers, 0, source.kv_heads)
    if not plan:
        return
    chosen = data.draw(st.sampled_from(plan))
    without = [parcel for parcel in plan if parcel != chosen]
    assert (partition_error(without, wanted) or "").startswith("hole")
    assert (partition_error([*plan, chosen], wanted) or "").startswith("overlap")
    stray = chosen._replace(first_position=end_position, end_position=end_position + 1)
    assert (partition_error([*without, stray], wanted) or "").startswith("outside")


def split(box: tuple[int, ...], dice: random.Random) -> list[tuple[int, ...]]:
    """Parts that tile the box, cut at random and in no grid."""
    cuttable = [axis for axis in (0, 2, 4) if box[axis + 1] - box[axis] > 1]
    if not cuttable or dice.random() < 0.2:
        return [box]
    axis = dice.choice(cuttable)
    cut = dice.randrange(box[axis] + 1, box[axis + 1])
    low, high = (*box[: axis + 1], cut, *box[axis + 2 :]), (*box[:axis], cut, *box[axis + 1 :])
    return split(low, dice) + split(high, dice)


@given(st.randoms(use_true_random=False))
def test_parcels_partition_what_is_wanted_if_and_only_if_each_cell_lies_in_one_of_them(dice: random.Random) -> None:
    wanted = ParcelName(1, 5, 0, 4, 0, 3)
    parcels = [ParcelName(*box) for box in split(wanted, dice)]
    if dice.random() < 0.7:  # one of them a little different: a hole, an overlap, both, or as it was
        index, axis = dice.randrange(len(parcels)), dice.randrange(6)
        changed = list(parcels[index])
        changed[axis] = min(max(changed[axis] + dice.choice((-1, 1)), wanted[axis // 2 * 2]), wanted[axis // 2 * 2 + 1])
        parcels[index] = ParcelName(*changed)
    covered = Counter(
        cell for p in parcels for cell in itertools.product(range(*p[0:2]), range(*p[2:4]), range(*p[4:6]))
    )
    tiles = all(p.volume > 0 for p in parcels) and set(covered.values()) == {1} and len(covered) == wanted.volume
    assert (partition_error(parcels, wanted) is None) == tiles


@given(transfers(), st.data())
def test_the_verified_prefix_ends_at_the_first_position_with_a_missing_parcel(
    transfer: tuple[KvLayout, KvLayout, int, int, int], data: st.DataObject
) -> None:
    source, target, from_position, end_position, slot_bytes = transfer
    plan = cut_parcels(from_position, end_position, source, target, slot_bytes)
    verified = data.draw(st.sets(st.integers(0, max(0, len(plan) - 1))))
    prefix = verified_prefix(plan, verified, end_position)
    missing = [p for i, p in enumerate(plan) if i not in verified]
    covered = set(range(from_position, end_position)) - {
        position for p in missing for position in range(p.first_position, p.end_position)
    }
    expected = from_position
    while expected in covered:
        expected += 1
    assert prefix == expected


def test_whole_blocks_of_both_sides_travel_together_where_they_fit() -> None:
    source = KvLayout(layers=30, kv_heads=3, head_dim=64, dtype="float32", block_size=16, layer_group=30)
    target = KvLayout(layers=30, kv_heads=3, head_dim=64, dtype="float32", block_size=32, layer_group=30)
    plan = cut_parcels(32, 500, source, target, slot_bytes=4 << 20)
    assert {parcel.end_position % 32 for parcel in plan[:-1]} == {0}
    assert plan[0] == ParcelName(32, 96, 0, 30, 0, 3)
    small = cut_parcels(0, 500, source, target, slot_bytes=64 << 10)
    assert {parcel.end_position % 32 for parcel in small if parcel.end_position != 500} == {0}


def test_a_pair_that_differs_in_heads_or_a_slot_below_one_head_is_refused_by_name() -> None:
    one = KvLayout(layers=1, kv_heads=1, head_dim=64, dtype="float32", block_size=16)
    two = KvLayout(layers=1, kv_heads=2, head_dim=64, dtype="float32", block_size=16)
    with pytest.raises(ValueError, match="kv_heads"):
        cut_parcels(0, 1, one, two, 1 << 20)
    with pytest.raises(ValueError, match="slot_bytes"):
        cut_parcels(0, 1, one, one, 511)


def test_f17_a_cut_into_more_parcels_than_anybody_needs_is_refused_before_it_is_made() -> None:
    layout = KvLayout(layers=2, kv_heads=1, head_dim=1, dtype="float32", block_size=1)
    one_cell = 2 * layout.head_bytes
    most = PARCELS_AT_MOST // layout.layers
    assert len(cut_parcels(5, 5 + most, layout, layout, one_cell)) == PARCELS_AT_MOST
    for end_position in (6 + most, 1 << 60):
        with pytest.raises(TooManyParcels, match="slot_bytes is 8"):
            cut_parcels(5, end_position, layout, layout, one_cell)
