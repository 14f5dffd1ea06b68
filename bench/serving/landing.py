"""What landing KV costs the streams that a decode node serves meanwhile, host and GPU together.

A batch of streams decodes; between phases of that, it decodes while prompts whose KV the prefill node holds already are asked
again and again for two tokens each: all of their KV lands, next to none is computed. First as fast as they are answered, which
is the full rate and comes in bursts, for answers leave together when a step ends; then at nearly that rate, evenly; then at a
lower one. Compared are the engine's own steps, as they are and beyond what their batches ask for (`step_price`), and the gaps
that clients see. The share of time in which the decode node's GPU is idle is profiled in a phase of its own (SIGUSR2 of
`timed_node`).
"""

from __future__ import annotations

import asyncio
import signal
import statistics
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass
from itertools import count, pairwise
from typing import Any

from bench.serving.fleet import Arrangement, Fleet
from bench.serving.goodput import quantile
from bench.serving.open_loop import Client, Served
from bench.serving.step_price import Phase, Step, prices
from bench.serving.workload import Shape

REPEATED_PROMPTS = 4
LANDED_TOKENS = 2
START_LIMIT_S = 60.0
PROFILE_LIMIT_S = 20.0
UNDER_WAY_S = 0.3
EVENLY_OF_FULL = 0.95
"""More would pile up."""

Beside = Callable[[], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class LandingPlan:
    streams: int
    prompt_tokens: int
    output_tokens: int
    """Enough for all phases to pass: streams that end early spoil the batch."""
    phase_s: float
    landings_at_once: int
    landings_a_second: float
    """Of the paced phase; the other one asks again as soon as it is answered."""
    seed: int = 70_000


async def measure_landing(fleet: Fleet, client: Client, plan: LandingPlan) -> dict[str, Any]:
    fleet.arrange(Arrangement.APART)
    streams = _Streams(fleet, client, plan)
    landings = _Landings(client, plan)
    prompt_bytes = await landings.compute_all(streams.landed_bytes)
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(one) for one in streams.coroutines()]
        await streams.all_started()
        alone = [await streams.observe(plan.phase_s)]
        full = await streams.observe(plan.phase_s, lambda: landings.at_once(plan.landings_at_once))
        alone.append(await streams.observe(plan.phase_s))
        a_second = EVENLY_OF_FULL * full["landed_gb_s"] * 1e9 / prompt_bytes
        evenly = await streams.observe(plan.phase_s, lambda: landings.at_rate(a_second))
        alone.append(await streams.observe(plan.phase_s))
        paced = await streams.observe(plan.phase_s, lambda: landings.at_rate(plan.landings_a_second))
        alone.append(await streams.observe(plan.phase_s))
        idle_share = await streams.idle_share(lambda: landings.at_rate(plan.landings_a_second))
        ended_early = sum(task.done() for task in tasks)
        for task in tasks:
            task.cancel()
    landing = {"full_rate": full, "evenly": evenly, "paced": paced}
    return {
        "streams": plan.streams,
        "prompt_tokens": plan.prompt_tokens,
        "streams_that_ended_early": ended_early,
        "alone": alone,
        "landing_at_full_rate": full,
        "landing_evenly": evenly,
        "landing_paced": paced,
        "itl_under_landing": {
            name: growth(phase, alone[number : number + 2]) for number, (name, phase) in enumerate(landing.items())
        },
        "step_price_of_landing": streams.prices(alone, landing),
        "gpu_idle_share_serving": idle_share,
        "step_p99_over_p50": paced["step_p99_ms"] / paced["step_p50_ms"],
    }


def growth(phase: dict[str, float], alone: list[dict[str, float]]) -> dict[str, float]:
    """Of a step's quantiles, against the phases before and after: contexts grow while they are measured, and steps with them."""
    names = ("p50", "p99")
    usual_ms = {name: statistics.fmean(other[f"step_{name}_ms"] for other in alone) for name in names}
    return {name: phase[f"step_{name}_ms"] / usual_ms[name] - 1 for name in names}


class _Streams:
    """The batch, and what is seen of it during a phase."""

    def __init__(self, fleet: Fleet, client: Client, plan: LandingPlan) -> None:
        self._fleet, self._client, self._plan = fleet, client, plan
        self._shape = Shape(plan.prompt_tokens, plan.output_tokens)
        self._served = [Served(self._shape, 0.0) for _ in range(plan.streams)]
        self._decoders = [node.name for node in fleet.of_role("decode", twins=False)]

    def coroutines(self) -> list[Coroutine[Any, Any, Served]]:
        seeds = range(self._plan.seed + 1000, self._plan.seed + 1000 + self._plan.streams)
        return [
            self._client.send(self._shape, self._client.body(self._shape, seed), None, served)
            for seed, served in zip(seeds, self._served, strict=True)
        ]

    async def all_started(self) -> None:
        """Until each has had a few tokens."""
        deadline = time.monotonic() + START_LIMIT_S
        while not all(len(served.events_s) >= 3 for served in self._served):
            failed = next((served.error for served in self._served if served.error), "")
            if failed or time.monotonic() > deadline:
                raise RuntimeError(f"the streams do not start: {failed or 'too slow'}")
            await asyncio.sleep(0.05)

    async def observe(self, seconds: float, beside: Beside | None = None) -> dict[str, float]:
        """What the engines and the clients saw for so long, with something going on beside."""
        async with _going_on(beside):
            begun_s, begun_monotonic = time.perf_counter(), time.monotonic()
            bytes_before = await asyncio.to_thread(self.landed_bytes)
            await asyncio.sleep(seconds)
            landed = await asyncio.to_thread(self.landed_bytes) - bytes_before
            took_s = time.perf_counter() - begun_s
        phase = {"from_s": begun_monotonic, "until_s": time.monotonic(), "landed_gb_s": landed / took_s / 1e9}
        return self._quantiles(begun_monotonic) | self._gaps(begun_s) | phase

    def prices(
        self, alone: list[dict[str, float]], landing: dict[str, dict[str, float]]
    ) -> dict[str, dict[str, float]] | None:
        """None where several nodes decode."""
        if len(self._decoders) > 1:
            return None

        def phase(found: dict[str, float]) -> Phase:
            return Phase(found["from_s"], found["until_s"])

        steps = self._steps(alone[0]["from_s"])
        phases = {name: phase(found) for name, found in landing.items()}
        return prices(steps, [phase(found) for found in alone], phases, self._plan.streams, self._plan.prompt_tokens)

    async def idle_share(self, beside: Beside) -> float | None:
        """Of the decode nodes' GPUs, profiled meanwhile: a phase of its own, for a profiler slows what it looks at."""
        async with _going_on(beside):
            since_s, deadline = time.monotonic(), time.monotonic() + PROFILE_LIMIT_S
            for node in self._decoders:
                self._fleet.signal(node, signal.SIGUSR2)
            while True:
                answers = [event for node in self._decoders for event in self._fleet.events(node, "idle", since_s)]
                if len(answers) == len(self._decoders):
                    break
                if time.monotonic() > deadline:
                    return None
                await asyncio.sleep(0.1)
        shares = [float(event["idle_share"]) for event in answers if "idle_share" in event]
        return statistics.fmean(shares) if shares else None

    def landed_bytes(self) -> float:
        return sum(self._fleet.metric(node, "decant_kv_transfer_bytes_total") for node in self._decoders)

    def _steps(self, since_s: float) -> list[Step]:
        events = [event for node in self._decoders for event in self._fleet.events(node, "step", since_s)]
        return [Step(float(event["at"]), float(event["seconds"]), int(event["running"])) for event in events]

    def _quantiles(self, since_s: float) -> dict[str, float]:
        whole = self._plan.streams // len(self._decoders)
        seconds = [step.seconds for step in self._steps(since_s) if step.running >= whole]
        return {"steps": len(seconds)} | {
            f"step_{name}_ms": quantile(seconds, share) * 1e3 for name, share in (("p50", 0.5), ("p99", 0.99))
        }

    def _gaps(self, since_s: float) -> dict[str, float]:
        gaps = [
            late - early for served in self._served for early, late in pairwise(served.events_s) if early >= since_s
        ]
        return {f"client_itl_{name}_ms": quantile(gaps, share) * 1e3 for name, share in (("p50", 0.5), ("p99", 0.99))}


@asynccontextmanager
async def _going_on(beside: Beside | None) -> AsyncIterator[None]:
    task = asyncio.ensure_future(beside()) if beside else None
    await asyncio.sleep(UNDER_WAY_S)
    try:
        yield
    finally:
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


class _Landings:
    """Prompts that the prefill node knows, asked again until cancelled."""

    def __init__(self, client: Client, plan: LandingPlan) -> None:
        self._client = client
        self._shape = Shape(plan.prompt_tokens, LANDED_TOKENS)
        self._bodies = [client.body(self._shape, plan.seed + index) for index in range(REPEATED_PROMPTS)]

    async def _ask(self, index: int) -> None:
        await self._client.send(self._shape, self._bodies[index % len(self._bodies)])

    async def compute_all(self, landed_bytes: Callable[[], float]) -> float:
        """What the first of each is for. The bytes of KV that one lands."""
        before = await asyncio.to_thread(landed_bytes)
        for index in range(len(self._bodies)):
            await self._ask(index)
        return (await asyncio.to_thread(landed_bytes) - before) / len(self._bodies)

    async def at_once(self, in_flight: int) -> None:
        """Each is followed by the next."""

        async def again(first: int) -> None:
            for index in count(first):
                await self._ask(index)

        await asyncio.gather(*(again(first) for first in range(in_flight)))

    async def at_rate(self, a_second: float) -> None:
        """One at each beat."""
        begun_s = time.perf_counter()
        async with asyncio.TaskGroup() as group:
            for index in count():
                await asyncio.sleep(max(0.0, begun_s + index / a_second - time.perf_counter()))
                group.create_task(self._ask(index))
