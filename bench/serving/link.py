"""Bytes between two devices, four ways in one run: a plain copy, UCX's own benchmark, the data plane's messages, transfers.

    copy          one process, both GPUs: the ceiling
    ucx_perftest  tag_bw with messages of slot size
    messages      sends of the data plane from slots into slots, IN_FLIGHT at a time, from the receiver's word to the last landed
    transfers     gather, digests, credits, messages, scatter: from P's first gather to D's commit, and from P's offer; P has
                  computed everything before

Each direction and slot size by itself; medians of ROUNDS after one that warms up. Two processes, one on each device; on CPUs
without the copy. What fails is said and left out, so that the others are still measured.

Must not know: routers, nodes, engines.
"""

from __future__ import annotations

import multiprocessing
import os
import re
import subprocess
import time
from collections.abc import Callable, Iterator
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import uvloop

from bench.ports import free_port
from bench.serving.link_sides import ROUNDS, LinkPlan, decode_side, in_mib, prefill_side
from kv_transfer.transport.ucx_environment import apply_ucx_environment

SIDE_LIMIT_S = 120.0
PERFTEST_LIMIT_S = 30.0

Say = Callable[[str], None]


def measure(devices: tuple[str, str], mib: int, slots_mib: tuple[int, ...], say: Say) -> dict[str, float]:
    """GB/s by way, slot size and direction; raises RuntimeError if no way works."""
    plan = LinkPlan(*devices, mib << 20, tuple(slot << 20 for slot in slots_mib))
    figures: dict[str, float] = {}
    for way in (copies, perftests, messages_and_transfers):
        try:
            for name, rate in way(plan):
                figures[name] = rate
                say(f"  {name}: {rate:.1f} GB/s")
        except Exception as error:  # one way's root: the others are measured all the same
            say(f"  {way.__name__}: {type(error).__name__}: {error}")
    if not figures:
        raise RuntimeError("no bytes travelled between the devices by any way")
    return figures


def copies(plan: LinkPlan) -> Iterator[tuple[str, float]]:
    if plan.on_gpus:
        yield from _in_processes(plan, [_copy_side])


def perftests(plan: LinkPlan) -> Iterator[tuple[str, float]]:
    for slot_bytes in plan.slot_bytes:
        yield f"ucx_perftest {in_mib(slot_bytes)} P to D", _perftest(plan, slot_bytes, reverse=False)
        if plan.on_gpus and slot_bytes == max(plan.slot_bytes):
            yield f"ucx_perftest {in_mib(slot_bytes)} D to P", _perftest(plan, slot_bytes, reverse=True)


def messages_and_transfers(plan: LinkPlan) -> Iterator[tuple[str, float]]:
    yield from _in_processes(plan, [prefill_side, decode_side])


def _in_processes(plan: LinkPlan, sides: list[Any]) -> Iterator[tuple[str, float]]:
    """Run each side in a process of its own; the last one's figures, as they come."""
    spawn = multiprocessing.get_context("spawn")
    between = spawn.Pipe()
    mine, theirs = spawn.Pipe()
    processes = [
        spawn.Process(target=_run_side, args=(side, plan, between[index], theirs), daemon=True)
        for index, side in enumerate(sides)
    ]
    for process in processes:
        process.start()
    theirs.close()
    try:
        while True:
            if not mine.poll(SIDE_LIMIT_S):
                raise RuntimeError(f"nothing came for {SIDE_LIMIT_S:.0f} s")
            found = mine.recv()
            if found is None:
                return
            if isinstance(found, str):
                raise RuntimeError(found)
            yield found
    except EOFError:
        raise RuntimeError("a side died") from None
    finally:
        for process in processes:
            process.join(5)
            process.kill()


def _run_side(side: Any, plan: LinkPlan, between: Connection, figures: Connection) -> None:
    apply_ucx_environment(plan.environment())
    try:
        uvloop.run(side(plan, between, figures))  # as a node does
    except BaseException as error:  # the process's root
        figures.send(f"{side.__name__}: {type(error).__name__}: {error}")
        raise


async def _copy_side(plan: LinkPlan, between: Connection, figures: Connection) -> None:
    import torch

    from bench.gpu.measure import median_s

    sides = {name: torch.device(device) for name, device in (("P", plan.prefill_device), ("D", plan.decode_device))}
    memory = {name: torch.zeros(plan.total_bytes, dtype=torch.uint8, device=device) for name, device in sides.items()}
    for source, target in (("P", "D"), ("D", "P")):
        with torch.cuda.device(sides[source]):
            seconds = median_s(partial(memory[target].copy_, memory[source]), ROUNDS)
        figures.send((f"device copy {source} to {target}", plan.total_bytes / seconds / 1e9))
    figures.send(None)


def _perftest(plan: LinkPlan, slot_bytes: int, *, reverse: bool) -> float:
    """GB/s. On GPUs each end takes the GPU of its rank, so both see both, the receiver's first."""
    import libucx

    home = Path(libucx.__file__).parent
    environment = {**os.environ, **plan.environment(), "LD_LIBRARY_PATH": str(home / "lib")}
    memory = []
    if plan.on_gpus:
        indices = [device.partition(":")[2] or "0" for device in (plan.decode_device, plan.prefill_device)]
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(reversed(indices) if reverse else indices)
        memory = ["-m", "cuda"]
    common = [str(home / "bin/ucx_perftest"), "-p", str(free_port()), *memory]
    count = max(20, plan.total_bytes // slot_bytes)
    client = [*common, "-t", "tag_bw", "-s", str(slot_bytes), "-n", str(count), "-w", "8", "127.0.0.1"]
    server = subprocess.Popen(common, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + PERFTEST_LIMIT_S
    try:
        while time.monotonic() < deadline:  # until the server listens
            ran = subprocess.run(client, env=environment, capture_output=True, text=True, timeout=PERFTEST_LIMIT_S)
            if ran.returncode == 0:
                final = next(line.split() for line in ran.stdout.splitlines() if line.startswith("Final:"))
                return float(final[6]) * (1 << 20) / 1e9
            time.sleep(0.1)
    finally:
        server.kill()
        server.wait()
    raise RuntimeError(f"ucx_perftest does not run: {ran.stdout[-300:]} {ran.stderr[-300:]}")


def ratios_of_link(figures: dict[str, float]) -> dict[str, float]:
    """Of the slot size with the fastest transfers: a transfer's rate over that of messages alone, and over ucx_perftest's; what
    digests and owner checks take of its time."""
    whole = {name: rate for name, rate in figures.items() if re.fullmatch(r"transfers \d+ MiB P to D", name)}
    if not whole:
        return {}
    best = max(whole, key=lambda name: whole[name])
    size = best.removeprefix("transfers ").partition(" MiB")[0]
    messages = next((rate for name, rate in figures.items() if name.startswith(f"messages {size} MiB P to D")), None)
    perftest = figures.get(f"ucx_perftest {size} MiB P to D")
    plain = figures.get(f"{best} without digests")
    ratios = {"transfer_slot_mib": float(size)}
    if messages:
        ratios["transfer_ratio"] = whole[best] / messages
    if perftest:
        ratios["transfer_over_ucx_perftest"] = whole[best] / perftest
    if plain:
        ratios["digest_share"] = 1 - whole[best] / plain
    return ratios
