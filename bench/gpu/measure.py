"""Clocks and ceilings: medians of device events, over inputs that the caches do not hold."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from itertools import pairwise

import torch

DEVICE = torch.device("cuda", 0)


def median_s(work: Callable[[], object], repetitions: int = 20, warm_up: int = 3) -> float:
    """Median seconds of `work` on the current stream."""
    for _ in range(warm_up):
        work()
    make = torch.cuda.Event
    events = [make(enable_timing=True) for _ in range(repetitions + 1)]  # type: ignore[no-untyped-call]
    events[0].record()
    for event in events[1:]:
        work()
        event.record()
    torch.cuda.synchronize()
    spans: list[float] = [begun.elapsed_time(ended) for begun, ended in pairwise(events)]
    return statistics.median(spans) / 1e3


def captured(work: Callable[[], object]) -> Callable[[], None]:
    """`work` as one graph, so that launches cost the host nothing."""
    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    with torch.cuda.stream(side):
        work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=side):
        work()
    return graph.replay


def copy_bytes_a_second(gib: int = 4) -> float:
    """Bytes read and written by a device-to-device copy."""
    source = torch.empty(gib << 30, dtype=torch.uint8, device=DEVICE).random_()
    target = torch.empty_like(source)
    return 2 * source.numel() / median_s(lambda: target.copy_(source), 10)


def read_bytes_a_second(gib: int = 4) -> float:
    """Bytes read by a sum."""
    source = torch.randn((gib << 30) // 4, device=DEVICE)
    return 4 * source.numel() / median_s(source.sum, 10)


def matmul_flops(size: int = 8192) -> float:
    a, b = (torch.randn(size, size, device=DEVICE, dtype=torch.bfloat16) for _ in range(2))
    return 2 * size**3 / median_s(lambda: a @ b, 10)
