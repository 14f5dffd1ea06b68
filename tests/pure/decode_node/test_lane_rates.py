"""What a decode node tells of its lanes."""

from __future__ import annotations

import pytest

from decode_node.lane_rates import HOLDS_S, MOST_LANES, LaneRates
from foundation.ids import NodeId

P = NodeId("p")


class Clock:
    s = 0.0

    def __call__(self) -> float:
        return self.s


def test_transfers_correct_what_the_self_test_said_and_short_ones_say_nothing() -> None:
    rates = LaneRates(Clock())
    rates.paired(P, 1e9)
    rates.carried(P, 0.0)
    assert rates.current() == {P: 1e9}
    rates.carried(P, 1.25e6)
    assert rates.current()[P] == pytest.approx(2.5e6, rel=0.01), "one slow transfer is enough to be warned"
    for _ in range(10):
        rates.carried(P, 1.25e6)
    assert rates.current()[P] == pytest.approx(1.25e6, rel=0.01)
    rates.paired(P, 2e9)
    assert rates.current() == {P: 2e9}


def test_a_figure_is_forgotten_so_that_a_lane_that_was_slow_is_tried_again() -> None:
    clock = Clock()
    rates = LaneRates(clock)
    rates.carried(P, 1e6)
    clock.s = HOLDS_S - 1
    assert rates.current() == {P: 1e6}
    clock.s = HOLDS_S + 1
    assert rates.current() == {}


def test_what_is_kept_is_bounded() -> None:
    rates = LaneRates(Clock())
    for index in range(2 * MOST_LANES):
        rates.paired(NodeId(f"p{index}"), 1.0)
    assert len(rates.current()) == MOST_LANES
    assert NodeId("p0") not in rates.current()
