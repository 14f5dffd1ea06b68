"""Batched paged attention against the definition, over layouts, shards and mixed batches."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from step_plans import batch_plan

from engine.attention.paged import GROUP_COST_BLOCKS, PagedAttention, decode_groups
from engine.attention.reference import ReferenceAttention
from engine.kv_cache.storage import KvStorage
from engine.step import StepPlan
from foundation.kv_layout import HeadOrder, KvLayout

HEADS, KV_HEADS, HEAD_DIM, BLOCKS = 6, 3, 8, 40


def layout(head_order: HeadOrder, tp: int, pp: int, layer_group: int, block_size: int = 4) -> KvLayout:
    return KvLayout(
        layers=6,
        kv_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        dtype="float32",
        block_size=block_size,
        head_order=head_order,
        layer_group=layer_group,
        tensor_parallel=tp,
        pipeline_parallel=pp,
    )


def mixed_plans(block_size: int) -> list[StepPlan]:
    """Two prompts in chunks beside a sequence that decodes, then all three decode."""
    blocks = np.random.default_rng(1).permutation(BLOCKS).tolist()
    tables = [blocks[:12], blocks[12:24], blocks[24:36]]
    steps = [
        [(17, 0, 0), (3, 0, 1)],
        [(1, 17, 0), (9, 3, 1), (5, 0, 2)],
        [(1, 18, 0), (1, 12, 1), (6, 5, 2)],
        [(1, 19, 0), (1, 13, 1), (1, 11, 2)],
    ]
    return [
        batch_plan(number, [([0] * count, first, tables[table]) for count, first, table in rows], block_size)
        for number, rows in enumerate(steps)
    ]


def attend_all(
    backend: PagedAttention | ReferenceAttention, plans: list[StepPlan], zero_unread: bool
) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    out = []
    for plan in plans:
        step = backend.prepare(plan, zero_unread)
        for layer in range(6):
            projected = torch.randn(plan.tokens, HEADS + 2 * KV_HEADS, HEAD_DIM, generator=generator)
            out.append(step.attend(layer, *torch.split(projected, [HEADS, KV_HEADS, KV_HEADS], dim=1)))
    return out


SHAPES = [
    (order, tp, pp, group)
    for order, tp, (pp, group) in itertools.product(("NHD", "HND"), (1, 3, 6), ((1, 6), (1, 2), (2, 3), (3, 1), (3, 6)))
]


@pytest.mark.parametrize(("order", "tp", "pp", "group"), SHAPES)
def test_paged_attention_equals_its_definition_in_every_layout(order: HeadOrder, tp: int, pp: int, group: int) -> None:
    shape = layout(order, tp, pp, group)
    plans = mixed_plans(shape.block_size)
    paged_storage, reference_storage = KvStorage(shape, BLOCKS), KvStorage(shape, BLOCKS)
    ours = attend_all(PagedAttention(paged_storage, HEADS, torch.float32), plans, zero_unread=False)
    expected = attend_all(ReferenceAttention(reference_storage, HEADS, torch.float32), plans, zero_unread=False)
    for got, want in zip(ours, expected, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    for got_pool, want_pool in zip(paged_storage.pool_views(), reference_storage.pool_views(), strict=True):
        assert np.array_equal(got_pool, want_pool)


def test_garbage_behind_a_context_reaches_no_result_when_unread_memory_is_zeroed() -> None:
    shape = layout("HND", 1, 1, 6)
    plans = mixed_plans(shape.block_size)
    clean = attend_all(PagedAttention(KvStorage(shape, BLOCKS), HEADS, torch.float32), plans, zero_unread=False)
    dirty_storage = KvStorage(shape, BLOCKS)
    for pool in dirty_storage.pool_views():
        pool.view(np.float32)[:] = np.nan
    dirty = PagedAttention(dirty_storage, HEADS, torch.float32)
    assert any(out.isnan().any() for out in attend_all(dirty, plans, zero_unread=False))
    for got, want in zip(attend_all(dirty, plans, zero_unread=True), clean, strict=True):
        torch.testing.assert_close(got, want)


def test_decode_groups_cover_each_row_once_and_bound_the_padding() -> None:
    rng = np.random.default_rng(3)
    for count in (1, 2, 7, 40):
        rows = np.sort(rng.permutation(100)[:count])
        contexts = rng.integers(1, 2000, count).astype(np.int32)
        groups = decode_groups(rows, contexts, 16)
        assert sorted(np.concatenate(groups).tolist()) == rows.tolist()
        blocks = dict(zip(rows.tolist(), (-(-contexts // 16)).tolist(), strict=True))
        for group in groups:
            lengths = [blocks[row] for row in group.tolist()]
            assert max(lengths) * len(lengths) - sum(lengths) <= GROUP_COST_BLOCKS
    assert decode_groups(np.empty(0, np.int64), np.empty(0, np.int32), 16) == []
