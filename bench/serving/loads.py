"""Open-loop loads at rising rates: what each arrangement serves of them in time.

At each rate requests arrive without a pause: first some that warm up and do not count, then one window for each seed. Requests
belong to the window in which they were due. The next rate follows at once, so that no window but the last sees the load end;
where a rate is too much, what it leaves behind falls on higher ones, which are too much as well.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

from bench.serving.fleet import Arrangement, Fleet
from bench.serving.goodput import Goodput, Interval, Limits, LoadPoint, Outcome, goodput, quantile, winner
from bench.serving.open_loop import Client, Served, run_arrivals
from bench.serving.workload import Arrival, Lengths, poisson_arrivals

DRAIN_S = 8.0


@dataclass(frozen=True, slots=True)
class LoadPlan:
    lengths: Lengths
    rates: tuple[float, ...]
    seeds: tuple[int, ...]
    warm_s: float
    window_s: float

    @property
    def seconds(self) -> float:
        return len(self.rates) * (self.warm_s + len(self.seeds) * self.window_s) + DRAIN_S


async def run_load(fleet: Fleet, client: Client, arrangement: Arrangement, plan: LoadPlan) -> list[LoadPoint]:
    fleet.arrange(arrangement)
    arrivals, owners = schedule(plan)
    served = await run_arrivals(client, arrivals, DRAIN_S)
    by_rate: dict[float, dict[int, list[Served]]] = {rate: {seed: [] for seed in plan.seeds} for rate in plan.rates}
    for record, owner in zip(served, owners, strict=True):
        if owner is not None:
            rate, seed = owner
            by_rate[rate][seed].append(record)
    return [LoadPoint(rate, seeds) for rate, seeds in by_rate.items()]


def schedule(plan: LoadPlan) -> tuple[list[Arrival], list[tuple[float, int] | None]]:
    """All arrivals by time, and for each the (rate, seed) whose window it is in; None: it only warms up."""
    arrivals: list[Arrival] = []
    owners: list[tuple[float, int] | None] = []
    at_s = 0.0
    for number, rate in enumerate(plan.rates):
        windows: list[tuple[int, float, tuple[float, int] | None]] = [(9_000 + number, plan.warm_s, None)]
        windows += [(1_000 * seed + number, plan.window_s, (rate, seed)) for seed in plan.seeds]
        for seed, seconds, owner in windows:
            arrived = poisson_arrivals(rate, seconds, plan.lengths, seed, at_s)
            arrivals += arrived
            owners += [owner] * len(arrived)
            at_s += seconds
    return arrivals, owners


def describe_point(point: LoadPoint, ttft_limit_s: float, tpot_limits_s: Sequence[float]) -> dict[str, Any]:
    requests = point.all()
    complete = [served for served in requests if served.complete]
    gaps = [late - early for served in complete for early, late in pairwise(served.events_s)]
    errors = sorted({served.error for served in requests if served.error})
    return {
        "rate": point.rate,
        "requests": len(requests),
        "errors": sum(not served.complete for served in requests),
        "error_examples": errors[:3],
        "ttft_ms": _quantiles([served.ttft_s for served in complete]),
        "tpot_ms": _quantiles([served.tpot_s for served in complete]),
        "gap_ms": _quantiles(gaps),
        "attainment": {
            f"{limit * 1e3:g}": _as_pair(point.attainment(Limits(ttft_limit_s, limit))) for limit in tpot_limits_s
        },
    }


def goodput_map(
    points: dict[Arrangement, list[LoadPoint]], ttft_limit_s: float, tpot_limits_s: Sequence[float]
) -> dict[str, Any]:
    """For each TPOT limit: each system's goodput with its 95 % interval, and who wins."""
    return {
        f"{limit * 1e3:g}": map_row(
            {
                arrangement.value: [point.outcome(Limits(ttft_limit_s, limit)) for point in found if point.all()]
                for arrangement, found in points.items()
            }
        )
        for limit in tpot_limits_s
    }


def map_row(outcomes: Mapping[str, Sequence[Outcome]]) -> dict[str, Any]:
    systems: dict[str, Goodput] = {name: goodput(found) for name, found in outcomes.items()}
    return {name: asdict(found) for name, found in systems.items()} | {"winner": winner(systems)}


def _as_pair(value: Interval) -> dict[str, float]:
    return {"mean": value.mean, "half_width_95": value.half_width}


def _quantiles(seconds: list[float]) -> dict[str, float]:
    return {name: quantile(seconds, share) * 1e3 for name, share in (("p50", 0.5), ("p90", 0.9), ("p99", 0.99))}
