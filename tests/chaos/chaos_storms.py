"""Storms after the faults: clients that leave in masses, links that are too slow for their load. Each ends with its figures.

F11: 300 requests, nine of ten cancelled within 60 ms, four times; then a probe answers as fast as before. F14: 64 requests at
once over 200 Mbit/s; no transfer fails while its bytes advance. F13: four times more than a link of 10 Mbit/s carries; nothing
but refusals with a hint when to come again, and afterwards all is as before.
"""

from __future__ import annotations

import asyncio
import random
import statistics
import time
from dataclasses import dataclass

import grpc.aio
from chaos_cluster import DECODE, PREFILL, Cluster
from chaos_load import Load

STORM_ROUNDS, STORM_REQUESTS = 4, 300
STAY_SHARE, LEAVE_WITHIN_S = 0.1, 0.06
PROBES = 9
PROBE_TOLERANCE = 1.10
PROBE_SPARE_S = 0.05
"""What a probe may be slower by all the same: a scheduler's tick on a small machine is no effect of a storm."""
SLOW_IS_NOT_DEAD = ("transfer_stalled", "silent", "unresponsive")


@dataclass(frozen=True)
class StormOutcome:
    line: str
    broken: list[str]


async def storms(cluster: Cluster, load: Load, seed: int) -> list[StormOutcome]:
    found = [await cancel_storm(cluster, load, random.Random(seed))]
    if cluster.network is not None:
        found += [await many_over_a_slow_link(cluster, load), await overload(cluster, load)]
    return found


async def _probe_s(load: Load) -> float:
    """Median time of one answer on an idle cluster."""
    times = []
    for _ in range(PROBES):
        begun = time.monotonic()
        await load.judged(0)
        times.append(time.monotonic() - begun)
    return statistics.median(times)


async def cancel_storm(cluster: Cluster, load: Load, chance: random.Random) -> StormOutcome:
    before_s = await _probe_s(load)
    cancelled = 0
    for _ in range(STORM_ROUNDS):
        tasks = [asyncio.create_task(load.judged(load.draw(chance))) for _ in range(STORM_REQUESTS)]
        leaving = [task for task in tasks if chance.random() >= STAY_SHARE]
        for task in leaving:
            asyncio.get_running_loop().call_later(chance.uniform(0.0, LEAVE_WITHIN_S), task.cancel)
        await asyncio.gather(*tasks, return_exceptions=True)
        cancelled += sum(task.cancelled() for task in leaving)
    broken = [f"storm: {left}" for left in await cluster.rest()]
    after_s = await _probe_s(load)
    if after_s > before_s * PROBE_TOLERANCE + PROBE_SPARE_S:
        broken.append(f"storm: a probe takes {after_s:.3f} s, {before_s:.3f} s before")
    line = (
        f"cancel storm: {STORM_ROUNDS} x {STORM_REQUESTS} requests, {cancelled} cancelled; a probe takes "
        f"{before_s:.3f} s before, {after_s:.3f} s after"
    )
    return StormOutcome(line, broken)


async def many_over_a_slow_link(cluster: Cluster, load: Load) -> StormOutcome:
    assert cluster.network is not None
    megabits, requests = 200, 64
    before = await _failures(cluster)
    for name in PREFILL:
        await asyncio.to_thread(cluster.network.throttle, name, megabits)
    begun = time.monotonic()
    try:
        await asyncio.gather(*(load.judged(index % load.questions) for index in range(requests)))
        held = sum([await asyncio.to_thread(cluster.network.throttled_packets, name) for name in PREFILL])
    finally:
        for name in PREFILL:
            await asyncio.to_thread(cluster.network.unthrottle, name)
    seconds = time.monotonic() - begun
    given_up = {reason: n - before.get(reason, 0) for reason, n in (await _failures(cluster)).items()}
    broken = [f"slow link: {n:.0f} transfers failed as {reason}" for reason, n in given_up.items() if n > 0]
    broken += [] if held else ["slow link: nothing was held back"]
    line = f"slow link: {requests} requests over {megabits} Mbit/s in {seconds:.1f} s, {held} packets held back, "
    return StormOutcome(line + f"{sum(given_up.values()):.0f} transfers given up", broken)


async def overload(cluster: Cluster, load: Load) -> StormOutcome:
    assert cluster.network is not None
    megabits, streams = 10, 32
    before_s = await _probe_s(load)
    refused: list[str] = []
    for name in PREFILL:
        await asyncio.to_thread(cluster.network.throttle, name, megabits)
    begun = time.monotonic()
    try:
        outcomes = await asyncio.gather(
            *(load.checked(index % load.questions) for index in range(2 * streams)), return_exceptions=True
        )
    finally:
        for name in PREFILL:
            await asyncio.to_thread(cluster.network.unthrottle, name)
    seconds = time.monotonic() - begun
    broken = []
    for outcome in outcomes:
        if isinstance(outcome, grpc.aio.AioRpcError) and outcome.code() is grpc.StatusCode.UNAVAILABLE:
            refused.append(str(outcome.details()))
        elif isinstance(outcome, BaseException):
            broken.append(f"overload: {outcome!r}")
    broken += [f"overload: {left}" for left in await cluster.rest()]
    await load.once()
    after_s = await _probe_s(load)
    if after_s > before_s * PROBE_TOLERANCE + PROBE_SPARE_S:
        broken.append(f"overload: a probe takes {after_s:.3f} s, {before_s:.3f} s before")
    line = (
        f"overload: {2 * streams} requests over {megabits} Mbit/s in {seconds:.1f} s, {len(refused)} refused; a probe takes "
        f"{before_s:.3f} s before, {after_s:.3f} s after"
    )
    return StormOutcome(line, broken)


async def _failures(cluster: Cluster) -> dict[str, float]:
    """Transfers that decode nodes gave up although somebody was alive at the other end, by reason."""
    found: dict[str, float] = {}
    for name in DECODE:
        for reason, count in (await cluster[name].metrics()).nonzero("kv_transfer_failures_total").items():
            if reason in SLOW_IS_NOT_DEAD:
                found[reason] = found.get(reason, 0.0) + count
    return found
