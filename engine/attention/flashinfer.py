"""Attention over the paged pool on Hopper GPUs through FlashInfer: one plan a step, shared by all layers.

A step's rows are first those of one query (decode, FlashAttention-2 on tensor cores, planned by `decode_plan`), then chunks of
prompts (prefill, FlashAttention-3): each kind has a kernel, a plan and a workspace of its own. A plan is made on the host from
lengths alone and copied from pinned memory of the caller's, which must stay untouched until that copy has run: FlashInfer's own
wrappers keep a single such buffer, so planning a step ahead would overwrite the copy of the step before. That is why its
compiled modules are called here and not its wrappers.

Keys and values are stored by whoever computes them (`engine.kernels.layer.rotate_append`) before `decode` or `prefill` reads
them.

Must not know: requests, graphs, who captures.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from engine.attention.decode_plan import ROW_TILE, DecodePlan, write_decode_plan
from engine.kernels.unpack import fetch_words
from engine.kv_cache.device_storage import TORCH_DTYPES, DeviceKvStorage

Int32 = npt.NDArray[np.int32]

PLAN_BYTES = 4 << 20
"""Of one plan; FlashInfer refuses a step whose plan is longer."""

WORKSPACE_BYTES = 128 << 20
"""Partial results of rows that several thread blocks share."""

ROWS_AT_MOST = 4096

_BLOCKS_A_MULTIPROCESSOR = 2
_SUMS_OFFSET = 11
_POSITIONS_FIRST = 0
_NOT_CAUSAL, _CAUSAL = 0, 1
_NO_WINDOW = -1


@dataclass(frozen=True, slots=True)
class Pages:
    """Which pages each row reads, on the device: row r reads `pages[page_start[r] : page_start[r + 1]]`, all int32."""

    page_start: torch.Tensor
    last_page_lengths: torch.Tensor
    pages: torch.Tensor


class FlashInferAttention:
    """Kernels for one pool and one number of query heads. `plan_*` and the runs of its plan share the current stream."""

    def __init__(self, storage: DeviceKvStorage, heads: int) -> None:
        from flashinfer.prefill import get_batch_prefill_module

        layout = storage.layout
        assert heads <= ROW_TILE * layout.kv_heads, f"{heads} query heads for {layout.kv_heads} KV heads"
        dtype, device = TORCH_DTYPES[layout.dtype], storage.memory.device
        head_dim = layout.head_dim
        shape = (dtype, dtype, dtype, torch.int32, head_dim, head_dim, 0, False, False)
        self._decode_kernels: Any = get_batch_prefill_module("fa2", *shape, False)
        self._prefill_kernels: Any = get_batch_prefill_module("fa3", *shape, False)
        self.heads, self.kv_heads, self.head_dim = heads, layout.kv_heads, head_dim
        self.block_size = layout.block_size
        self._layout_code = 1 if layout.head_order == "HND" else 0
        self._scale = head_dim**-0.5
        self._layers = [storage.layer(layer) for layer in range(layout.layers)]
        self._keys = [layer[:, 0] for layer in self._layers]
        self._values = [layer[:, 1] for layer in self._layers]
        self._partial = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        self._decode_plan = torch.empty(PLAN_BYTES, dtype=torch.uint8, device=device)
        self._prefill_plan = torch.empty(PLAN_BYTES, dtype=torch.uint8, device=device)
        multiprocessors = torch.cuda.get_device_properties(device).multi_processor_count
        self._places = max(1, multiprocessors * _BLOCKS_A_MULTIPROCESSOR // self.kv_heads)
        self._partial_bytes = heads * head_dim * 4
        self._row_numbers = torch.arange(ROWS_AT_MOST + 1, dtype=torch.int32, device=device)

    def plan_decode(self, pinned: torch.Tensor, page_start: Int32) -> DecodePlan:
        """`pinned` uint8 [PLAN_BYTES]; `page_start` [R + 1] on the host. A captured run of a plan replays all of equal shape."""
        words = pinned.view(torch.int32)
        plan = write_decode_plan(words.numpy(), page_start, self.block_size, self._places, self._partial_bytes)
        assert plan.info[_SUMS_OFFSET] + plan.shape.pieces * self.heads * 4 <= WORKSPACE_BYTES, (
            "the workspace is too small"
        )
        fetch_words(words[: plan.words], self._decode_plan.view(torch.int32)[: plan.words])
        return plan

    def decode(self, layer: int, plan: DecodePlan, queries: torch.Tensor, pages: Pages, out: torch.Tensor) -> None:
        """`queries`, `out` [R, heads, head_dim]; the last two dimensions contiguous."""
        rows = plan.shape.rows
        self._run(
            self._decode_kernels,
            self._decode_plan,
            plan.info,
            layer,
            queries,
            self._row_numbers[: rows + 1],
            Pages(pages.page_start[: rows + 1], pages.last_page_lengths[:rows], pages.pages),
            out,
            _NOT_CAUSAL,
        )

    def plan_prefill(self, pinned: torch.Tensor, query_start: Int32, page_start: Int32, context_lengths: Int32) -> Any:
        """`query_start`, `page_start` [R + 1] and `context_lengths` [R] on the host, `query_start` from 0 on."""
        rows = len(context_lengths)
        return self._prefill_kernels.plan(
            self._partial,
            self._prefill_plan,
            pinned,
            torch.from_numpy(query_start),
            torch.from_numpy(page_start),
            torch.from_numpy(context_lengths),
            int(query_start[-1]),
            rows,
            self.heads,
            self.kv_heads,
            self.block_size,
            False,
            self.head_dim,
            self.head_dim,
            True,
            _NO_WINDOW,
        )

    def prefill(self, layer: int, plan: Any, queries: torch.Tensor, pages: Pages, out: torch.Tensor) -> None:
        """`queries`, `out` [T, heads, head_dim] of chunks, each the end of its row's context."""
        self._run(
            self._prefill_kernels, self._prefill_plan, plan, layer, queries, pages.page_start, pages, out, _CAUSAL
        )

    def plan_prompts(self, pinned: torch.Tensor, query_start: Int32) -> Any:
        """Plan for chunks that are the whole of their contexts, which `prompts` attends to."""
        return self._prefill_kernels.plan(
            self._partial,
            self._prefill_plan,
            pinned,
            torch.from_numpy(query_start),
            torch.from_numpy(query_start),
            torch.from_numpy(np.diff(query_start)),
            int(query_start[-1]),
            len(query_start) - 1,
            self.heads,
            self.kv_heads,
            1,
            False,
            self.head_dim,
            self.head_dim,
            True,
            _NO_WINDOW,
        )

    def prompts(self, plan: Any, heads: torch.Tensor, out: torch.Tensor) -> None:
        """Attention among the step's own tokens, straight from `heads` [T, heads + 2 kv_heads, head_dim], and so through the bulk
        copy engine, for which pages of 16 positions are too small. `out` [T, heads, head_dim]."""
        queries, keys, values = torch.split(heads, [self.heads, self.kv_heads, self.kv_heads], dim=1)
        self._prefill_kernels.ragged_run(
            self._partial,
            self._prefill_plan,
            plan,
            queries,
            keys,
            values,
            self._row_numbers[:2],
            self._row_numbers[:2],
            out,
            None,  # log of the sums
            _CAUSAL,
            _POSITIONS_FIRST,
            _NO_WINDOW,
            True,  # programmatic dependent launch
            *(None,) * 6,  # custom masks, ALiBi, multi-item scoring
            0.0,  # soft cap of logits
            self._scale,
            1.0,
            1e4,  # rotary embedding, which is not applied here
            0,
        )

    def _run(
        self,
        kernels: Any,
        plan_memory: torch.Tensor,
        plan: Any,
        layer: int,
        queries: torch.Tensor,
        query_start: torch.Tensor,
        pages: Pages,
        out: torch.Tensor,
        mask: int,
    ) -> None:
        kernels.paged_run(
            self._partial,
            plan_memory,
            plan,
            queries,
            self._keys[layer],
            self._values[layer],
            query_start,
            pages.page_start,
            pages.pages,
            pages.last_page_lengths,
            out,
            None,  # log of the sums
            mask,
            self._layout_code,
            _NO_WINDOW,
            True,  # programmatic dependent launch
            *(None,) * 6,  # custom masks, ALiBi, multi-item scoring
            0.0,  # soft cap of logits
            self._scale,
            *(None,) * 3,  # scales of quantized tensors
            1.0,
            1e4,  # rotary embedding, which is not applied here
            0,
            WORKSPACE_BYTES,
        )
