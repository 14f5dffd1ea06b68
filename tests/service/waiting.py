"""Limits on a machine that keeps its processes waiting.

A limit says how long something may take. What is not counted is time in which nobody ran: where the test, or the process that
it asks, was kept from the processor, one look takes long, and at most `LONGEST_LOOK_S` of it counts.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

Result = TypeVar("Result")

TIMES_ARE_TOLD = os.environ.get("DECANT_TIMES") == "told"
"""On a machine that others use at the same time, how long a failure takes to be noticed is told and not judged."""
LONGEST_LOOK_S = 0.1
MOST_PAUSED_S = 20.0
"""So long beyond its limit a wait goes on, however little of it counted."""


class Patience:
    """Until a limit is over, with time counted as above."""

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._begun_s = self._last_s = time.monotonic()
        self._counted_s = 0.0

    def lasts(self) -> bool:
        """Ask once a look."""
        now_s = time.monotonic()
        self._counted_s += min(now_s - self._last_s, LONGEST_LOOK_S)
        self._last_s = now_s
        return self._counted_s < self._limit_s and now_s - self._begun_s < self._limit_s + MOST_PAUSED_S


async def until(condition: Callable[[], Any], limit_s: float = 15.0) -> None:
    """Waits for a condition of this process; fails when it does not come true in time."""
    patience = Patience(limit_s)
    while not condition():
        assert patience.lasts(), f"not within {limit_s} s: {condition}"
        await asyncio.sleep(0.002)


async def eventually(fact: Callable[[], Awaitable[Any]], within_s: float, what: str) -> None:
    """Waits until `await fact()` is true; fails by name."""
    patience = Patience(within_s)
    while not await fact():
        assert patience.lasts(), f"not within {within_s} s: {what}"
        await asyncio.sleep(0.02)


async def in_time(work: Awaitable[Result], within_s: float) -> Result:
    """What `work` gives; fails when it is not over in time."""
    task, patience = asyncio.ensure_future(work), Patience(within_s)
    while not task.done() and patience.lasts():
        await asyncio.wait((task,), timeout=LONGEST_LOOK_S)
    if not task.done():
        task.cancel()
        raise AssertionError(f"not within {within_s} s: {work}")
    return task.result()


async def happens(event: asyncio.Event, within_s: float) -> bool:
    """Whether the event is set in time."""
    patience = Patience(within_s)
    while not event.is_set() and patience.lasts():
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(event.wait(), LONGEST_LOOK_S)
    return event.is_set()
