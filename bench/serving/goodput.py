"""What of a load was good enough: attainment, goodput and who wins, with confidence intervals over seeds. Pure.

A request is good when it is complete, its first token came within the TTFT limit, and its mean time between tokens is within the
TPOT limit. The goodput of a system is the highest rate at which at least SHARE of the requests are good (DistServe, OSDI 2024),
interpolated between the rates that were offered; beyond the last rate it is unknown, so the last rate is what is claimed.

Must not know: how requests were served.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from bench.serving.open_loop import Served

SHARE = 0.9
# Student's t, two-sided 95 %, by number of samples.
_T = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776, 6: 2.571, 7: 2.447, 8: 2.365, 9: 2.306, 10: 2.262}


@dataclass(frozen=True, slots=True)
class Limits:
    ttft_s: float
    tpot_s: float

    def met(self, served: Served) -> bool:
        return served.complete and served.ttft_s <= self.ttft_s and served.tpot_s <= self.tpot_s


@dataclass(frozen=True, slots=True)
class Interval:
    """A mean and half the width of its 95 % confidence interval (NaN for one sample)."""

    mean: float
    half_width: float

    def overlaps(self, other: Interval) -> bool:
        """True as well where an interval is not known."""
        return not abs(self.mean - other.mean) > self.half_width + other.half_width


def interval(samples: Sequence[float]) -> Interval:
    """Of the mean, by Student's t."""
    mean = statistics.fmean(samples)
    if len(samples) < 2:
        return Interval(mean, math.nan)
    t = _T.get(len(samples), 2.262)
    return Interval(mean, t * statistics.stdev(samples) / math.sqrt(len(samples)))


def attainment(served: Sequence[Served], limits: Limits) -> float:
    """Share of the requests that are good; NaN of none."""
    return sum(map(limits.met, served)) / len(served) if served else math.nan


@dataclass(frozen=True, slots=True)
class LoadPoint:
    """What one system did at one offered rate: requests of each seed, by when they were due."""

    rate: float
    by_seed: Mapping[int, Sequence[Served]]

    def all(self) -> list[Served]:
        return [served for requests in self.by_seed.values() for served in requests]

    def attainment(self, limits: Limits) -> Interval:
        return interval([attainment(requests, limits) for requests in self.by_seed.values() if requests])


def goodput_of_one(shares: Sequence[tuple[float, float]], share: float = SHARE) -> float:
    """The highest rate with attainment of at least `share`, from (rate, attainment) by rising rate; 0 if there is none.

    Only what lies before the first rate that falls below counts: a lucky point behind it proves nothing.
    """
    reached = 0.0
    for rate, attained in shares:
        if not attained >= share:
            break
        reached = rate
    for (low, at_low), (high, at_high) in pairwise(shares):
        if low == reached and at_low >= share > at_high:
            return low + (high - low) * (at_low - share) / (at_low - at_high)
    return reached


def goodput(points: Sequence[LoadPoint], limits: Limits) -> Interval:
    """Requests a second, over the seeds that every point has."""
    ordered = sorted(points, key=lambda point: point.rate)
    seeds = set.intersection(*(set(point.by_seed) for point in ordered)) if ordered else set()
    if not seeds:
        return Interval(math.nan, math.nan)
    return interval(
        [
            goodput_of_one([(point.rate, attainment(point.by_seed[seed], limits)) for point in ordered])
            for seed in sorted(seeds)
        ]
    )


def winner(systems: Mapping[str, Interval]) -> str:
    """The system with the most goodput, or `no difference` when another one's interval overlaps with its."""
    best = max(systems, key=lambda name: systems[name].mean)
    rivals = (name for name in systems if name != best)
    return "no difference" if any(systems[best].overlaps(systems[name]) for name in rivals) else best


def quantile(values: Iterable[float], share: float) -> float:
    """The nearest-rank quantile; NaN of nothing."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else math.nan
