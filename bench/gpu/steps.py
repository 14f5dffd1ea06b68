"""The real loop on an 8B shape: decode steps and prefills, sampling, planning and input copies included.

A decode step is wall time over 200 steps of `Engine.step` with a constant batch, contexts of unequal length with the stated
mean. The KV of a context is random numbers that stand in the pool already, as if a transfer had brought them.
"""

from __future__ import annotations

import cProfile
import io
import pstats
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch.autograd.profiler_util import FunctionEvent

from bench.gpu.measure import DEVICE
from bench.gpu.parts import BLOCK_SIZE, Figures, unequal
from bench.gpu.shape import VOCABULARY, write_folder
from engine.build import BuildOptions
from engine.build_device import DeviceEngineParts, build_device_engine
from engine.graphs.select import Costs, GraphSelector
from engine.loop import Engine
from engine.port import KvReserved, Mode, RequestKey, ReserveKv, SamplingParameters, StartFromKv, Submit, TokenSampled
from foundation.kv_layout import HeadOrder

TIMED_STEPS = 200
WARM_STEPS = 20
PROFILED_STEPS = 20
STEPS_AT_MOST = 5000


def build(
    folder: Path, order: HeadOrder, group: int | None, kv_gib: int = 64, batch_invariant: bool = False
) -> tuple[DeviceEngineParts, float]:
    """The warm engine, and the seconds it took."""
    begun = time.perf_counter()
    parts = build_device_engine(
        BuildOptions(
            model=write_folder(folder),
            load_format="dummy",
            block_size=BLOCK_SIZE,
            kv_cache_memory_bytes=kv_gib << 30,
            max_num_seqs=256,
            max_num_batched_tokens=8192,
            max_model_len=33_000,
            kv_head_order=order,
            kv_layer_group=group,
            batch_invariant=batch_invariant,
        ),
        DEVICE,
    )
    for layers in parts.storage.memory:
        layers.normal_()
    return parts, time.perf_counter() - begun


@dataclass
class Loop:
    """An engine of its own over the parts' runner."""

    engine: Engine
    parts: DeviceEngineParts

    def run_until(self, done: Callable[[], bool]) -> None:
        for _ in range(STEPS_AT_MOST):
            if done():
                return
            self.engine.step()
        raise AssertionError("the loop does not come to an end")

    def drain(self) -> None:
        """Settle what is in flight."""
        while self.engine.status().has_work:
            self.engine.step()


def new_loop(parts: DeviceEngineParts) -> Loop:
    config = replace(parts.config, enable_prefix_caching=True)
    return Loop(Engine(config, parts.runner, np.zeros(parts.config.num_blocks, np.uint64)), parts)


def prompt_of(length: int, seed: int) -> tuple[int, ...]:
    return tuple(np.random.default_rng(seed).integers(0, VOCABULARY - 1, length).tolist())


def start_decodes(loop: Loop, contexts: np.ndarray, temperature: float) -> None:
    """Every context's KV stands in the pool; each request has its first token and decodes from the next step on."""
    sampling = SamplingParameters(seed=1, max_tokens=4096, temperature=temperature, ignore_eos=True)
    for index, length in enumerate(contexts.tolist()):
        key = RequestKey(f"d{index}")
        loop.engine.take(Submit(key, prompt_of(length, index), sampling, Mode.AWAIT_KV))
        loop.engine.take(ReserveKv(key, length))
    reserved = [event for event in loop.engine.step() if isinstance(event, KvReserved)]
    assert len(reserved) == len(contexts), f"{len(reserved)} of {len(contexts)} reservations"
    for event in reserved:
        loop.engine.take(StartFromKv(event.key, event.end_position, first_token=5))


def decode(parts: DeviceEngineParts, rows: int, mean: int, temperature: float = 0.0, profile: bool = True) -> Figures:
    """Milliseconds a step, share of it in which the GPU is idle, and where the host's time goes."""
    loop = new_loop(parts)
    # Contexts grow while they are measured, so they begin shorter, by half of that.
    start_decodes(loop, unequal(rows, mean) - min(WARM_STEPS + TIMED_STEPS // 2, mean - 8), temperature)
    for _ in range(WARM_STEPS):
        loop.engine.step()
    assert loop.engine.status().running == rows
    torch.cuda.synchronize()
    seconds = []
    begun = time.perf_counter()
    for _ in range(TIMED_STEPS):
        one = time.perf_counter()
        loop.engine.step()
        seconds.append(time.perf_counter() - one)
    total_s = time.perf_counter() - begun
    figures = {
        "ms": total_s / TIMED_STEPS * 1e3,
        "p50_ms": statistics.median(seconds) * 1e3,
        "p99_ms": sorted(seconds)[int(len(seconds) * 0.99)] * 1e3,
    } | _host_times(loop)
    if profile:
        figures |= _profiled(loop)
    assert loop.engine.status().running == rows, "the batch was not constant"
    loop.engine.fail_all("done")
    torch.cuda.synchronize()
    return figures


def _host_times(loop: Loop) -> Figures:
    """Milliseconds of the host's parts of a step, over a few steps."""
    spent = {"plan": 0.0, "launch": 0.0, "settle": 0.0}
    scheduler, runner = loop.engine.scheduler, loop.parts.runner

    def timed(name: str, call: Callable[..., object]) -> Callable[..., object]:
        def run(*arguments: object) -> object:
            begun = time.perf_counter()
            try:
                return call(*arguments)
            finally:
                spent[name] += time.perf_counter() - begun

        return run

    originals = scheduler.plan, runner.launch, scheduler.settle
    scheduler.plan = timed("plan", scheduler.plan)  # type: ignore[method-assign, assignment]
    runner.launch = timed("launch", runner.launch)  # type: ignore[method-assign, assignment]
    scheduler.settle = timed("settle", scheduler.settle)  # type: ignore[method-assign, assignment]
    for _ in range(PROFILED_STEPS):
        loop.engine.step()
    scheduler.plan, runner.launch, scheduler.settle = originals  # type: ignore[method-assign]
    return {f"host_{name}_ms": seconds / PROFILED_STEPS * 1e3 for name, seconds in spent.items()}


def _profiled(loop: Loop) -> Figures:
    """The share of time in which no kernel and no copy runs, and the busy time by kind of kernel, a step."""

    def run() -> None:
        for _ in range(PROFILED_STEPS):
            loop.engine.step()

    return _profile(run, PROFILED_STEPS)


def profile_prefill(parts: DeviceEngineParts, tokens: int) -> Figures:
    """The same of one prompt."""
    prefill(parts, tokens, repetitions=1)
    return _profile(lambda: prefill(parts, tokens, repetitions=-1), 1)


def _profile(run: Callable[[], object], steps: int) -> Figures:
    events = device_events(run)
    busy_us, wall_us = busy_and_wall_us(events)
    kinds: dict[str, float] = {}
    for event in events:
        kind = kind_of(event.name)
        kinds[kind] = kinds.get(kind, 0.0) + (event.time_range.end - event.time_range.start)
    return {
        "gpu_idle_share": 1 - busy_us / wall_us,
        "kernels": len(events) / steps,
    } | {f"gpu_{kind}_ms": us / steps / 1e3 for kind, us in sorted(kinds.items())}


def device_events(run: Callable[[], object]) -> list[FunctionEvent]:
    """Every kernel and copy of any stream while `run` runs."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        run()
        torch.cuda.synchronize()
    return [event for event in profiler.events() if str(event.device_type).endswith("CUDA")]


def busy_and_wall_us(events: Sequence[FunctionEvent]) -> tuple[float, float]:
    """Microseconds in which any of them runs, and from the first one's start to the last one's end."""
    spans = sorted((event.time_range.start, event.time_range.end) for event in events)
    busy_us, end = 0.0, spans[0][0]
    for first, last in spans:
        busy_us += max(0.0, last - max(first, end))
        end = max(end, last)
    return busy_us, end - spans[0][0]


KINDS = (
    ("attention", ("BatchDecode", "BatchPrefill", "Prefill", "VariableLengthMerge", "PersistentVariableLength")),
    ("product", ("gemm", "gemv", "_product", "cutlass", "nvjet", "splitK", "cublas")),
    ("norm", ("_add_norm",)),
    ("rotate", ("_rotate_append",)),
    ("gate", ("_gate",)),
    ("draw", ("_draw", "_threshold")),
    ("copy", ("Memcpy", "Memset")),
)


def kind_of(name: str) -> str:
    return next((kind for kind, marks in KINDS if any(mark in name for mark in marks)), "other")


def prefill(parts: DeviceEngineParts, tokens: int, repetitions: int = 9) -> Figures:
    """Milliseconds from a prompt's arrival to its first token on the host."""
    loop, seconds = new_loop(parts), []
    for index in range(repetitions + 2):
        key = RequestKey(f"p{index}")
        sampling = SamplingParameters(seed=1, max_tokens=1, temperature=0.0)
        submit = Submit(key, prompt_of(tokens, 1000 * tokens + index), sampling)
        torch.cuda.synchronize()
        begun = time.perf_counter()
        loop.engine.take(submit)
        finished = False
        while not finished:
            finished = any(isinstance(event, TokenSampled) and event.key == key for event in loop.engine.step())
        seconds.append(time.perf_counter() - begun)
    timed = seconds[2:] or seconds
    return {"ms": statistics.median(timed) * 1e3, "worst_ms": max(timed) * 1e3}


def prefill_many(parts: DeviceEngineParts, prompts: int, tokens: int) -> Figures:
    """Prompt tokens a second when many prompts wait."""
    loop = new_loop(parts)
    for index in range(prompts):
        sampling = SamplingParameters(seed=1, max_tokens=1, temperature=0.0)
        loop.engine.take(Submit(RequestKey(f"m{index}"), prompt_of(tokens, 77_000 + index), sampling))
    torch.cuda.synchronize()
    begun, finished = time.perf_counter(), 0
    while finished < prompts:
        finished += sum(isinstance(event, TokenSampled) for event in loop.engine.step())
    seconds = time.perf_counter() - begun
    return {"tokens_a_second": prompts * tokens / seconds, "ms": seconds * 1e3}


def mixed(parts: DeviceEngineParts, rows: int, mean: int, chunk: int, steps: int = 40) -> Figures:
    """Milliseconds of a step with `rows` decodes and a chunk of a prompt, as a decode node computes one beside its batch."""
    loop = new_loop(parts)
    loop.engine.scheduler.config = replace(loop.engine.scheduler.config, max_num_batched_tokens=rows + chunk)
    start_decodes(loop, unequal(rows, mean) - 20, 0.0)
    sampling = SamplingParameters(seed=1, max_tokens=1, temperature=0.0)
    for index in range(-(-(steps + 10 + 2 * PROFILED_STEPS) * chunk // 2048)):
        loop.engine.take(Submit(RequestKey(f"x{index}"), prompt_of(2048, 5_000 + index), sampling))
    for _ in range(6):
        loop.engine.step()
    torch.cuda.synchronize()
    seconds = []
    for _ in range(steps):
        begun = time.perf_counter()
        loop.engine.step()
        seconds.append(time.perf_counter() - begun)
    figures = {"ms": statistics.median(seconds) * 1e3} | _host_times(loop) | _profiled(loop)
    loop.engine.fail_all("done")
    torch.cuda.synchronize()
    return figures


def host_profile(parts: DeviceEngineParts, tokens: int, lines: int = 22) -> str:
    """Where the host's time goes in eager steps of one prompt: the functions that cost most in themselves."""
    profile = cProfile.Profile()
    profile.enable()
    prefill(parts, tokens, repetitions=4)
    profile.disable()
    text = io.StringIO()
    pstats.Stats(profile, stream=text).sort_stats("tottime").print_stats(lines)
    return text.getvalue()


def eager_only(parts: DeviceEngineParts) -> GraphSelector:
    """Forbid graphs; returns the selector to put back."""
    kept = parts.runner.selector
    parts.runner.selector = GraphSelector(Costs())
    return kept
