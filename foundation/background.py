"""The root of a process's background tasks: one that fails is a bug, and whoever runs the process is told, so that it ends loudly
and is begun again. What went on without it would look alive and stand still.

Must not know: what the tasks do.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any


class Background:
    """`failed` is told of each task that ends with an exception; one that returns or is cancelled ends as it was meant to."""

    def __init__(self, failed: Callable[[BaseException], None]) -> None:
        self._failed = failed
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def cancel(self) -> None:
        """All that still run."""
        for task in self._tasks:
            task.cancel()

    async def close(self) -> None:
        """Cancels all that still run and waits until they have ended; one that fails meanwhile is told as well."""
        self.cancel()
        if self._tasks:
            await asyncio.wait(tuple(self._tasks))

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (failure := task.exception()) is not None:
            self._failed(failure)


async def end(task: asyncio.Task[None] | None) -> None:
    """Cancels a task and waits until it has ended, however it ends; None: it was never begun."""
    if task is not None:
        task.cancel()
        await asyncio.wait((task,))
