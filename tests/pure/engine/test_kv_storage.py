"""The pool's memory: an array for each shard, and an owner word for each block."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from engine.kv_cache.storage import KvStorage
from foundation.errors import ConfigurationError
from foundation.kv_layout import KvLayout


@pytest.mark.parametrize("head_order", ["NHD", "HND"])
def test_every_shard_has_memory_in_the_shape_of_its_layers_and_heads(head_order: str) -> None:
    for tp, pp, group in itertools.product((1, 2, 3, 6, 12), (1, 2, 4), (1, 2, 8)):
        layout = KvLayout(8, 6, 4, "bfloat16", 16, head_order, group, tp, pp)  # type: ignore[arg-type]
        storage = KvStorage(layout, 5)
        assert len(storage.shards) == tp * pp
        in_group, heads = min(group, 8 // pp), max(1, 6 // tp)
        inner = (16, heads) if head_order == "NHD" else (heads, 16)
        for shard in storage.shards:
            assert shard.layer_group == in_group
            assert shard.memory.shape == (8 // pp // in_group, 5, in_group, 2, *inner, 4 * 2)
            assert shard.memory.dtype == np.uint8
            assert shard.memory.flags.c_contiguous


def test_sixty_four_bit_owner_words_start_at_zero() -> None:
    storage = KvStorage(KvLayout(2, 1, 4, "float32", 16), 7)
    assert storage.owner_words.dtype == np.uint64
    assert storage.owner_words.tolist() == [0] * 7


@pytest.mark.parametrize(("tp", "pp", "group"), [(4, 1, 1), (1, 9, 1), (1, 1, 3)])
def test_a_layout_that_does_not_divide_is_refused(tp: int, pp: int, group: int) -> None:
    with pytest.raises(ConfigurationError):
        KvStorage(KvLayout(8, 6, 4, "float32", 16, "NHD", group, tp, pp), 4)
