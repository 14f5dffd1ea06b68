"""Batched paged attention against the definition, over layouts, shards and mixed batches."""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from step_plans import batch_plan

from engine.attention.native import PoolStrides, RowQueries, rows_kernel
from engine.attention.paged import GROUP_COST_BLOCKS, PagedAttention, decode_groups
from engine.attention.reference import ReferenceAttention
from engine.kv_cache.storage import KvStorage
from engine.step import StepPlan
from foundation.kv_layout import HeadOrder, KvLayout

HEADS, KV_HEADS, HEAD_DIM, BLOCKS = 6, 3, 16, 40


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


def in_pytorch(storage: KvStorage) -> PagedAttention:
    """As on a machine without a C compiler."""
    backend = PagedAttention(storage, HEADS, torch.float32)
    backend.kernel = None
    return backend


SHAPES = [
    (order, tp, pp, group)
    for order, tp, (pp, group) in itertools.product(("NHD", "HND"), (1, 3, 6), ((1, 6), (1, 2), (2, 3), (3, 1), (3, 6)))
]


@pytest.fixture
def one_thread() -> Iterator[None]:
    """As nodes compute on a CPU; compiled attention is for that."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize(("order", "pp", "group"), [(order, *rest) for order, tp, *rest in SHAPES if tp == 1])
@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler")
@pytest.mark.usefixtures("one_thread")
def test_compiled_attention_equals_its_definition_in_every_layout(order: HeadOrder, pp: int, group: int) -> None:
    shape = layout(order, 1, pp, group)
    plans = mixed_plans(shape.block_size)
    backend = PagedAttention(KvStorage(shape, BLOCKS), HEADS, torch.float32)
    assert backend.kernel is not None
    expected = attend_all(ReferenceAttention(KvStorage(shape, BLOCKS), HEADS, torch.float32), plans, zero_unread=False)
    for got, want in zip(attend_all(backend, plans, zero_unread=False), expected, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler")
@pytest.mark.usefixtures("one_thread")
def test_compiled_attention_reads_nothing_behind_a_context() -> None:
    shape = layout("HND", 1, 1, 6)
    plans = mixed_plans(shape.block_size)
    clean = attend_all(PagedAttention(KvStorage(shape, BLOCKS), HEADS, torch.float32), plans, zero_unread=False)
    dirty_storage = KvStorage(shape, BLOCKS)
    for pool in dirty_storage.pool_views():
        pool.view(np.float32)[:] = np.nan
    for got, want in zip(
        attend_all(PagedAttention(dirty_storage, HEADS, torch.float32), plans, zero_unread=False), clean, strict=True
    ):
        torch.testing.assert_close(got, want)


@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler")
@pytest.mark.usefixtures("one_thread")
def test_compiled_attention_keeps_a_nan_and_survives_far_scores() -> None:
    kernel = rows_kernel(64, 3)
    assert kernel is not None
    queries = torch.randn(2, 3, 64)
    queries[0] *= 1000
    queries[1, 0, 5] = float("nan")
    keys, values = torch.randn(40, 64), torch.randn(40, 64)
    which = RowQueries(np.zeros((1, 1), np.int32), np.arange(2), np.zeros(2, np.int64), np.full(2, 40))
    out, strides = torch.empty(2, 192), PoolStrides(block=0, head=0, position=64, block_size=40, heads=1)
    kernel.attend(queries, out, keys, values, strides, which, torch.empty(120))
    want = (queries @ keys.t() * 0.125).softmax(-1) @ values
    torch.testing.assert_close(out, want.reshape(2, -1), equal_nan=True, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("order", "tp", "pp", "group"), SHAPES)
def test_paged_attention_equals_its_definition_in_every_layout(order: HeadOrder, tp: int, pp: int, group: int) -> None:
    shape = layout(order, tp, pp, group)
    plans = mixed_plans(shape.block_size)
    paged_storage, reference_storage = KvStorage(shape, BLOCKS), KvStorage(shape, BLOCKS)
    ours = attend_all(in_pytorch(paged_storage), plans, zero_unread=False)
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
    dirty = in_pytorch(dirty_storage)
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
