"""FlashInfer over the strided pool against attention's definition in float64, with NaN everywhere that nobody may read."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from engine.attention.flashinfer import PLAN_BYTES, FlashInferAttention, Pages
from engine.kv_cache.device_storage import DeviceKvStorage
from foundation.kv_layout import HeadOrder, KvLayout

pytestmark = pytest.mark.gpu
DEVICE = torch.device("cuda")
HEADS, KV_HEADS, HEAD_DIM, BLOCK_SIZE, LAYERS = 8, 2, 128, 16, 4


class World:
    """A pool of NaNs in which rows of the given context lengths hold random keys and values of layer 2."""

    def __init__(self, head_order: HeadOrder, layer_group: int, contexts: list[int]) -> None:
        layout = KvLayout(LAYERS, KV_HEADS, HEAD_DIM, "bfloat16", BLOCK_SIZE, head_order, layer_group)
        counts = [-(-context // BLOCK_SIZE) for context in contexts]
        self.storage = DeviceKvStorage(layout, sum(counts) + 3, DEVICE)
        self.storage.memory.fill_(float("nan"))
        self.attention = FlashInferAttention(self.storage, HEADS)
        blocks = np.random.default_rng(1).permutation(sum(counts) + 3)[: sum(counts)].astype(np.int32)
        self.page_start = np.concatenate(([0], np.cumsum(counts))).astype(np.int32)
        self.contexts = np.array(contexts, np.int32)
        last = (self.contexts - 1) % BLOCK_SIZE + 1
        self.pages = Pages(*(torch.from_numpy(a).to(DEVICE) for a in (self.page_start, last, blocks)))
        self.cells = [torch.randn(n, 2, KV_HEADS, HEAD_DIM, device=DEVICE).bfloat16() for n in contexts]
        view = self.storage.layer(2)
        for row, cells in enumerate(self.cells):
            for position in range(len(cells)):
                block, offset = blocks[self.page_start[row] + position // BLOCK_SIZE], position % BLOCK_SIZE
                target = view[block, :, :, offset] if head_order == "HND" else view[block, :, offset]
                target.copy_(cells[position])

    def expected(self, row: int, queries: torch.Tensor) -> torch.Tensor:
        """float64 [n, heads, head_dim] for the row's last n positions."""
        keys, values = (side.double().repeat_interleave(HEADS // KV_HEADS, 1) for side in self.cells[row].unbind(1))
        scores = torch.einsum("qhd,khd->hqk", queries.double(), keys) / HEAD_DIM**0.5
        count, context = len(queries), len(keys)
        later = torch.arange(context, device=DEVICE) > torch.arange(context - count, context, device=DEVICE)[:, None]
        return torch.einsum("hqk,khd->qhd", scores.masked_fill(later, -torch.inf).softmax(-1), values)


def pinned_plan() -> torch.Tensor:
    return torch.zeros(PLAN_BYTES, dtype=torch.uint8, pin_memory=True)


def near(got: torch.Tensor, want: torch.Tensor) -> None:
    assert got.isfinite().all()
    error = float((got.double() - want).norm() / want.norm())
    assert error < 1e-2, error


LAYOUTS = [("HND", 4), ("NHD", 4), ("HND", 1), ("NHD", 2)]


@pytest.mark.parametrize(("head_order", "layer_group"), LAYOUTS)
@pytest.mark.parametrize("longest", [100, 1000])
def test_decode_equals_its_definition_and_reads_nothing_behind_a_context(
    head_order: HeadOrder, layer_group: int, longest: int
) -> None:
    world = World(head_order, layer_group, [1, 16, 17, 90, 31, longest])
    projected = torch.randn(6, (HEADS + 2 * KV_HEADS), HEAD_DIM, device=DEVICE).bfloat16()
    queries, out = projected[:, :HEADS], torch.full((6, HEADS, HEAD_DIM), float("nan"), device=DEVICE).bfloat16()
    plan = world.attention.plan_decode(pinned_plan(), world.page_start)
    assert plan.shape.split == (longest == 1000)
    world.attention.decode(2, plan, queries, world.pages, out)
    for row in range(6):
        near(out[row : row + 1], world.expected(row, queries[row : row + 1]))


@pytest.mark.parametrize(("head_order", "layer_group"), LAYOUTS)
def test_prefill_equals_its_definition_for_chunks_with_and_without_a_past(
    head_order: HeadOrder, layer_group: int
) -> None:
    contexts, counts = [40, 300, 129, 513], [40, 17, 128, 400]
    world = World(head_order, layer_group, contexts)
    query_start = np.concatenate(([0], np.cumsum(counts))).astype(np.int32)
    projected = torch.randn(int(query_start[-1]), HEADS + 2 * KV_HEADS, HEAD_DIM, device=DEVICE).bfloat16()
    queries = projected[:, :HEADS]
    out = torch.full((len(queries), HEADS, HEAD_DIM), float("nan"), device=DEVICE).bfloat16()
    plan = world.attention.plan_prefill(pinned_plan(), query_start, world.page_start, world.contexts)
    world.attention.prefill(2, plan, queries, world.pages, out)
    for row in range(len(counts)):
        part = slice(query_start[row], query_start[row + 1])
        near(out[part], world.expected(row, queries[part]))


def test_prompts_without_a_past_attend_straight_to_their_own_keys() -> None:
    counts = [5, 300, 1, 129]
    world = World("HND", 4, counts)
    query_start = np.concatenate(([0], np.cumsum(counts))).astype(np.int32)
    heads = torch.randn(int(query_start[-1]), HEADS + 2 * KV_HEADS, HEAD_DIM, device=DEVICE).bfloat16()
    for row in range(len(counts)):
        part = slice(query_start[row], query_start[row + 1])
        heads[part, HEADS:] = world.cells[row].flatten(1, 2)
    out = torch.full((len(heads), HEADS, HEAD_DIM), float("nan"), device=DEVICE).bfloat16()
    plan = world.attention.plan_prompts(pinned_plan(), query_start)
    world.attention.prompts(plan, heads, out)
    for row in range(len(counts)):
        part = slice(query_start[row], query_start[row + 1])
        near(out[part], world.expected(row, heads[part, :HEADS]))
