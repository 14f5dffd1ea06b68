"""A step's timeline as a picture: what the host does, what it asks of the GPU, and which kernels run when.

    host      plan, launch, settle: the parts of `Engine.step`
    calls     into CUDA; waiting for a step's event is one of them
    GPU       kernels and copies by kind, one row each, all streams

Must not know: how figures are stored.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch.autograd.profiler_util import FunctionEvent

from bench.gpu.landing import constant_batch
from bench.gpu.steps import KINDS, kind_of, new_loop, prompt_of
from engine.build_device import DeviceEngineParts
from engine.port import RequestKey, SamplingParameters, Submit, TokenSampled

DECODE_STEPS = 6
SHOWN_DECODE_STEPS = (3, 4)
HOST_PARTS = ("plan", "launch", "settle")
WAITS = ("cudaEventSynchronize", "cudaStreamSynchronize", "cudaDeviceSynchronize")
GPU_ROWS = (*(kind for kind, _ in KINDS), "other")
LEAST_SHOWN_SHARE = 1 / 1500
"""Of the width: what is shorter is drawn that long, so that it is seen."""

Spans = list[tuple[float, float]]


@dataclass(frozen=True, slots=True)
class Timeline:
    """Spans in milliseconds from the beginning of what is shown, by row from top to bottom."""

    title: str
    width_ms: float
    rows: dict[str, Spans]

    def busy_share(self) -> float:
        """Of the width, in which any kernel or copy runs."""
        spans = sorted(span for name in GPU_ROWS for span in self.rows[f"GPU {name}"])
        busy_ms, end = 0.0, 0.0
        for first, last in spans:
            busy_ms += max(0.0, last - max(first, end))
            end = max(end, last)
        return busy_ms / self.width_ms


def timelines(parts: DeviceEngineParts, rows: int, mean: int, prompt_tokens: int) -> list[Timeline]:
    """Of decode steps in the middle of a constant batch, and of a whole prefill."""
    first, last = SHOWN_DECODE_STEPS
    with constant_batch(parts, rows, mean, 20, DECODE_STEPS) as loop, host_parts_named(parts, loop.engine.scheduler):
        with profiled() as profiler:
            for number in range(DECODE_STEPS):
                with torch.profiler.record_function(f"step {number}"):
                    loop.engine.step()
        decode = timeline(f"decode, {rows} x {mean}", _events(profiler), f"step {first}", f"step {last}")
    return [decode, _prefill_timeline(parts, prompt_tokens)]


def _prefill_timeline(parts: DeviceEngineParts, tokens: int) -> Timeline:
    loop = new_loop(parts)

    def prefill(seed: int) -> None:
        sampling = SamplingParameters(seed=1, max_tokens=1, temperature=0.0)
        loop.engine.take(Submit(RequestKey(f"t{seed}"), prompt_of(tokens, 900_000 + seed), sampling))
        while not any(isinstance(event, TokenSampled) for event in loop.engine.step()):
            assert loop.engine.status().has_work

    prefill(0)
    with host_parts_named(parts, loop.engine.scheduler), profiled() as profiler:
        prefill(1)
        torch.cuda.synchronize()
        with torch.profiler.record_function("prefill"):
            prefill(2)
    return timeline(f"prefill of {tokens} tokens", _events(profiler), "prefill", "prefill")


@contextmanager
def profiled() -> Iterator[torch.profiler.profile]:
    activity = torch.profiler.ProfilerActivity
    with torch.profiler.profile(activities=[activity.CPU, activity.CUDA]) as profiler:
        yield profiler
        torch.cuda.synchronize()


def _events(profiler: torch.profiler.profile) -> list[FunctionEvent]:
    return list(profiler.events())  # type: ignore[no-untyped-call]


@contextmanager
def host_parts_named(parts: DeviceEngineParts, scheduler: object) -> Iterator[None]:
    """The parts of a step stand in the profile by name."""

    def named(name: str, call: Callable[..., object]) -> Callable[..., object]:
        def run(*arguments: object) -> object:
            with torch.profiler.record_function(name):
                return call(*arguments)

        return run

    owners = {"plan": scheduler, "launch": parts.runner, "settle": scheduler}
    with ExitStack() as patches:
        for name, owner in owners.items():
            patches.enter_context(patch.object(owner, name, named(name, getattr(owner, name))))
        yield


def timeline(title: str, events: list[FunctionEvent], first: str, last: str) -> Timeline:
    """What lies between the beginning of the host's span `first` and the end of `last`."""
    host = [event for event in events if str(event.device_type).endswith("CPU")]
    begin_us = next(event.time_range.start for event in host if event.name == first)
    end_us = next(event.time_range.end for event in host if event.name == last)
    named = {first, last, *HOST_PARTS}

    def spans(wanted: Callable[[FunctionEvent], bool], among: list[FunctionEvent]) -> Spans:
        found = []
        for event in among:
            start, end = max(event.time_range.start, begin_us), min(event.time_range.end, end_us)
            if start < end and wanted(event):
                found.append(((start - begin_us) / 1e3, (end - begin_us) / 1e3))
        return found

    # The profiler repeats the host's spans on the device's side.
    device = [
        e for e in events if str(e.device_type).endswith("CUDA") and e.name not in named and "step " not in e.name
    ]
    rows = {f"host {part}": spans(lambda e, part=part: e.name == part, host) for part in HOST_PARTS}  # type: ignore[misc]
    rows["CUDA calls"] = spans(lambda e: e.name.startswith(("cuda", "cu")) and e.name not in WAITS, host)
    rows["CUDA waits"] = spans(lambda e: e.name in WAITS, host)
    for kind in GPU_ROWS:
        rows[f"GPU {kind}"] = spans(lambda e, kind=kind: kind_of(e.name) == kind, device)  # type: ignore[misc]
    return Timeline(title, (end_us - begin_us) / 1e3, rows)


def draw(found: list[Timeline], file: Path) -> None:
    """One below the other. Needs matplotlib."""
    import_module("matplotlib").use("Agg")
    pyplot = import_module("matplotlib.pyplot")
    figure, axes = pyplot.subplots(len(found), 1, figsize=(12, 3.4 * len(found)), squeeze=False)
    for shown, axis in zip(found, axes[:, 0], strict=True):
        _draw_one(shown, axis)
    figure.tight_layout()
    figure.savefig(file, dpi=90)
    pyplot.close(figure)


def _draw_one(shown: Timeline, axis: Any) -> None:
    least_ms = shown.width_ms * LEAST_SHOWN_SHARE
    for row, spans in enumerate(shown.rows.values()):
        bars = [(first, max(last - first, least_ms)) for first, last in spans]
        axis.broken_barh(bars, (row - 0.4, 0.8), color=f"C{row % 10}", linewidth=0)
    axis.set_yticks(range(len(shown.rows)), list(shown.rows), fontsize=7)
    axis.invert_yaxis()
    axis.set_xlim(0, shown.width_ms)
    axis.set_xlabel("ms", fontsize=8)
    axis.set_title(f"{shown.title}: GPU busy {shown.busy_share():.1%}", fontsize=9)
