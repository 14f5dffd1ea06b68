"""A node is killed while requests are served: errors that clients see, their longest wait, and what was computed again.

- `prefill`: prefill and decode apart; the prefill node dies while KV of it is on its way (its slots say so).
- `decode`: all decode nodes serve; one of them dies while its streams run, and the others go on with them.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from dataclasses import dataclass
from typing import Any

from bench.serving.fleet import Arrangement, Fleet
from bench.serving.open_loop import Client, Served, run_arrivals
from bench.serving.workload import Lengths, poisson_arrivals

COUNTERS = ("decant_kv_recomputed_tokens_total", "decant_local_prefill_total", "decant_kv_transfer_failures_total")
AIM_LIMIT_S = 5.0
DRAIN_S = 20.0


@dataclass(frozen=True, slots=True)
class HarmPlan:
    lengths: Lengths
    rate: float
    seconds: float
    kill_after_s: float
    seed: int = 90_000


async def kill_prefill(fleet: Fleet, client: Client, plan: HarmPlan) -> dict[str, Any]:
    fleet.arrange(Arrangement.APART)
    return await _harm(fleet, client, plan, fleet.of_role("prefill")[0].name, "sending")


async def kill_decode(fleet: Fleet, client: Client, plan: HarmPlan) -> dict[str, Any]:
    decoders = fleet.of_role("decode")
    if len(decoders) < 2:
        raise RuntimeError("one decode node alone has nobody to go on with its streams")
    fleet.arrange(Arrangement.COLOCATED)
    return await _harm(fleet, client, plan, decoders[-1].name, "")


async def _harm(fleet: Fleet, client: Client, plan: HarmPlan, victim: str, slot_state: str) -> dict[str, Any]:
    survivors = [node.name for node in fleet.of_role("decode") if node.name != victim]
    before = _sums(fleet, survivors)
    arrivals = poisson_arrivals(plan.rate, plan.seconds, plan.lengths, plan.seed)
    load = asyncio.create_task(run_arrivals(client, arrivals, DRAIN_S))
    await asyncio.sleep(plan.kill_after_s)
    aimed = await _until_busy(fleet, victim, slot_state)
    killed_s = fleet.kill(victim)
    served = await load
    recomputed, local, failed = (after - first for first, after in zip(before, _sums(fleet, survivors), strict=True))
    return {
        "victim": victim,
        "aimed": aimed,
        "requests": len(served),
        "errors": sum(not one.complete for one in served),
        "error_examples": sorted({one.error for one in served if one.error})[:3],
        "gap_ms": _gaps(served, killed_s),
        "ttft_worst_ms": max((one.ttft_s for one in served if one.complete), default=float("nan")) * 1e3,
        "recomputed_tokens": recomputed,
        "local_prefills": local,
        "failed_transfers": failed,
    }


def _sums(fleet: Fleet, nodes: list[str]) -> list[float]:
    return [sum(fleet.metric(node, name) for node in nodes) for name in COUNTERS]


async def _until_busy(fleet: Fleet, victim: str, slot_state: str) -> bool:
    """Until the victim has slots in that state, or, without one, runs requests; False: it was never seen to."""
    deadline = time.monotonic() + AIM_LIMIT_S
    while time.monotonic() < deadline:
        if slot_state:
            busy = await asyncio.to_thread(fleet.metric, victim, "decant_staging_slots", state=slot_state)
        else:
            busy = await asyncio.to_thread(fleet.metric, victim, "decant_requests_running")
        if busy > 0:
            return True
    return False


def _gaps(served: list[Served], killed_s: float) -> dict[str, float]:
    """The longest waits between two events of streams that ran when the victim died, in ms."""
    running = [one for one in served if one.events_s and one.events_s[0] < killed_s < one.events_s[-1]]
    longest = [one.longest_gap_s * 1e3 for one in running]
    if not longest:
        return {"streams": 0}
    return {"streams": len(longest), "median": statistics.median(longest), "worst": max(longest)}
