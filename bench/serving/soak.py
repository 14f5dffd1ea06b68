"""Minutes of mixed load, some of whose clients leave in mid-stream: does anything grow, is anything left over?

Sampled of every process: resident memory, descriptors, GPU memory (as the driver counts it). At the end, when all is quiet: KV
blocks in use and slots that are not free, which must be none.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import time
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from bench.serving.fleet import Arrangement, Fleet, Node
from bench.serving.open_loop import Client, Served
from bench.serving.workload import Lengths, poisson_arrivals

SAMPLE_EVERY_S = 2.0
LEAVES_SHARE = 0.1
QUIET_LIMIT_S = 15.0
BUSY_SLOTS = ("posted", "landed", "scattering", "sending", "quarantined")


@dataclass(frozen=True, slots=True)
class SoakPlan:
    lengths: Lengths
    rate: float
    seconds: float
    seed: int = 60_000


async def soak(fleet: Fleet, client: Client, plan: SoakPlan) -> dict[str, Any]:
    fleet.arrange(Arrangement.APART)
    generator = np.random.default_rng(plan.seed)
    arrivals = poisson_arrivals(plan.rate, plan.seconds, plan.lengths, plan.seed)
    samples: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    sampler = asyncio.create_task(_sample(fleet, samples))
    served: list[Served] = []
    left = 0
    begun_s = time.perf_counter()
    async with asyncio.TaskGroup() as group:
        for arrival in arrivals:
            await asyncio.sleep(max(0.0, begun_s + arrival.at_s - time.perf_counter()))
            record = Served(arrival.shape, 0.0)
            request = client.send(arrival.shape, client.body(arrival.shape, arrival.prompt_seed), None, record)
            if generator.random() < LEAVES_SHARE:
                left += 1
                group.create_task(_leave(request, generator.uniform(0.01, 1.5)))
            else:
                served.append(record)
                group.create_task(request)
    sampler.cancel()
    await asyncio.gather(sampler, return_exceptions=True)
    return {
        "seconds": plan.seconds,
        "requests": len(served),
        "left_in_mid_stream": left,
        "errors": sum(not record.complete for record in served),
        "growth": {name: {what: _growth(values) for what, values in found.items()} for name, found in samples.items()},
        "left_over": await _left_over(fleet),
    }


async def _leave(request: Any, after_s: float) -> None:
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(request, after_s)


async def _sample(fleet: Fleet, samples: dict[str, dict[str, list[float]]]) -> None:
    while True:
        await asyncio.sleep(SAMPLE_EVERY_S)
        on_gpu = await asyncio.to_thread(_gpu_mib_by_process)
        for name, process in fleet.system.processes.items():
            found = samples[name]
            found["resident_mib"].append(_resident_mib(process.pid))
            found["descriptors"].append(len(os.listdir(f"/proc/{process.pid}/fd")))
            if process.pid in on_gpu:
                found["gpu_mib"].append(on_gpu[process.pid])


def _resident_mib(pid: int) -> float:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def _gpu_mib_by_process() -> dict[int, float]:
    query = ["nvidia-smi", "--query-compute-apps=pid,used_memory", "--format=csv,noheader,nounits"]
    try:
        told = subprocess.run(query, capture_output=True, text=True, timeout=5).stdout
    except (OSError, subprocess.TimeoutExpired):
        return {}
    pairs = (line.split(",") for line in told.splitlines() if line.count(",") == 1)
    return {int(pid): float(used) for pid, used in pairs if used.strip().isdigit()}


def _growth(values: list[float]) -> dict[str, float]:
    """The first third's most (the start is no growth), and the last third's."""
    third = max(1, len(values) // 3)
    return {"first_third": max(values[:third]), "last_third": max(values[-third:])}


async def _left_over(fleet: Fleet) -> dict[str, float]:
    """By node, once all is quiet or the limit has passed."""
    deadline = time.monotonic() + QUIET_LIMIT_S
    while True:
        found = {node.name: await asyncio.to_thread(_in_use, fleet, node) for node in fleet.nodes.values()}
        if not any(found.values()) or time.monotonic() > deadline:
            return found
        await asyncio.sleep(0.5)


def _in_use(fleet: Fleet, node: Node) -> float:
    """KV blocks and slots."""
    blocks = fleet.metric(node.name, "decant_kv_blocks", state="in_use")
    return blocks + sum(fleet.metric(node.name, "decant_staging_slots", state=state) for state in BUSY_SLOTS)
