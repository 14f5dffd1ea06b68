"""What counts as good, how goodput is found between offered rates, and when somebody wins."""

from __future__ import annotations

import math

import pytest

from bench.serving.goodput import Goodput, Limits, LoadPoint, Outcome, attainment, crossing, goodput, interval, winner
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
    assert crossing([(10, 1.0), (20, 0.95), (30, 0.85)]) == pytest.approx(25)
    assert crossing([(10, 1.0), (20, 0.95)]) == 20, "beyond the last rate nothing is claimed"
    assert crossing([(10, 0.8), (20, 0.4)]) == pytest.approx(5), "at no load all would be good"


def test_a_lucky_point_behind_a_failed_one_proves_nothing() -> None:
    assert crossing([(10, 1.0), (20, 0.5), (30, 1.0)]) == pytest.approx(12)


def test_a_rate_without_requests_is_not_attained() -> None:
    assert crossing([(10, 1.0), (20, math.nan), (30, 1.0)]) == 10


def test_goodput_lies_between_a_rate_that_was_served_well_and_one_that_was_not() -> None:
    found = goodput([Outcome(30.0, 100, 300), Outcome(20.0, 200, 200), Outcome(10.0, 100, 100)])
    assert (found.low, found.high) == (20, 30)
    assert found.rate == pytest.approx(20 + 10 * 0.1 / (1 - 1 / 3))


def test_few_requests_near_the_share_leave_goodput_open() -> None:
    few = goodput([Outcome(10.0, 20, 20), Outcome(20.0, 19, 20), Outcome(30.0, 2, 20)])
    many = goodput([Outcome(10.0, 2000, 2000), Outcome(20.0, 1900, 2000), Outcome(30.0, 200, 2000)])
    assert (few.low, few.high) == (10, 30)
    assert (many.low, many.high) == (20, 30)


def test_a_system_that_fails_nowhere_has_no_upper_bound_and_one_that_fails_at_once_no_lower() -> None:
    assert goodput([Outcome(10.0, 20, 20), Outcome(20.0, 20, 20)]) == Goodput(20, 20, None)
    assert goodput([Outcome(10.0, 2, 20), Outcome(20.0, 0, 20)]).low == 0


def test_outcomes_count_the_requests_of_all_seeds() -> None:
    point = LoadPoint(10.0, {1: [served()] * 3, 2: [served(), served(tpot_s=0.03)]})
    assert point.outcome(LIMITS) == Outcome(10.0, 4, 5)


def test_the_interval_of_three_samples_is_students() -> None:
    found = interval([1.0, 2.0, 3.0])
    assert found.mean == 2.0
    assert found.half_width == pytest.approx(4.303 / math.sqrt(3), rel=1e-3)
    assert math.isnan(interval([1.0]).half_width)


def test_who_served_well_what_the_other_did_not_wins() -> None:
    slow, fast = Goodput(12, 10, 15), Goodput(16, 15, 20)
    assert winner({"a": slow, "b": fast}) == "b"
    assert winner({"a": slow, "b": Goodput(14, 10, 15)}) == "no difference"
    assert winner({"a": Goodput(20, 20, None), "b": Goodput(20, 20, None)}) == "no difference"
    assert winner({"a": Goodput(20, 20, None), "b": slow}) == "a"
