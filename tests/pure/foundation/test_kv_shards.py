"""Shards of a layout: together they hold each layer's heads, in stage-major order."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest

from foundation.kv_layout import KvLayout
from foundation.kv_shards import LayoutError, rank_heads, shard_shape, shards, stage_layers


def layout(tp: int = 1, pp: int = 1, group: int = 1, layers: int = 8) -> KvLayout:
    return KvLayout(layers, 6, 4, "bfloat16", 16, "NHD", group, tp, pp)


@pytest.mark.parametrize("tp", [1, 2, 3, 6, 7, 12])
@pytest.mark.parametrize("pp", [1, 2, 3, 8])
def test_every_head_of_every_layer_is_held_and_once_unless_there_are_more_ranks_than_heads(tp: int, pp: int) -> None:
    found = shards(layout(tp, pp))
    assert [(shard.stage, shard.rank) for shard in found] == list(itertools.product(range(pp), range(tp)))
    held = Counter(
        cell
        for shard in found
        for cell in itertools.product(
            range(shard.first_layer, shard.end_layer), range(shard.first_head, shard.end_head)
        )
    )
    assert set(held) == set(itertools.product(range(8), range(6)))
    assert sum(held.values()) == 8 * max(6, tp)
    assert {shard.heads for shard in found} == {max(1, 6 // tp)}


def test_the_remainder_of_the_layers_goes_to_the_earlier_stages() -> None:
    assert stage_layers(layout(pp=3)) == ((0, 3), (3, 6), (6, 8))


def test_more_ranks_than_heads_hold_heads_in_turn() -> None:
    assert rank_heads(layout(tp=12))[:4] == ((0, 1), (0, 1), (1, 2), (1, 2))


def test_a_shard_is_one_array_of_layer_groups_and_a_short_stage_is_one_group() -> None:
    first, second = shards(layout(pp=2, group=8))
    assert shard_shape(layout(pp=2, group=8), first, 5) == (1, 5, 4, 2, 16, 6, 4)
    assert shard_shape(layout(pp=2, group=2), second, 5) == (2, 5, 2, 2, 16, 6, 4)


@pytest.mark.parametrize(
    ("field", "wrong"),
    [
        ("tensor_parallel", layout(tp=4)),
        ("tensor_parallel", layout(tp=0)),
        ("pipeline_parallel", layout(pp=9)),
        ("pipeline_parallel", layout(pp=0)),
        ("layer_group", layout(group=3)),
        ("layer_group", layout(group=0)),
    ],
    ids=str,
)
def test_a_layout_that_cannot_be_is_refused_by_its_field(field: str, wrong: KvLayout) -> None:
    with pytest.raises(LayoutError) as refused:
        shard_shape(wrong, shards(wrong)[0], 5)
    assert refused.value.field == field
    assert str(refused.value).startswith(f"{field} is ")
