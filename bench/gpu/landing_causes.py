"""Whether KV that lands slows the GPU's kernels or the host that launches them: decode steps beside each half of a landing alone.

    alone        nobody copies
    host only    a thread does what the host does for each landing, with next to nothing for the GPU
    GPU only     the GPU does what it does for each landing, launched as one graph a prompt, so the host has little to do
    both         landings as they are

Then with fewer thread blocks, with smaller slots, without scatters, and from another GPU, if there is one. All at one rate, in
rounds there and back, each slice over a new batch of the same contexts, so that neither growing contexts nor a GPU that warms up
tells for one of them. Profiles say how long the engine's own kernels run in each, and how long none does.

Must not know: sessions, sockets.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
import torch
from torch.autograd.profiler_util import FunctionEvent

from bench.gpu.landing import SLOT_BYTES, Copying, Work, constant_batch, decode_seconds
from bench.gpu.parts import Figures
from bench.gpu.steps import Loop, busy_and_wall_us, device_events
from engine.build_device import DeviceEngineParts
from foundation.kv_layout import HeadOrder
from kv_transfer.device_copy import PROGRAMS

GB_A_SECOND = 45.0
"""What host memory gives through PCIe without a queue."""
ROUNDS = 4
WARM_STEPS, TIMED_STEPS, PROFILED_STEPS = 10, 40, 20
ALONE, HOST, GPU, BOTH = "alone", "host only", "GPU only", "both"


@dataclass(slots=True)
class Slices:
    """Everything measured beside one kind of copying; `work` None is nobody's."""

    copying: Copying | None = None
    work: Work | None = None
    seconds: list[float] = field(default_factory=list)
    landed_bytes: int = 0
    landing_s: float = 0.0

    @contextmanager
    def beside(self) -> Iterator[None]:
        if self.copying is None or self.work is None:
            yield
            return
        with self.copying.beside(GB_A_SECOND, self.work):
            begun, before = time.perf_counter(), self.copying.copied_bytes
            yield
            self.landed_bytes += self.copying.copied_bytes - before
            self.landing_s += time.perf_counter() - begun

    def figures(self) -> Figures:
        p50, p99 = np.quantile(self.seconds, (0.5, 0.99))
        rate = self.landed_bytes / self.landing_s / 1e9 if self.landing_s else 0.0
        return {"landed_gb_s": rate, "p50_ms": float(p50) * 1e3, "p99_ms": float(p99) * 1e3}


def slices_of(order: HeadOrder, group: int) -> dict[str, Slices]:
    """By name. The four that tell host from GPU, then what else may matter."""
    usual = Copying(order, group)
    found = {
        ALONE: Slices(),
        HOST: Slices(usual, usual.land_for_the_host),
        GPU: Slices(usual, usual.land_for_the_gpu(scattered=True)),
        BOTH: Slices(usual, usual.land),
        "GPU only, nothing scattered": Slices(usual, usual.land_for_the_gpu(scattered=False)),
    }
    for programs in (PROGRAMS // 2, PROGRAMS // 4, PROGRAMS // 8):
        fewer = Copying(order, group, programs=programs)
        found[f"both, {programs} programs"] = Slices(fewer, fewer.land)
        if programs == PROGRAMS // 4:
            found[f"GPU only, {programs} programs"] = Slices(fewer, fewer.land_for_the_gpu(scattered=True))
    smaller = Copying(order, group, slot_bytes=SLOT_BYTES // 2)
    found[f"both, slots of {SLOT_BYTES // 2 >> 20} MiB"] = Slices(smaller, smaller.land)
    if torch.cuda.device_count() > 1:
        from_gpu = Copying(order, group, source=torch.device("cuda", 1))
        found["both, from another GPU"] = Slices(from_gpu, from_gpu.land)
        found["nothing scattered, from another GPU"] = Slices(from_gpu, from_gpu.land_for_the_gpu(scattered=False))
    return found


def landing_causes(
    parts: DeviceEngineParts, order: HeadOrder, group: int, rows: int, mean: int, report: Callable[[str], None]
) -> dict[str, Figures]:
    """Of each kind of copying: steps' quantiles in milliseconds, what they grew by against the batch alone, and of the first
    four the profile."""
    slices = slices_of(order, group)
    names = list(slices)
    for number in range(ROUNDS):
        for name in names if number % 2 == 0 else reversed(names):
            with slices[name].beside():
                slices[name].seconds += decode_seconds(parts, rows, mean, WARM_STEPS, TIMED_STEPS)
    figures = {name: found.figures() for name, found in slices.items()}
    for found in figures.values():
        for quantile in ("p50", "p99"):
            found[quantile] = found[f"{quantile}_ms"] / figures[ALONE][f"{quantile}_ms"] - 1
    for name in (ALONE, HOST, GPU, BOTH):
        with slices[name].beside(), constant_batch(parts, rows, mean, WARM_STEPS, PROFILED_STEPS) as loop:
            figures[name] |= profile_of(loop)
    for line in table(figures):
        report(line)
    return figures


def profile_of(loop: Loop) -> Figures:
    """Milliseconds a step in which the engine's kernels run and in which none does, and the share in which the GPU is idle."""

    def run() -> None:
        for _ in range(PROFILED_STEPS):
            loop.engine.step()

    events = device_events(run)
    ours = [event for event in events if not _lands(event)]
    begin_us, end_us = min(e.time_range.start for e in ours), max(e.time_range.end for e in ours)
    within = [e for e in events if begin_us <= e.time_range.start and e.time_range.end <= end_us]
    engine_us, wall_us = busy_and_wall_us(ours)
    busy_us, _ = busy_and_wall_us(within)
    return {
        "engine_busy_ms": engine_us / PROFILED_STEPS / 1e3,
        "engine_gap_ms": (wall_us - engine_us) / PROFILED_STEPS / 1e3,
        "gpu_idle_share": 1 - busy_us / wall_us,
    }


def _lands(event: FunctionEvent) -> bool:
    """The copier's kernel, or a copy from the host: the engine's own of these are a few microseconds a step."""
    return event.name == "_copy" or event.name.startswith("Memcpy HtoD")


def table(figures: dict[str, Figures]) -> list[str]:
    lines = [f"{'':<36} {'GB/s':>6} {'p50 ms':>8} {'':>8} {'p99 ms':>8} {'':>8}"]
    for name, found in figures.items():
        cells = (f"{found[f'{quantile}_ms']:8.3f} {found[quantile]:+8.1%}" for quantile in ("p50", "p99"))
        lines.append(f"{name:<36} {found['landed_gb_s']:6.1f} {' '.join(cells)}")
    lines.append(f"{'profiled, ms a step':<36} {'engine busy':>12} {'gaps':>8} {'GPU idle':>9}")
    for name, found in figures.items():
        if "engine_busy_ms" in found:
            busy, gap, idle = (found[key] for key in ("engine_busy_ms", "engine_gap_ms", "gpu_idle_share"))
            lines.append(f"{name:<36} {busy:12.3f} {gap:8.3f} {idle:9.1%}")
    return lines
