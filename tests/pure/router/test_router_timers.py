"""The timers of one request: each acts once, none after the end, and one that fails ends its own request only."""

from __future__ import annotations

import asyncio
from typing import NoReturn

from router.timers import RequestTimers, TimerEnds

LONG_S = 1000.0


class Acts:
    """What timers did, by name."""

    def __init__(self) -> None:
        self.done: list[str] = []
        self.now_s = 50.0
        self.ends = TimerEnds(
            deadline_passed=lambda: self.done.append("deadline"),
            patience_over=lambda: self.done.append("patience"),
            look_again=lambda: self.done.append("look"),
            failed=lambda: self.done.append("failed"),
        )

    def timers(self, deadline_s: float = LONG_S) -> RequestTimers:
        return RequestTimers("r1", deadline_s, lambda: self.now_s, self.ends)


async def everything_due_has_run() -> None:
    """What is due now is due before this."""
    due = asyncio.get_running_loop().create_future()
    asyncio.get_running_loop().call_later(0.01, due.set_result, None)
    await due


async def test_each_timer_acts_once() -> None:
    acts = Acts()
    timers = acts.timers(0)
    timers.wait_at_most(0)
    timers.look_again(0)
    timers.soon(lambda: acts.done.append("soon"))
    assert acts.done == []
    await everything_due_has_run()
    assert sorted(acts.done) == ["deadline", "look", "patience", "soon"]
    timers.stop()


async def test_what_is_left_until_the_deadline_is_counted_by_the_clock_that_was_given() -> None:
    acts = Acts()
    timers = acts.timers(30)
    acts.now_s += 12
    assert timers.remaining_s == 18
    acts.now_s += 20
    assert timers.remaining_s == -2
    timers.stop()


async def test_patience_is_counted_from_the_first_time_without_a_place_until_there_is_one() -> None:
    acts = Acts()
    timers = acts.timers()
    timers.wait_at_most(0)
    timers.wait_at_most(LONG_S)
    await everything_due_has_run()
    assert acts.done == ["patience"]
    timers.wait_no_more()
    timers.wait_at_most(LONG_S)
    await everything_due_has_run()
    timers.wait_no_more()
    timers.wait_at_most(0)
    await everything_due_has_run()
    assert acts.done == ["patience", "patience"]
    timers.stop()


async def test_a_look_takes_the_place_of_the_one_before_or_is_given_up() -> None:
    acts = Acts()
    timers = acts.timers()
    timers.look_again(0)
    timers.look_again(0)
    await everything_due_has_run()
    assert acts.done == ["look"]
    timers.look_again(0)
    timers.look_no_more()
    await everything_due_has_run()
    assert acts.done == ["look"]
    timers.stop()


async def test_nothing_is_waited_for_once_they_were_stopped() -> None:
    acts = Acts()
    timers = acts.timers(0)
    timers.wait_at_most(0)
    timers.look_again(0)
    assert not timers.stopped
    timers.stop()
    assert timers.stopped
    await everything_due_has_run()
    assert acts.done == []


async def test_f28_a_timer_that_fails_fails_its_own_request_and_stops_no_other() -> None:
    def planted() -> NoReturn:
        raise RuntimeError("planted")

    acts, others = Acts(), Acts()
    timers, other = acts.timers(), others.timers(0)
    timers.soon(planted)
    timers.look_again(0)
    await everything_due_has_run()
    assert sorted(acts.done) == ["failed", "look"]
    assert others.done == ["deadline"]
    timers.stop()
    other.stop()
