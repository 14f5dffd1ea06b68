"""What landings say of a lane."""

from __future__ import annotations

import pytest

from kv_transfer.landing_rate import LandingRate

MIB = 1 << 20


def rate_of(*landings: tuple[float, int]) -> float:
    rate = LandingRate()
    for at_s, payload_bytes in landings:
        rate.landed(payload_bytes, at_s)
    return rate.bytes_per_second


def test_a_few_parcels_say_nothing() -> None:
    assert rate_of(*((float(index), MIB) for index in range(3))) == 0.0


def test_a_slow_lane_is_as_slow_as_its_parcels_follow_each_other() -> None:
    assert rate_of(*((0.8 * index, MIB) for index in range(12))) == pytest.approx(MIB / 0.8)


def test_what_p_needs_to_compute_between_chunks_does_not_make_the_lane_slow() -> None:
    chunks = [(start + 0.01 * index, MIB) for start in (0.0, 5.0, 10.0) for index in range(4)]
    assert rate_of(*chunks) == pytest.approx(MIB / 0.01)


def test_two_parcels_that_a_busy_loop_notices_together_do_not_make_the_lane_fast() -> None:
    landings = [0.0, 0.8, 2.4, 2.403, 3.2, 4.0, 4.8]
    assert rate_of(*((at_s, MIB) for at_s in landings)) < 2 * MIB / 0.8


def test_early_layers_do_not_make_a_lane_as_slow_as_the_computing() -> None:
    rate = LandingRate()
    for chunk in range(3):
        for group in range(4):
            rate.landed(MIB, chunk + 0.25 * group, early=group < 3)
    assert rate.bytes_per_second == 0.0
    for index in range(4):
        rate.landed(MIB, 3.0 + 0.01 * index)
    assert rate.bytes_per_second == pytest.approx(MIB / 0.01)


def test_a_lane_that_lags_behind_the_computing_is_measured_with_early_layers_as_well() -> None:
    rate = LandingRate()
    for index in range(4):
        rate.landed(MIB, 0.8 * index, early=index == 0)
    assert rate.bytes_per_second == pytest.approx(MIB / 0.8)
