"""When a node may be given work: silence, stalls, drains."""

from __future__ import annotations

from router.health import LinkState, NodeHealth, Status


def connected() -> NodeHealth:
    health = NodeHealth(silence_limit_s=2.0)
    health.connected(0.0, step_limit_s=1.0)
    health.reported(Status(ready=True), 0.0)
    return health


def test_a_node_that_has_not_reported_gets_no_work() -> None:
    health = NodeHealth(2.0)
    assert health.refusal(0.0) == "node_connecting"
    health.connected(0.0, 1.0)
    assert health.refusal(0.0) == "node_silent"
    health.reported(Status(ready=True), 0.1)
    assert health.refusal(0.1) is None


def test_silence_makes_a_node_suspect_then_lost() -> None:
    health = connected()
    for now_s, state in (
        (0.9, LinkState.READY),
        (1.0, LinkState.SUSPECT),
        (1.9, LinkState.SUSPECT),
        (2.0, LinkState.LOST),
    ):
        health.tick(now_s)
        assert health.state is state
    assert health.refusal(2.0) == "node_lost"


def test_a_suspect_that_speaks_is_ready_again() -> None:
    health = connected()
    health.tick(1.5)
    health.heard(1.6)
    assert health.state is LinkState.READY


def test_f25_a_node_that_speaks_but_takes_no_step_is_stalled() -> None:
    health = connected()
    for tenth in range(60):
        health.reported(Status(ready=True, has_work=True, engine_steps=5), tenth / 10)
    assert health.state is LinkState.READY
    assert health.stalled(5.9)
    assert health.refusal(5.9) == "node_stalled"
    health.reported(Status(ready=True, has_work=True, engine_steps=6), 6.0)
    assert health.refusal(6.0) is None


def test_a_router_that_was_stopped_blames_no_node_for_it() -> None:
    health = connected()
    health.reported(Status(ready=True, has_work=True, engine_steps=5), 0.0)
    health.not_watched(stopped_s=60.0, spare_s=0.5, now_s=60.4)
    health.tick(60.4)
    assert health.refusal(60.4) is None


def test_a_router_that_is_stopped_again_and_again_still_gives_up_a_silent_node() -> None:
    health, now_s, looks = connected(), 0.0, 0
    while health.state is not LinkState.LOST:
        now_s, looks = now_s + 1.25, looks + 1
        health.not_watched(stopped_s=1.25, spare_s=0.5, now_s=now_s)
        now_s += 0.5
        health.tick(now_s)
        assert looks <= 4, "two seconds of watching are over"
    assert looks == 4


def test_after_a_stop_there_is_time_to_read_what_came_meanwhile() -> None:
    health = connected()
    health.tick(1.9)
    health.not_watched(stopped_s=1.5, spare_s=0.5, now_s=3.4)
    for now_s, state in ((3.8, LinkState.SUSPECT), (3.9, LinkState.LOST)):
        health.tick(now_s)
        assert health.state is state


def test_f14_slow_steps_are_not_a_stall() -> None:
    health = connected()
    for step in range(10):
        health.reported(Status(ready=True, has_work=True, engine_steps=step), 2.5 * step)
        assert not health.stalled(2.5 * step + 2.4)


def test_an_engine_without_work_is_not_stalled() -> None:
    health = connected()
    for second in range(100):
        health.reported(Status(ready=True, has_work=False, engine_steps=5), float(second))
    health.reported(Status(ready=True, has_work=True, engine_steps=5), 100.0)
    assert not health.stalled(102.0)


def test_f25_a_node_that_is_not_ready_but_serves_alone_gets_work() -> None:
    health = connected()
    health.reported(Status(ready=False, serves_alone=True), 0.1)
    assert health.refusal(0.1) is None
    health.reported(Status(ready=False, serves_alone=True, draining=True), 0.2)
    assert health.refusal(0.2) == "node_draining"


def test_how_long_a_node_has_been_refused_counts_from_the_change_of_the_reason() -> None:
    health = connected()
    assert health.refused_for_s(1.0, "node_stalled") == 0
    assert health.refused_for_s(4.0, "node_stalled") == 3
    assert health.refused_for_s(5.0, None) == 0


def test_draining_and_unready_nodes_get_no_work() -> None:
    health = connected()
    health.reported(Status(ready=True, draining=True), 0.1)
    assert health.refusal(0.1) == "node_draining"
    health.reported(Status(ready=False), 0.2)
    assert health.refusal(0.2) == "node_not_ready"
