"""The pool's memory is shaped as the transfers' copy plans expect it."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from engine.kv_cache.storage import KvStorage
from foundation.errors import ConfigurationError
from foundation.kv_layout import KvLayout
from foundation.kv_shards import shard_shape, shards


@pytest.mark.parametrize("head_order", ["NHD", "HND"])
def test_every_shard_holds_the_layers_and_heads_that_the_copy_plans_say(head_order: str) -> None:
    for tp, pp, group in itertools.product((1, 2, 3, 6, 12), (1, 2, 4), (1, 2, 8)):
        layout = KvLayout(8, 6, 4, "bfloat16", 16, head_order, group, tp, pp)  # type: ignore[arg-type]
        storage = KvStorage(layout, 5)
        planned = shards(layout)
        assert len(planned) == len(storage.shards)
        for ours, theirs in zip(storage.shards, planned, strict=True):
            assert (ours.stage, ours.rank) == (theirs.stage, theirs.rank)
            assert (ours.first_layer, ours.end_layer) == (theirs.first_layer, theirs.end_layer)
            assert (ours.first_head, ours.end_head) == (theirs.first_head, theirs.end_head)
            *outer, head_dim = shard_shape(layout, theirs, 5)
            assert ours.memory.shape == (*outer, head_dim * 2)
            assert ours.memory.dtype == np.uint8
            assert ours.memory.flags.c_contiguous


def test_sixty_four_bit_owner_words_start_at_zero() -> None:
    storage = KvStorage(KvLayout(2, 1, 4, "float32", 16), 7)
    assert storage.owner_words.dtype == np.uint64
    assert storage.owner_words.tolist() == [0] * 7


@pytest.mark.parametrize(("tp", "pp", "group"), [(4, 1, 1), (1, 9, 1), (1, 1, 3)])
def test_a_layout_that_does_not_divide_is_refused(tp: int, pp: int, group: int) -> None:
    with pytest.raises(ConfigurationError):
        KvStorage(KvLayout(8, 6, 4, "float32", 16, "NHD", group, tp, pp), 4)
