"""What graphs gave over a load, in words: hits, fallbacks, padding, and the time that they saved against eager steps. Pure.

A high hit rate alone says nothing: a graph saves the host's launches, which cost nothing where the GPU is busy longer than the
host takes to launch, and padding costs GPU time. So each mode and bucket is set against what warm-up measured for the same step,
run eagerly.

Must not know: torch, how anything is captured.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from engine.graphs.select import Costs, GraphStatistics, Mode, interpolated

WORTH_HAVING = 0.05
"""Of the load's time: less than this is no gain."""
HIGH_HIT_RATE = 0.8
MUCH_PADDING = 0.15


@dataclass(frozen=True, slots=True)
class BucketGain:
    """One mode and bucket: how often it ran, what one run costs, and what an eager run of as many tokens would."""

    mode: Mode
    bucket: int
    steps: int
    seconds: float
    eager_seconds: float

    @property
    def saved_s(self) -> float:
        return self.steps * (self.eager_seconds - self.seconds)


def gains(statistics: GraphStatistics, costs: Costs) -> list[BucketGain]:
    """Of the captured modes, by mode and rising bucket."""
    found = []
    for (mode, bucket), steps in sorted(statistics.steps.items(), key=lambda item: (item[0][0].value, item[0][1])):
        if mode is Mode.FULL:
            found.append(BucketGain(mode, bucket, steps, costs.full[bucket], interpolated(costs.eager_decode, bucket)))
        elif mode is Mode.PIECEWISE:
            found.append(BucketGain(mode, bucket, steps, costs.piecewise[bucket], interpolated(costs.eager, bucket)))
    return found


def explain(statistics: GraphStatistics, costs: Costs, load_s: float) -> Iterator[str]:
    """Lines for people. `load_s`: the wall time of the load that was counted."""
    steps = statistics.steps.total()
    if not steps:
        yield "no step was counted"
        return
    found = gains(statistics, costs)
    hits = sum(gain.steps for gain in found)
    saved_s = sum(gain.saved_s for gain in found)
    padding = statistics.padded_tokens / max(1, statistics.tokens + statistics.padded_tokens)
    yield f"{steps} steps in {load_s:.2f} s: {hits / steps:.0%} as graphs, {padding:.0%} of their rows padding"
    yield f"{'mode':<10}{'bucket':>7}{'steps':>7}{'ms':>8}{'eager ms':>10}{'saved ms':>10}"
    for gain in found:
        yield (
            f"{gain.mode.value:<10}{gain.bucket:>7}{gain.steps:>7}{gain.seconds * 1e3:>8.2f}"
            f"{gain.eager_seconds * 1e3:>10.2f}{gain.saved_s * 1e3:>10.1f}"
        )
    for reason, count in statistics.fallbacks.most_common():
        yield f"not a full graph, {reason.value}: {count} steps"
    yield from _verdict(hits / steps, saved_s / load_s if load_s else 0.0, padding, found)


def _verdict(hit_rate: float, saved: float, padding: float, found: list[BucketGain]) -> Iterator[str]:
    yield f"saved against eager steps: {saved:.1%} of the load's time"
    if hit_rate < HIGH_HIT_RATE or saved >= WORTH_HAVING:
        return
    if padding > MUCH_PADDING:
        yield "a high hit rate without gain: padded rows cost what launches save; buckets nearer to the steps would help"
    busiest = max(found, key=lambda gain: gain.steps)
    if busiest.seconds >= 0.95 * busiest.eager_seconds:
        yield (
            f"a high hit rate without gain: at {busiest.bucket} tokens the GPU computes for {busiest.seconds * 1e3:.1f} ms, "
            "longer than the host takes to launch an eager step, so there are no gaps to close"
        )
