from __future__ import annotations

import pytest

from engine.port import EngineStatus
from foundation.health import Health, Problem
from foundation.ids import NodeId
from foundation.metrics import NodeMetrics
from node.engine_feed import EngineFeed
from node.health import LANE_REMEMBERED_S, EngineProgress, LaneHealth, serves_alone


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_a_problem_says_since_when_and_starts_anew_after_it_was_gone() -> None:
    clock, found = Clock(), ["data_port_blocked"]
    health = Health(clock)
    health.add(lambda: found[0] if found else None)
    health.problems()
    clock.now += 3
    assert [(problem.name, problem.since_s) for problem in health.problems()] == [("data_port_blocked", 3.0)]
    found.clear()
    assert health.problems() == ()
    clock.now += 5
    found.append("data_port_blocked")
    assert [problem.since_s for problem in health.problems()] == [0.0]


def test_every_problem_is_named_not_only_the_first() -> None:
    health = Health(Clock())
    health.add(lambda: "draining")
    health.add(lambda: "engine_stalled")
    assert [problem.name for problem in health.problems()] == ["draining", "engine_stalled"]


def test_f25_an_engine_that_has_work_and_makes_no_step_is_stalled_after_the_limit() -> None:
    clock = Clock()
    progress = EngineProgress(clock, limit_s=2.0)
    assert progress.observe(steps=5, has_work=True) is None
    clock.now += 2.1
    problem = progress.observe(steps=5, has_work=True)
    assert problem is not None
    assert (problem.name, problem.detail) == ("engine_stalled", "no step after step 5")
    assert problem.since_s == pytest.approx(2.1)
    assert progress.observe(steps=6, has_work=True) is None


def test_f14_a_slow_engine_is_no_stalled_one() -> None:
    clock = Clock()
    progress = EngineProgress(clock, limit_s=2.0)
    for step in range(5):
        clock.now += 1.9
        assert progress.observe(steps=step, has_work=True) is None


def lane_health(clock: Clock, floor: float = 0.0) -> LaneHealth:
    return LaneHealth(clock, floor)


P0, P1 = NodeId("p0"), NodeId("p1")


def test_f25_a_data_plane_over_which_nothing_comes_is_named_with_its_peer_and_age() -> None:
    clock = Clock()
    lanes = lane_health(clock)
    lanes.ended(P0, "transfer_stalled", 2.0)
    assert lanes.check() is None, "once is no pattern"
    clock.now += 3
    lanes.ended(P0, "transfer_stalled", 2.0)
    clock.now += 1.5
    assert lanes.broken() == {P0: "transfer_stalled"}
    problem = lanes.check()
    assert problem is not None
    assert (problem.name, problem.since_s, problem.detail) == ("data_plane", 1.5, "p0: transfer_stalled")
    assert serves_alone([problem])
    assert not serves_alone([problem, Problem("draining", 0.0)])
    assert not serves_alone([])


def test_f25_a_broken_lane_rests_longer_each_time_and_one_success_mends_it() -> None:
    clock = Clock()
    lanes = lane_health(clock)
    rests = []
    for _ in range(8):
        clock.now += 5
        lanes.ended(P0, "dial_timeout", 5.0)
        begun = clock.now
        while lanes.broken():
            clock.now += 1
        rests.append(clock.now - begun)
    assert rests == [0, 2, 4, 8, 16, 30, 30, 30]
    lanes.committed(P0)
    lanes.ended(P0, "dial_timeout", 5.0)
    assert lanes.broken() == {}


def test_transfers_that_fail_together_are_one_failure_of_their_lane() -> None:
    clock = Clock()
    lanes = lane_health(clock)
    for _ in range(20):
        lanes.ended(P0, "transfer_stalled", 2.0)
    clock.now += 1
    lanes.ended(P0, "transfer_stalled", 3.0)
    assert lanes.broken() == {}, "that one was under way with them"
    lanes.ended(P0, "transfer_stalled", 0.9)
    assert set(lanes.broken()) == {P0}


def test_a_broken_lane_beside_one_that_works_is_no_problem_of_the_node() -> None:
    lanes = lane_health(Clock())
    lanes.committed(P1)
    for _ in range(2):
        lanes.ended(P0, "self_test_timeout", 0.0)
    assert set(lanes.broken()) == {P0}
    assert lanes.check() is None


def test_f25_a_lane_that_worked_long_ago_does_not_hide_that_none_works_now() -> None:
    clock = Clock()
    lanes = lane_health(clock)
    lanes.committed(P1)
    clock.now += LANE_REMEMBERED_S
    for _ in range(2):
        lanes.ended(P0, "self_test_timeout", 0.0)
    problem = lanes.check()
    assert problem is not None, "p1 may be gone for good"
    assert problem.detail == "p0: self_test_timeout"


def test_what_a_peer_is_to_blame_for_breaks_no_lane() -> None:
    lanes = lane_health(Clock())
    for reason in ("prefill_stalled", "silent", "refused", "peer_closed", "endpoint_failed", "bad_digest", "cancelled"):
        lanes.ended(P0, reason, 0.0)
        lanes.ended(P0, reason, 0.0)
    assert lanes.broken() == {}


def test_f26_a_lane_below_the_floor_is_named_with_both_figures_until_it_is_measured_anew() -> None:
    clock = Clock()
    lanes = lane_health(clock, floor=10e9)
    lanes.measured(P0, 0.5e9)
    problem = lanes.check()
    assert problem is not None
    assert problem.detail == "p0: lane_too_slow: 0.5 GB/s, less than 10"
    lanes.committed(P0)
    assert lanes.check() is not None, "that something crossed it does not make it faster"
    clock.now += 91
    lanes.measured(P0, 12e9)
    assert lanes.check() is None


def test_an_idle_engine_is_never_stalled() -> None:
    clock = Clock()
    progress = EngineProgress(clock, limit_s=2.0)
    progress.observe(steps=5, has_work=False)
    clock.now += 1000
    assert progress.observe(steps=5, has_work=False) is None
    assert progress.observe(steps=5, has_work=True) is None


def test_the_feed_counts_each_step_and_each_skip_once() -> None:
    statuses = [
        EngineStatus(steps=1, step_tokens=8, skips={"no_free_blocks": 2}),
        EngineStatus(steps=1, step_tokens=8, skips={"no_free_blocks": 2}),
        EngineStatus(steps=4, step_tokens=32, skips={"no_free_blocks": 5}),
    ]
    metrics = NodeMetrics()
    feed = EngineFeed(lambda: statuses[0], metrics)
    while statuses:
        feed.after_step()
        statuses.pop(0)
    text = metrics.exposition().decode()
    assert "decant_step_tokens_count 4.0" in text
    assert "decant_step_tokens_sum 32.0" in text
    assert 'decant_scheduler_skips_total{reason="no_free_blocks"} 5.0' in text


def test_cached_blocks_that_nobody_uses_count_as_free_for_routers() -> None:
    status = EngineStatus(blocks_free=3, blocks_cached=4, blocks_in_use=5, blocks_total=12)
    problems = [Problem("draining", 1.0)]
    message = EngineFeed(lambda: status, NodeMetrics()).node_status(problems, draining=True, epoch=7)
    assert (message.blocks_free, message.blocks_total, message.ready, message.epoch) == (7, 12, False, 7)


def test_load_changed_is_true_once_a_change() -> None:
    current = EngineStatus(running=1)
    feed = EngineFeed(lambda: current, NodeMetrics())
    assert [feed.load_changed(), feed.load_changed()] == [True, False]
    current = EngineStatus(running=1, waiting=1)
    assert [feed.load_changed(), feed.load_changed()] == [True, False]
