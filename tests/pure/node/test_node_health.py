from __future__ import annotations

from engine.port import EngineStatus
from foundation.metrics import NodeMetrics
from node.engine_feed import EngineFeed
from node.health import EngineProgress, Health


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
    assert progress.observe(steps=5, has_work=True) == "engine_stalled"
    assert progress.observe(steps=6, has_work=True) is None


def test_f14_a_slow_engine_is_no_stalled_one() -> None:
    clock = Clock()
    progress = EngineProgress(clock, limit_s=2.0)
    for step in range(5):
        clock.now += 1.9
        assert progress.observe(steps=step, has_work=True) is None


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
    message = EngineFeed(lambda: status, NodeMetrics()).node_status(("draining",), draining=True, epoch=7)
    assert (message.blocks_free, message.blocks_total, message.ready, message.epoch) == (7, 12, False, 7)


def test_load_changed_is_true_once_a_change() -> None:
    current = EngineStatus(running=1)
    feed = EngineFeed(lambda: current, NodeMetrics())
    assert [feed.load_changed(), feed.load_changed()] == [True, False]
    current = EngineStatus(running=1, waiting=1)
    assert [feed.load_changed(), feed.load_changed()] == [True, False]
