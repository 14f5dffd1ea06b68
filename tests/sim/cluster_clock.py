"""One thread, many processes, no time: the event loop under a simulated cluster.

The nodes of a cluster run as they are, on asyncio; this loop stands in for the machines they run on. Nothing waits: when
nobody is ready, the clock jumps to the next timer. Every callback belongs to the process in whose context it was made, so
a process can be killed (its callbacks never run again) or stopped (they wait until it is resumed), as by the signals.
Each process has a clock of its own, which differs from the others' by a constant.

Must not know: what the processes do.
"""

from __future__ import annotations

import asyncio
import heapq
from asyncio import events
from collections import deque
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from contextvars import Context, ContextVar, copy_context
from typing import Any

PROCESS: ContextVar[Process | None] = ContextVar("simulated process", default=None)


class Process:
    """One life of one program. `clock_ahead_s`: how far its clock is ahead of the simulation's."""

    def __init__(self, name: str, clock_ahead_s: float = 0.0) -> None:
        self.name = name
        self.clock_ahead_s = clock_ahead_s
        self.alive = True
        self.stopped = False
        self.unrun: list[asyncio.Handle] = []
        self.context: Context = copy_context()
        self.context.run(PROCESS.set, self)

    def __repr__(self) -> str:
        return self.name


class VirtualLoop(asyncio.AbstractEventLoop):
    """`broke(process name, what)` hears of every exception that nobody caught: each is a bug."""

    def __init__(self, broke: Callable[[str, str, BaseException | None], None]) -> None:
        self.now_s = 1000.0
        self.callbacks_run = 0
        self._broke = broke
        self._ready: deque[asyncio.Handle] = deque()
        self._timers: list[tuple[float, int, asyncio.TimerHandle]] = []
        self._timers_made = 0
        self._tasks: list[asyncio.Task[Any]] = []
        self.over = False
        """The simulation has ended; what runs now only ends tasks."""
        self._halted: list[Process] = []

    # --- what asyncio asks of a loop

    def time(self) -> float:
        process = PROCESS.get()
        return self.now_s if process is None else self.now_s + process.clock_ahead_s

    def call_soon(self, callback: Callable[..., object], *args: Any, context: Context | None = None) -> asyncio.Handle:  # type: ignore[override]
        handle = asyncio.Handle(callback, args, self, context)
        self._ready.append(handle)
        return handle

    call_soon_threadsafe = call_soon  # type: ignore[assignment]

    def call_later(  # type: ignore[override]
        self, delay: float, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> asyncio.TimerHandle:
        return self._timer(self.now_s + max(0.0, delay), callback, args, context)

    def call_at(  # type: ignore[override]
        self, when: float, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> asyncio.TimerHandle:
        return self._timer(self.now_s + max(0.0, when - self.time()), callback, args, context)

    def _timer(
        self, when_s: float, callback: Callable[..., object], args: Any, context: Context | None
    ) -> asyncio.TimerHandle:
        handle = asyncio.TimerHandle(when_s, callback, args, self, context)
        self._timers_made += 1
        heapq.heappush(self._timers, (when_s, self._timers_made, handle))
        return handle

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        pass  # it is dropped when its time comes

    def create_future(self) -> asyncio.Future[Any]:
        return asyncio.Future(loop=self)

    def create_task(  # type: ignore[override]
        self, coro: Coroutine[Any, Any, Any], *, name: str | None = None, context: Context | None = None
    ) -> asyncio.Task[Any]:
        task: asyncio.Task[Any] = asyncio.Task(coro, loop=self, name=name, context=context)
        self._tasks.append(task)
        return task

    def get_debug(self) -> bool:
        return False

    def is_running(self) -> bool:
        return True

    def is_closed(self) -> bool:
        return False

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        if not self.over:
            process = PROCESS.get()
            self._broke(process.name if process else "", str(context.get("message")), context.get("exception"))

    # --- what the simulation asks

    @contextmanager
    def running(self) -> Iterator[None]:
        """This thread's loop, for as long as the block lasts; what is still under way then is cancelled and forgotten."""
        events._set_running_loop(self)
        try:
            yield
        finally:
            self.over = True
            self._end_tasks()
            events._set_running_loop(None)

    def run(self, until_s: float, reached: Callable[[], bool] = lambda: False, look_every: int = 16) -> bool:
        """Run until the clock shows `until_s`, or until `reached`; whether it was reached."""
        while not reached():
            for _ in range(look_every):
                if not self._ready and (not self._timers or self._timers[0][0] > until_s):
                    self.now_s = max(self.now_s, until_s)
                    return reached()
                self._step()
        return True

    def _step(self) -> None:
        if not self._ready:
            when_s, _, timer = heapq.heappop(self._timers)
            self.now_s = max(self.now_s, when_s)
            self._ready.append(timer)
        handle = self._ready.popleft()
        process = handle._context.get(PROCESS)  # type: ignore[attr-defined]
        if process is None or self.over or (process.alive and not process.stopped):
            self.callbacks_run += 1
            if not handle._cancelled:
                handle._run()
        else:
            if not process.unrun:
                self._halted.append(process)
            process.unrun.append(handle)

    def stop(self, process: Process) -> None:  # type: ignore[override]
        process.stopped = True

    def resume(self, process: Process) -> None:
        process.stopped = False
        if process.alive:
            self._ready.extend(process.unrun)
            process.unrun = []

    def kill(self, process: Process) -> None:
        process.alive = False

    def failed_tasks(self) -> Iterator[asyncio.Task[Any]]:
        """Tasks that ended with an exception at which nobody has looked."""
        return (task for task in self._tasks if task.done() and task._log_traceback)

    def _end_tasks(self) -> None:
        """Also those of dead processes: collected unfinished, they would run their last words at some later time."""
        for process in self._halted:
            self._ready.extend(process.unrun)
        for _ in range(50):
            open_tasks = [task for task in self._tasks if not task.done()]
            if not open_tasks:
                break
            for task in open_tasks:
                task.cancel()
            while self._ready:
                self._step()
        for task in self._tasks:
            if task.done() and not task.cancelled():
                task.exception()  # looked at
        self._tasks.clear()
        self._timers.clear()
