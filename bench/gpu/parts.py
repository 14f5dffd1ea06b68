"""Products and attention alone, by layout: what the engine is put together from."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import torch
import torch.nn.functional as F

from bench.gpu.measure import DEVICE, captured, median_s
from bench.gpu.shape import FFN, HEAD_DIM, HEADS, HIDDEN, KV_HEADS, LAYERS, VOCABULARY
from engine.attention.flashinfer import PLAN_BYTES, FlashInferAttention, Pages
from engine.kernels.product import product
from engine.kv_cache.device_storage import DeviceKvStorage
from foundation.kv_layout import HeadOrder, KvLayout

BLOCK_SIZE = 16
ATTENDED_LAYERS = 8
"""Attention is timed over the first layers of the pool in turn."""

Figures = dict[str, float]


def unequal(rows: int, mean: int) -> np.ndarray:
    """Context lengths from half the mean to one and a half, in random order, with that mean."""
    lengths = (
        np.linspace(mean // 2, mean + mean // 2, rows).astype(np.int32) if rows > 1 else np.array([mean], np.int32)
    )
    lengths[-1] += mean * rows - int(lengths.sum())
    return np.random.default_rng(0).permutation(lengths).astype(np.int32)


class PagedRows:
    """Rows of the given contexts over scattered pages of a full-size pool."""

    def __init__(self, head_order: HeadOrder, layer_group: int, contexts: np.ndarray, layers: int = LAYERS) -> None:
        layout = KvLayout(layers, KV_HEADS, HEAD_DIM, "bfloat16", BLOCK_SIZE, head_order, layer_group)
        counts = -(-contexts // BLOCK_SIZE)
        storage = DeviceKvStorage(layout, int(counts.sum()), DEVICE)
        for group in storage.memory:
            group.normal_()
        self.attention = FlashInferAttention(storage, HEADS)
        self.contexts = contexts.astype(np.int32)
        self.page_start = np.concatenate(([0], np.cumsum(counts))).astype(np.int32)
        blocks = np.random.default_rng(1).permutation(int(counts.sum())).astype(np.int32)
        last = (self.contexts - 1) % BLOCK_SIZE + 1
        self.pages = Pages(*(torch.from_numpy(a).to(DEVICE) for a in (self.page_start, last, blocks)))
        self.pinned = torch.zeros(PLAN_BYTES, dtype=torch.uint8, pin_memory=True)


def decode_layer_s(rows: PagedRows) -> float:
    count = len(rows.contexts)
    queries = torch.randn(count, HEADS, HEAD_DIM, device=DEVICE, dtype=torch.bfloat16)
    out = torch.empty_like(queries)
    plan = rows.attention.plan_decode(rows.pinned, rows.page_start)

    def attend() -> None:
        for layer in range(ATTENDED_LAYERS):
            rows.attention.decode(layer, plan, queries, rows.pages, out)

    return median_s(captured(attend)) / ATTENDED_LAYERS


def prefill_layer_s(rows: PagedRows, queries_a_row: int) -> float:
    count = len(rows.contexts)
    query_start = np.arange(count + 1, dtype=np.int32) * np.int32(queries_a_row)
    queries = torch.randn(count * queries_a_row, HEADS, HEAD_DIM, device=DEVICE, dtype=torch.bfloat16)
    out = torch.empty_like(queries)
    plan = rows.attention.plan_prefill(rows.pinned, query_start, rows.page_start, rows.contexts)

    def attend() -> None:
        for layer in range(ATTENDED_LAYERS):
            rows.attention.prefill(layer, plan, queries, rows.pages, out)

    return median_s(attend) / ATTENDED_LAYERS


def prompt_layer_s(rows: PagedRows, tokens: int) -> float:
    """A prompt without a past, straight from its own keys and values."""
    heads = torch.randn(tokens, HEADS + 2 * KV_HEADS, HEAD_DIM, device=DEVICE, dtype=torch.bfloat16)
    out = torch.empty(tokens, HEADS, HEAD_DIM, device=DEVICE, dtype=torch.bfloat16)
    plan = rows.attention.plan_prompts(rows.pinned, np.array([0, tokens], np.int32))
    return median_s(lambda: rows.attention.prompts(plan, heads, out))


def attention_by_layout(report: Callable[[str], None]) -> Figures:
    """Microseconds of one layer, by head order and layer group: decode 64 x 2,048, decode 1 x 16,384, prefill of 2,048."""
    figures: Figures = {}
    orders: tuple[HeadOrder, ...] = ("HND", "NHD")
    for order in orders:
        for group in (1, 8, 32):
            name = f"{order}/{group}"
            figures[f"decode_64x2048_us {name}"] = decode_layer_s(PagedRows(order, group, unequal(64, 2048))) * 1e6
            torch.cuda.empty_cache()
            figures[f"decode_1x16384_us {name}"] = decode_layer_s(PagedRows(order, group, unequal(1, 16384))) * 1e6
            figures[f"prefill_2048_us {name}"] = prefill_layer_s(PagedRows(order, group, unequal(1, 2048)), 2048) * 1e6
            report(", ".join(f"{key} {value:.1f}" for key, value in figures.items() if key.endswith(name)))
    return figures


def attention_of_steps(report: Callable[[str], None], order: HeadOrder, group: int) -> Figures:
    """Milliseconds of all layers for the steps that are measured whole."""
    figures: Figures = {}
    for rows, mean in ((1, 128), (64, 2048), (256, 1024)):
        torch.cuda.empty_cache()
        figures[f"decode_{rows}x{mean}_ms"] = (
            decode_layer_s(PagedRows(order, group, unequal(rows, mean))) * LAYERS * 1e3
        )
    for tokens in (512, 2048, 8192):
        rows_ = PagedRows(order, group, unequal(1, tokens))
        figures[f"prefill_{tokens}_paged_ms"] = prefill_layer_s(rows_, tokens) * LAYERS * 1e3
        figures[f"prefill_{tokens}_ms"] = prompt_layer_s(rows_, tokens) * LAYERS * 1e3
    chunk = PagedRows(order, group, unequal(1, 1536))
    figures["chunk_512_of_1536_ms"] = prefill_layer_s(chunk, 512) * LAYERS * 1e3
    report(", ".join(f"{key} {value:.3f}" for key, value in figures.items()))
    return figures


def _weights(layers: int) -> Iterator[tuple[str, list[torch.Tensor]]]:
    shapes = {
        "qkv": ((HEADS + 2 * KV_HEADS) * HEAD_DIM, HIDDEN),
        "output": (HIDDEN, HEADS * HEAD_DIM),
        "gate_up": (2 * FFN, HIDDEN),
        "down": (HIDDEN, FFN),
    }
    for name, (outputs, inputs) in shapes.items():
        yield name, [torch.randn(outputs, inputs, device=DEVICE, dtype=torch.bfloat16) for _ in range(layers)]


def linears(report: Callable[[str], None]) -> Figures:
    """Milliseconds of all linears in one graph (from 576 rows on, of the head one row, as a prompt wants it): the library's
    products; and microseconds by shape, the library's and ours, for one row."""
    figures: Figures = {}
    weights = dict(_weights(LAYERS))
    head = torch.randn(VOCABULARY, HIDDEN, device=DEVICE, dtype=torch.bfloat16)
    for rows in (1, 64, 256, 576, 2048, 8192):
        inputs = {size: torch.randn(rows, size, device=DEVICE, dtype=torch.bfloat16) for size in (HIDDEN, FFN)}

        def all_linears(inputs: dict[int, torch.Tensor] = inputs) -> None:
            for layer in range(LAYERS):
                for stack in weights.values():
                    F.linear(inputs[stack[layer].shape[1]], stack[layer])
            F.linear(inputs[HIDDEN][: 1 if len(inputs[HIDDEN]) > 256 else None], head)

        figures[f"linears_{rows}_ms"] = median_s(captured(all_linears), 10) * 1e3
    report(", ".join(f"{key} {value:.3f}" for key, value in figures.items()))
    for rows in (1,):
        for name, stack in (*weights.items(), ("head", [head] * 4)):
            figures |= _one_product(f"{name}_{rows}", rows, stack, report)
    return figures


def _one_product(name: str, rows: int, stack: list[torch.Tensor], report: Callable[[str], None]) -> Figures:
    x = torch.randn(rows, stack[0].shape[1], device=DEVICE, dtype=torch.bfloat16)

    def library() -> None:
        for weight in stack:
            F.linear(x, weight)

    figures = {f"{name}_library_us": median_s(captured(library), 10) / len(stack) * 1e6}
    for outputs, warps in ((2, 4), (4, 4), (8, 4), (4, 8), (8, 8), (1, 4), (2, 2), (16, 8)):

        def ours(outputs: int = outputs, warps: int = warps) -> None:
            for weight in stack:
                product(x, weight, outputs=outputs, warps=warps)

        figures[f"{name}_own_{outputs}_{warps}_us"] = median_s(captured(ours), 10) / len(stack) * 1e6
    best = min((key for key in figures if "_own_" in key), key=lambda key: figures[key])
    byte_count = stack[0].numel() * 2
    library_us = figures[f"{name}_library_us"]
    report(
        f"{name}: library {library_us:.1f} us ({byte_count / library_us / 1e6:.2f} TB/s), "
        f"best {best} {figures[best]:.1f} us ({byte_count / figures[best] / 1e6:.2f} TB/s)"
    )
    return figures
