"""The engine thread as the asyncio thread sees it: post commands, be called back with the events of a step.

Events arrive on the asyncio thread, in order. A Submit that the engine does not take is answered as the engine would have:
with RequestFailed, on a later turn of the loop.

Must not know: roles, what a request is for.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from engine.loop import Engine, EngineThread
from engine.port import Command, EngineEvent, EngineStatus, RequestFailed, RequestKey, Submit
from node.grammar_reading import GrammarReading

STOP_WITHIN_S = 5.0

Events = Sequence[EngineEvent]


class EngineLink:
    def __init__(self, engine: Engine, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._thread = EngineThread(engine, self._report)
        self._events_arrived: Callable[[Events], None] | None = None
        self._grammars = GrammarReading(engine.read_grammar, loop, self._post, self._refuse)

    def start(self, events_arrived: Callable[[Events], None]) -> None:
        self._events_arrived = events_arrived
        self._thread.start()

    async def stop(self) -> bool:
        """False if the step that runs did not end in time."""
        return await asyncio.to_thread(self._thread.stop, STOP_WITHIN_S)

    def status(self) -> EngineStatus:
        return self._thread.status

    def post(self, command: Command) -> None:
        if not self._grammars.hold(command):
            self._post(command)

    def _post(self, command: Command) -> None:
        if not self._thread.post(command) and isinstance(command, Submit):
            reason = "queue_full" if self._thread.status.failed is None else "engine_error"
            self._loop.call_soon(self._refuse, command.key, reason)

    def _refuse(self, key: RequestKey, reason: str) -> None:
        self._deliver([RequestFailed(key, reason)])

    def _report(self, events: Events) -> None:
        """On the engine's thread."""
        self._loop.call_soon_threadsafe(self._deliver, events)

    def _deliver(self, events: Events) -> None:
        assert self._events_arrived is not None, "events arrive only after start"
        self._events_arrived(events)
