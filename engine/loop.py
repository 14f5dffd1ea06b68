"""The engine: plan, launch, settle, report; and the thread that does nothing else.

With `overlap` a step is launched before the one before it has settled, so that the device never waits for the host:

    plan N + 1 | launch N + 1 | report what the plan answered | report N's layers as they are written | settle N | report N

Everything the engine owns (scheduler, pool, runner) is touched by its thread alone. Others post commands, are called back
with the events of a step, and read `status`.

Must not know: torch, asyncio, gRPC, UCX.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace

import structlog

from engine.config import EngineConfig
from engine.grammar import Grammars
from engine.kv_cache.block_pool import UInt64
from engine.port import Command, EngineEvent, EngineStatus, RequestFailed, Submit
from engine.scheduler.plan import Scheduled
from engine.scheduler.scheduler import Scheduler
from engine.speed import PromptSpeed
from engine.step import LaunchedStep, Runner

logger = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class _InFlight:
    scheduled: Scheduled
    launched: LaunchedStep
    launched_s: float


class Engine:
    """Commands and steps, without a thread. `owner_words`: the storage's array, shape [num_blocks], zeros."""

    def __init__(
        self, config: EngineConfig, runner: Runner, owner_words: UInt64, grammars: Grammars | None = None
    ) -> None:
        self.scheduler = Scheduler(config, owner_words, grammars)
        self._grammars = grammars
        self._runner = runner
        self._in_flight: deque[_InFlight] = deque()
        self._depth = 1 if config.overlap else 0
        self._step_tokens = 0
        self._advanced = False
        self._speed = PromptSpeed()

    def read_grammar(self, grammar: str) -> bool:
        """Before its Submit is taken, on any thread but the engine's, which it would hold up. See `Grammars.read`."""
        return self._grammars is None or self._grammars.read(grammar)

    def take(self, command: Command) -> None:
        self.scheduler.take(command)

    def step(self, answered: Callable[[list[EngineEvent]], None] | None = None) -> list[EngineEvent]:
        """Launch what can be launched, settle what is due; returns what happened, commands' answers included.

        `answered` gets the answers that stand when a step must be waited for: who has asked for blocks need not wait as well.
        Where KV leaves, it then hears which layers the step has written.
        Afterwards `status().has_work` is False if nothing was launched or settled: only a command can change that.
        """
        scheduled = self.scheduler.plan()
        if scheduled is not None:
            launched_s = time.perf_counter()
            self._in_flight.append(_InFlight(scheduled, self._runner.launch(scheduled.plan), launched_s))
        self._advanced = bool(self._in_flight)
        unsettled = self._depth if scheduled is not None else 0
        if answered is not None and len(self._in_flight) > unsettled and (answers := self.scheduler.drain()):
            answered(answers)
        while len(self._in_flight) > unsettled:
            oldest = self._in_flight.popleft()
            if answered is not None:
                self._tell_layers(oldest, answered)
            self.scheduler.settle(oldest.scheduled, oldest.launched.result())
            self._step_tokens += oldest.scheduled.plan.tokens
            self._speed.settled(oldest.scheduled.plan.tokens, oldest.launched_s, time.perf_counter())
        return self.scheduler.drain()

    def _tell_layers(self, oldest: _InFlight, answered: Callable[[list[EngineEvent]], None]) -> None:
        for end_layer in oldest.launched.layers_written():
            self.scheduler.tell_layers(oldest.scheduled, end_layer)
            if events := self.scheduler.drain():
                answered(events)

    def status(self) -> EngineStatus:
        status = self.scheduler.status(has_work=self._advanced, step_tokens=self._step_tokens)
        return replace(status, tokens_per_second=self._speed.tokens_per_second)

    def fail_all(self, reason: str) -> list[EngineEvent]:
        self.scheduler.fail_all(reason)
        return self.scheduler.drain()

    def close(self) -> None:
        self._runner.close()


class EngineThread:
    """Runs an engine on a thread of its own.

    `report(events)` is called on that thread after each step that had any, and with what is known when one must be waited
    for; it must not wait itself. When the engine breaks, every request gets RequestFailed(engine_error), `status.failed` says
    why, and the thread ends.
    """

    def __init__(
        self,
        engine: Engine,
        report: Callable[[list[EngineEvent]], None],
        *,
        command_limit: int = 1024,
    ) -> None:
        self.status = engine.status()
        """A snapshot; any thread may read it."""
        self._engine = engine
        self._report = report
        self._command_limit = command_limit
        self._commands: deque[Command] = deque()
        self._wake = threading.Condition()
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def post(self, command: Command) -> bool:
        """Hand over a command; never waits. False: it was not taken, since the engine has ended or, for a Submit only,
        since `command_limit` commands are waiting. The others are bounded by the requests they name, and are never lost.
        """
        with self._wake:
            if self._stopping or self.status.failed is not None:
                return False
            if isinstance(command, Submit) and len(self._commands) >= self._command_limit:
                return False
            self._commands.append(command)
            self._wake.notify()
            return True

    def stop(self, timeout_s: float) -> bool:
        """Finish the step that runs, close the runner, end the thread. False if it had not ended after `timeout_s`."""
        with self._wake:
            self._stopping = True
            self._wake.notify()
        if self._thread.ident is None:
            self._engine.close()
        else:
            self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            while self._turn():
                pass
        except BaseException as error:  # the thread's root: whatever broke the engine ends it loudly
            self._fail(error)
        finally:
            self._engine.close()

    def _turn(self) -> bool:
        """Commands, one step, its report. Waits while there is nothing to do; False when it is time to stop."""
        with self._wake:
            self._wake.wait_for(lambda: self._stopping or self._commands or self.status.has_work)
            if self._stopping:
                return False
            commands = len(self._commands)
        if not self.status.has_work:
            self.status = replace(self.status, has_work=True)  # so that a first step that hangs is seen to hang
        for _ in range(commands):
            self._engine.take(self._commands[0])
            self._commands.popleft()  # after it was taken: a command that breaks the engine still names its request
        events = self._engine.step(self._answer)
        if events:
            self._answer(events)
        else:
            self.status = self._engine.status()
        return True

    def _answer(self, events: list[EngineEvent]) -> None:
        self.status = self._engine.status()
        self._report(events)

    def _fail(self, error: BaseException) -> None:
        reason = f"{type(error).__name__}: {error}"
        logger.error("engine_failed", reason=reason, exc_info=error)
        events = self._engine.fail_all("engine_error")
        with self._wake:
            self.status = replace(self.status, has_work=False, failed=reason)
            told = {event.key for event in events if isinstance(event, RequestFailed)}
            unread = {command.key for command in self._commands if isinstance(command, Submit)}
            self._commands.clear()
        events.extend(RequestFailed(key, "engine_error") for key in sorted(unread - told))
        self._report(events)
