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


def test_one_parcel_says_nothing() -> None:
    assert rate_of((1.0, MIB)) == 0.0


def test_a_slow_lane_is_as_slow_as_its_parcels_follow_each_other() -> None:
    assert rate_of(*((0.8 * index, MIB) for index in range(12))) == pytest.approx(MIB / 0.8)


def test_what_p_needs_to_compute_between_chunks_does_not_make_the_lane_slow() -> None:
    chunks = [(start + 0.01 * index, MIB) for start in (0.0, 5.0, 10.0) for index in range(4)]
    assert rate_of(*chunks) == pytest.approx(MIB / 0.01)


def test_parcels_that_a_busy_loop_notices_at_once_are_counted_with_the_time_they_took() -> None:
    burst = [(0.0, MIB), *((0.1, MIB) for _ in range(10)), (0.2, MIB)]
    assert rate_of(*burst) <= 11 * MIB / 0.1
