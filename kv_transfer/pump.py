"""Runs a pure protocol core on the asyncio thread: one event at a time, its effects in order, one timer.

An effect may bring about the next event before it returns (a node answers at once); that event waits its turn, so that the
core never sees half-executed effects.

Must not know: which side of the protocol it runs.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine, Iterable
from typing import Any, Generic, TypeVar

from foundation.log import get_logger

log = get_logger()

Event = TypeVar("Event")
Effect = TypeVar("Effect")
Result = TypeVar("Result")


class Pump(Generic[Event, Effect]):
    """`handle` takes an event and returns its effects; `execute` starts one effect and never waits.

    While `busy`, `tick(now_s)` is asked every `tick_s` for the events that time brings about; at rest no timer runs.
    `failure` ends with the exception that stopped the pump, if one does.
    """

    def __init__(
        self,
        handle: Callable[[Event], Iterable[Effect]],
        execute: Callable[[Effect], None],
        busy: Callable[[], bool],
        tick: Callable[[float], Iterable[Event]],
        tick_s: float,
    ) -> None:
        self._handle = handle
        self._execute = execute
        self._busy = busy
        self._tick = tick
        self._tick_s = tick_s
        self._loop = asyncio.get_running_loop()
        self._events: deque[Event] = deque()
        self._turning = False
        self._closed = False
        self.failure: asyncio.Future[None] = self._loop.create_future()
        self._timer: asyncio.TimerHandle | None = None

    def emit(self, event: Event) -> None:
        if self._closed:
            return
        self._events.append(event)
        if self._turning:
            return
        self._turning = True
        try:
            while self._events:
                for effect in self._handle(self._events.popleft()):
                    self._execute(effect)
        except Exception as error:
            self.fail(error)
            raise
        finally:
            self._turning = False
        if self._timer is None and self._busy():
            self._timer = self._loop.call_later(self._tick_s, self._time_passed)

    def close(self) -> None:
        """Nothing happens any more, whatever still comes in."""
        self._closed = True
        self._events.clear()
        if self._timer is not None:
            self._timer.cancel()
        if not self.failure.done():
            self.failure.cancel()

    def fail(self, error: BaseException) -> None:
        """A bug: the core's state can no longer be trusted, so it takes no further event, and the node must end. The error is
        raised again from a callback of its own, so that the loop's exception handler hears of it wherever it struck."""
        log.critical("transfers failed", exc_info=error)
        if not self.failure.done():
            self.failure.set_exception(error)
            self._loop.call_soon(self.failure.result)
        self.close()

    def fail_with(self, work: asyncio.Future[Any]) -> None:
        """What the core relies on (a thread, say) has ended: badly, if it has an exception."""
        if not work.cancelled() and (error := work.exception()):
            self.fail(error)

    def _time_passed(self) -> None:
        self._timer = self._loop.call_later(self._tick_s, self._time_passed) if self._busy() else None
        for event in self._tick(self._loop.time()):
            self.emit(event)


def watched(work: Coroutine[Any, Any, Result]) -> asyncio.Task[Result]:
    """A task whose unexpected end is logged at once, not when it is collected."""
    task = asyncio.create_task(work)
    task.add_done_callback(_look_at)
    return task


def _look_at(task: asyncio.Task[Any]) -> None:
    if not task.cancelled() and (error := task.exception()):
        log.error("task failed", task=task.get_coro().__qualname__, exc_info=error)  # type: ignore[union-attr]
