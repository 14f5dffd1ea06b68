"""Percentiles and rates of the live page, from histograms that only grow."""

from __future__ import annotations

import pytest

from foundation.metrics import RouterMetrics
from router.live_page.curves import SAMPLES_KEPT, WINDOW_S, Curves, quantile

INFINITE = float("inf")


@pytest.mark.parametrize(
    ("q", "cumulative", "expected"),
    [
        (0.5, [0, 0, 0], None),
        (0.5, [10, 10, 10], 0.5),
        (0.5, [0, 10, 10], 1.5),
        (0.95, [0, 100, 100], 1.95),
        (0.5, [5, 10, 10], 1.0),
        (0.99, [0, 0, 10], 2.0),
    ],
)
def test_a_quantile_is_interpolated_within_its_bucket(
    q: float, cumulative: list[float], expected: float | None
) -> None:
    assert quantile(q, [1.0, 2.0, INFINITE], cumulative) == expected


def test_a_percentile_is_of_the_window_and_not_of_all_time() -> None:
    metrics = RouterMetrics()
    curves = Curves(metrics)
    curves.sample(0.0, None)
    for _ in range(1000):
        metrics.time_to_first_token_seconds.observe(9.0)
    slow = curves.sample(1.0, None)
    assert slow.ttft_p50_s is not None
    assert 5 < slow.ttft_p50_s < 10
    for second in range(2, 3 + int(WINDOW_S)):
        curves.sample(float(second), None)
    metrics.time_to_first_token_seconds.observe(0.03)
    fast = curves.sample(3 + WINDOW_S, None)
    assert fast.ttft_p95_s is not None
    assert fast.ttft_p95_s < 0.05


def test_nothing_within_the_window_is_a_gap() -> None:
    sample = Curves(RouterMetrics()).sample(5.0, None)
    assert (sample.ttft_p50_s, sample.itl_p95_s, sample.kv_bytes_per_second) == (None, None, None)
    assert sample.tokens_per_second == 0


def test_tokens_a_second_are_those_of_the_last_samples() -> None:
    metrics = RouterMetrics()
    curves = Curves(metrics)
    metrics.generation_tokens_total.inc(1000)
    curves.sample(0.0, None)
    metrics.generation_tokens_total.inc(60)
    assert curves.sample(2.0, 5.0).tokens_per_second == 30


def test_what_is_kept_is_bounded() -> None:
    curves = Curves(RouterMetrics())
    for second in range(SAMPLES_KEPT + 50):
        curves.sample(float(second), None)
    assert len(curves.samples) == SAMPLES_KEPT
    assert len(curves._readings) <= WINDOW_S + 2
