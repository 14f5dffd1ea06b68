"""The engine of a simulated node: the real scheduler, pool and step loop, over a toy model without torch.

The next token is a hash of the KV bytes that the request's block table leads to, so a wrong byte anywhere changes the text.
Like a device the runner works late: a launched step reads and writes the pool when its result is asked for.

Must not know: transfers, requests' owners.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from engine.config import EngineConfig
from engine.kv_cache.storage import KvStorage
from engine.loop import Engine
from engine.model.toy_kv import ToyPool, toy_kv, toy_logits, toy_logits_of_kv
from engine.port import Command, EngineEvent, EngineStatus, FinishReason, RequestFailed, SamplingParameters, Submit
from engine.request import finish_rules
from engine.sampling.reference import noise
from engine.step import StepPlan, StepResult
from foundation.kv_layout import KvLayout

VOCABULARY_SIZE = 29
END_OF_TEXT = 28
SEEDED_TEMPERATURE = 4.0


def draw(
    logits: npt.NDArray[np.float32], temperature: float, seed: int, position: int, banned: frozenset[int] = frozenset()
) -> int:
    """The token: greedy, or the highest of logit / temperature + noise, which depends on seed, position and token alone."""
    scores = logits.astype(np.float64)
    if temperature > 0:
        scores = scores / temperature + [noise(seed, 0, position, token) for token in range(VOCABULARY_SIZE)]
    if banned:
        scores[list(banned)] = -np.inf
    return int(scores.argmax())


def oracle(
    prompt: tuple[int, ...], sampling: SamplingParameters, layout: KvLayout, config: EngineConfig
) -> tuple[list[int], FinishReason]:
    """What one engine alone, without pool, cache or transfer, answers."""
    rules = finish_rules(len(prompt), sampling, config)
    history = list(prompt)
    while True:
        position = len(history)
        short = position - len(prompt) < sampling.min_tokens
        banned = rules.stop_token_ids if short else frozenset()
        logits = toy_logits(history, layout, VOCABULARY_SIZE)
        history.append(draw(logits, sampling.temperature, sampling.seed, position, banned))
        reason = rules.reason(position, history[-1])
        if reason is not None:
            return history[len(prompt) :], reason


class ToyRunner:
    """Implements `engine.step.Runner`."""

    def __init__(self, storage: KvStorage) -> None:
        self._storage = storage
        self._layout = storage.layout
        self._pool = ToyPool(storage)
        self._launched: deque[_Launched] = deque()
        self._tokens: npt.NDArray[np.int64] = np.zeros(0, np.int64)

    def launch(self, plan: StepPlan) -> _Launched:
        launched = _Launched(self, plan)
        self._launched.append(launched)
        return launched

    def run_through(self, last: _Launched) -> None:
        while last.done is None:
            step = self._launched.popleft()
            step.done = self._run(step.plan)

    def _run(self, plan: StepPlan) -> StepResult:
        if len(plan.block_copies):
            self._storage.copy_blocks(plan.block_copies)
        fed = plan.feedback >= 0
        token_ids = plan.token_ids.copy()
        token_ids[fed] = self._tokens[plan.feedback[fed]]
        self._pool.write(toy_kv(token_ids, plan.positions, self._layout), plan.slot_mapping)
        rows = np.searchsorted(plan.query_start, plan.sample_tokens, side="right") - 1
        drawn = [self._draw(plan, sample, int(row)) for sample, row in enumerate(rows)]
        self._tokens = np.array(drawn, np.int64)
        return StepResult(self._tokens)

    def _draw(self, plan: StepPlan, sample: int, row: int) -> int:
        sampling = plan.sampling
        logits = toy_logits_of_kv(
            self._pool.read(plan.block_tables[row], int(plan.context_lengths[row])), VOCABULARY_SIZE
        )
        banned = frozenset(token for banned_row, token in sampling.banned if banned_row == sample)
        temperature, seed = float(sampling.temperature[sample]), int(sampling.seed[sample])
        return draw(logits, temperature, seed, int(sampling.position[sample]), banned)

    def close(self) -> None:
        pass


@dataclass(slots=True, eq=False)
class _Launched:
    runner: ToyRunner
    plan: StepPlan
    done: StepResult | None = None

    def layers_written(self) -> tuple[int, ...]:
        return ()

    def result(self) -> StepResult:
        self.runner.run_through(self)
        assert self.done is not None
        return self.done


class SimulatedEngine:
    """Stands in for `node.engine_link.EngineLink` and the thread behind it. A step takes `step_s()`."""

    def __init__(self, engine: Engine, step_s: Callable[[], float]) -> None:
        self.engine = engine
        self._step_s = step_s
        self._status = engine.status()
        self._commands: deque[Command] = deque()
        self._posted = asyncio.Event()
        self._broken = False
        self._events_arrived: Callable[[Sequence[EngineEvent]], None] = lambda events: None

    def start(self, events_arrived: Callable[[Sequence[EngineEvent]], None]) -> None:
        self._events_arrived = events_arrived
        asyncio.get_running_loop().create_task(self._run(), name="engine")

    def status(self) -> EngineStatus:
        return self._status

    def break_down(self) -> None:
        """The next step fails, and with it the engine."""
        self._broken = True
        self._posted.set()

    @property
    def at_rest(self) -> bool:
        return not self._commands and not self._status.has_work

    def post(self, command: Command) -> None:
        if self._status.failed is not None:
            if isinstance(command, Submit):
                failed = [RequestFailed(command.key, "engine_error")]
                asyncio.get_running_loop().call_soon(self._events_arrived, failed)
            return
        self._commands.append(command)
        self._posted.set()

    async def _run(self) -> None:
        while not self._broken:
            if self.at_rest:
                self._posted.clear()
                await self._posted.wait()
            if not self._status.has_work:
                self._status = replace(self._status, has_work=True)
            while self._commands:
                self.engine.take(self._commands.popleft())
            await asyncio.sleep(self._step_s())
            events = self.engine.step()
            self.engine.scheduler.check()
            self._status = self.engine.status()
            self._events_arrived(events)
        self._fail()

    def _fail(self) -> None:
        """What the engine's thread does when a step raises."""
        unread = [command.key for command in self._commands if isinstance(command, Submit)]
        self._commands.clear()
        self._status = replace(self._status, has_work=False, failed="as planned")
        events = self.engine.fail_all("engine_error")
        self._events_arrived([*events, *(RequestFailed(key, "engine_error") for key in unread)])
