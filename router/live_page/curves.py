"""Latencies and rates over the last minutes, read once a second from this router's own metrics. Pure; time is an argument.

A percentile is that of the last WINDOW_S, interpolated within its histogram bucket, as Prometheus' histogram_quantile does.

Must not know: nodes, HTTP.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from prometheus_client import Counter, Histogram
from prometheus_client.samples import Sample as PrometheusSample

from foundation.metrics import RouterMetrics

SAMPLES_KEPT = 300
WINDOW_S = 10.0
RATE_SAMPLES = 3
"""A rate is that since so many samples ago: steps end in bursts."""


@dataclass(frozen=True, slots=True)
class _Reading:
    """Counts so far. `ttft` and `itl`: of each bucket, all smaller ones included."""

    at_s: float
    ttft: tuple[float, ...]
    itl: tuple[float, ...]
    tokens: float


@dataclass(frozen=True, slots=True)
class Sample:
    """None where nothing happened within the window."""

    ttft_p50_s: float | None
    ttft_p95_s: float | None
    itl_p50_s: float | None
    itl_p95_s: float | None
    tokens_per_second: float
    kv_bytes_per_second: float | None
    """Between all nodes; None while nobody watches them."""


class Curves:
    def __init__(self, metrics: RouterMetrics) -> None:
        self._metrics = metrics
        self._ttft_bounds = _bounds(metrics.time_to_first_token_seconds)
        self._itl_bounds = _bounds(metrics.inter_token_latency_seconds)
        self._readings: deque[_Reading] = deque()
        self.samples: deque[Sample] = deque(maxlen=SAMPLES_KEPT)

    def sample(self, now_s: float, kv_bytes_per_second: float | None) -> Sample:
        """Call about once a second; the newest of `samples`."""
        now = self._read(now_s)
        self._readings.append(now)
        while len(self._readings) > 2 and self._readings[1].at_s <= now_s - WINDOW_S:
            self._readings.popleft()
        then, before = self._readings[0], self._readings[max(0, len(self._readings) - 1 - RATE_SAMPLES)]
        ttft, itl = _grown(now.ttft, then.ttft), _grown(now.itl, then.itl)
        elapsed_s = now.at_s - before.at_s
        sample = Sample(
            quantile(0.5, self._ttft_bounds, ttft),
            quantile(0.95, self._ttft_bounds, ttft),
            quantile(0.5, self._itl_bounds, itl),
            quantile(0.95, self._itl_bounds, itl),
            (now.tokens - before.tokens) / elapsed_s if elapsed_s > 0 else 0.0,
            kv_bytes_per_second,
        )
        self.samples.append(sample)
        return sample

    def _read(self, now_s: float) -> _Reading:
        metrics = self._metrics
        return _Reading(
            now_s,
            _buckets(metrics.time_to_first_token_seconds),
            _buckets(metrics.inter_token_latency_seconds),
            _total(metrics.generation_tokens_total),
        )


def quantile(q: float, bounds: Sequence[float], cumulative: Sequence[float]) -> float | None:
    """The q-quantile of a histogram. `bounds`: upper bounds, the last one infinite; `cumulative`: counts up to each of them."""
    total = cumulative[-1]
    if total <= 0:
        return None
    wanted, lower, below = q * total, 0.0, 0.0
    for bound, count in zip(bounds, cumulative, strict=True):
        if count >= wanted:
            if bound == float("inf"):
                return lower
            inside = count - below
            return lower + (bound - lower) * ((wanted - below) / inside if inside else 1.0)
        lower, below = bound, count
    return lower


def _bounds(histogram: Histogram) -> tuple[float, ...]:
    return tuple(float(sample.labels["le"]) for sample in _bucket_samples(histogram))


def _buckets(histogram: Histogram) -> tuple[float, ...]:
    return tuple(sample.value for sample in _bucket_samples(histogram))


def _bucket_samples(histogram: Histogram) -> list[PrometheusSample]:
    (family,) = histogram.collect()
    return [sample for sample in family.samples if sample.name.endswith("_bucket")]


def _total(counter: Counter) -> float:
    (family,) = counter.collect()
    return float(family.samples[0].value)


def _grown(now: Sequence[float], then: Sequence[float]) -> list[float]:
    return [after - before for after, before in zip(now, then, strict=True)]
