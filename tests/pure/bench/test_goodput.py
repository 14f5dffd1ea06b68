"""What counts as good, how goodput is found between offered rates, and when somebody wins."""

from __future__ import annotations

import math

import pytest

from bench.serving.goodput import Interval, Limits, LoadPoint, attainment, goodput, goodput_of_one, interval, winner
from bench.serving.open_loop import Served
from bench.serving.workload import Shape

LIMITS = Limits(ttft_s=0.5, tpot_s=0.02)


def served(ttft_s: float = 0.1, tpot_s: float = 0.01, tokens: int = 11, error: str = "") -> Served:
    events = [5.0 + ttft_s + tpot_s * index for index in range(tokens)]
    return Served(Shape(100, 11), 5.0, events, tokens, error)


def test_a_request_is_good_when_it_is_complete_and_within_both_limits() -> None:
    assert LIMITS.met(served())
    assert not LIMITS.met(served(ttft_s=0.51))
    assert not LIMITS.met(served(tpot_s=0.021))
    assert not LIMITS.met(served(tokens=10))
    assert not LIMITS.met(served(error="500: broken"))
    assert not LIMITS.met(Served(Shape(100, 11), 5.0))


def test_a_gap_counts_in_the_mean_time_between_tokens() -> None:
    stalled = served()
    stalled.events_s[-1] += 0.2
    assert stalled.tpot_s == pytest.approx(0.03)
    assert stalled.longest_gap_s == pytest.approx(0.21)
    assert not LIMITS.met(stalled)


def test_attainment_is_the_share_of_good_requests() -> None:
    assert attainment([served(), served(ttft_s=9.0), served(), served()], LIMITS) == 0.75
    assert math.isnan(attainment([], LIMITS))


def test_goodput_lies_where_attainment_crosses_its_share() -> None:
    assert goodput_of_one([(10, 1.0), (20, 0.95), (30, 0.85)]) == pytest.approx(25)
    assert goodput_of_one([(10, 1.0), (20, 0.95)]) == 20, "beyond the last rate nothing is claimed"
    assert goodput_of_one([(10, 0.5), (20, 0.4)]) == 0


def test_a_lucky_point_behind_a_failed_one_proves_nothing() -> None:
    assert goodput_of_one([(10, 1.0), (20, 0.5), (30, 1.0)]) == pytest.approx(12)


def test_a_window_without_requests_is_not_attained() -> None:
    assert goodput_of_one([(10, 1.0), (20, math.nan), (30, 1.0)]) == 10


def test_goodput_is_an_interval_over_seeds() -> None:
    good, bad = [served()] * 10, [served(tpot_s=0.03)] * 10
    points = [
        LoadPoint(20.0, {1: good, 2: good, 3: bad}),
        LoadPoint(10.0, {1: good, 2: good, 3: good}),
    ]
    found = goodput(points, LIMITS)
    assert found.mean == pytest.approx((20 + 20 + 11) / 3)
    assert found.half_width > 5
    assert goodput([LoadPoint(10.0, {1: good})], LIMITS).mean == 10


def test_the_interval_of_three_samples_is_students() -> None:
    found = interval([1.0, 2.0, 3.0])
    assert found.mean == 2.0
    assert found.half_width == pytest.approx(4.303 / math.sqrt(3), rel=1e-3)
    assert math.isnan(interval([1.0]).half_width)


def test_nobody_wins_where_intervals_overlap_or_are_not_known() -> None:
    assert winner({"a": Interval(10, 1), "b": Interval(14, 1)}) == "b"
    assert winner({"a": Interval(10, 2), "b": Interval(13, 2)}) == "no difference"
    assert winner({"a": Interval(10, math.nan), "b": Interval(30, 1)}) == "no difference"
