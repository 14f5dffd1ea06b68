"""What of a load was good enough: attainment, goodput and who wins, with 95 % intervals. Pure.

A request is good when it is complete, its first token came within the TTFT limit, and its mean time between tokens is within the
TPOT limit. Attainment is the share of good requests; its interval is Student's, over seeds. The goodput of a system is the
highest rate at which at least SHARE of the requests are good (DistServe, OSDI 2024). What is known of it is that it lies between
two rates that were offered: `low` was served well, `high` was not. Both are taken at the safe ends of 95 % of the resamples
(bootstrap of each rate's requests; good or not is all that counts of one, so that is a binomial draw a rate). `rate` is
interpolated between attainments, for reading.

Must not know: how requests were served.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from bench.serving.open_loop import Served

SHARE = 0.9
RESAMPLES = 4000
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

    def outcome(self, limits: Limits) -> Outcome:
        requests = self.all()
        return Outcome(self.rate, sum(map(limits.met, requests)), len(requests))

    def attainment(self, limits: Limits) -> Interval:
        return interval([attainment(requests, limits) for requests in self.by_seed.values() if requests])


@dataclass(frozen=True, slots=True)
class Outcome:
    """How many of the requests at one rate were good."""

    rate: float
    good: int
    total: int


@dataclass(frozen=True, slots=True)
class Goodput:
    """Requests a second. `high` None: the last rate that was offered was served well, too."""

    rate: float
    low: float
    high: float | None


def crossing(shares: Sequence[tuple[float, float]], share: float = SHARE) -> float:
    """The highest rate with attainment of at least `share`, from (rate, attainment) by rising rate.

    Only what lies before the first rate that falls below counts: a lucky point behind it proves nothing.
    """
    before = (0.0, 1.0)
    for rate, attained in shares:
        if not attained >= share:
            low, at_low = before
            return low + (rate - low) * (at_low - share) / (at_low - attained) if attained < share else low
        before = rate, attained
    return before[0]


def goodput(outcomes: Sequence[Outcome]) -> Goodput:
    """From the outcomes at all rates, each with at least one request."""
    ordered = sorted(outcomes, key=lambda outcome: outcome.rate)
    rates, totals = [outcome.rate for outcome in ordered], np.array([outcome.total for outcome in ordered])
    shares = np.array([outcome.good for outcome in ordered]) / totals
    drawn = np.random.default_rng(0).binomial(totals, shares, (RESAMPLES, len(ordered))) / totals
    first_failing = np.sort(np.logical_and.accumulate(drawn >= SHARE, axis=1).sum(axis=1))
    steps = [0.0, *rates, None]
    low, high = (int(first_failing[int(place * (RESAMPLES - 1))]) for place in (0.025, 0.975))
    return Goodput(crossing(list(zip(rates, shares.tolist(), strict=True))), steps[low] or 0.0, steps[high + 1])


def winner(systems: Mapping[str, Goodput]) -> str:
    """The system that served a rate well which no other one did, or `no difference`."""
    best = max(systems, key=lambda name: systems[name].low)
    highs = [found.high for name, found in systems.items() if name != best]
    return best if all(high is not None and high <= systems[best].low for high in highs) else "no difference"


def quantile(values: Iterable[float], share: float) -> float:
    """The nearest-rank quantile; NaN of nothing."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else math.nan
