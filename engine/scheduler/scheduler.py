"""The scheduler: commands in; a plan for the next step and events out; one step's result in again.

    take(command)*  ->  plan()  ->  [launch]  ->  settle(scheduled, result)  ->  drain()

Every running sequence that decodes is in every plan; what they leave of the token budget goes to prompts. A plan may be
made while one step is in flight: a sequence whose last token that step draws takes it as feedback, and one that is known
to end with it is not scheduled again.

Invariants: engine/scheduler/state.py; `check` proves them.
"""

from __future__ import annotations

import numpy as np

from engine.config import EngineConfig
from engine.grammar import Grammars
from engine.kv_cache.block_pool import BlockPool, UInt64
from engine.kv_cache.prefix_index import PrefixIndex
from engine.port import Command, EngineEvent, EngineStatus, RequestFailed
from engine.request import Request, Stage
from engine.scheduler import intake, settle
from engine.scheduler.admission import admit
from engine.scheduler.forks import release_forks
from engine.scheduler.growth import grow
from engine.scheduler.plan import Scheduled, build
from engine.scheduler.prefill import chunks
from engine.scheduler.seats import Seats
from engine.scheduler.state import State
from engine.step import Int64, StepResult


class Scheduler:
    def __init__(self, config: EngineConfig, owner_words: UInt64, grammars: Grammars | None = None) -> None:
        """`owner_words`: shape [num_blocks], zeros; kept by the storage, written by the pool."""
        assert owner_words.shape == (config.num_blocks,), f"{owner_words.shape} owner words, {config.num_blocks} blocks"
        index = PrefixIndex(enabled=config.enable_prefix_caching)
        self.config = config
        self._state = State(config, BlockPool(owner_words, index), Seats(config), grammars)

    def take(self, command: Command) -> None:
        intake.take(self._state, command)

    def plan(self) -> Scheduled | None:
        """The next step, which must be launched; None when nobody can advance before something settles or is commanded."""
        state = self._state
        in_flight = state.launched_step > state.settled_step
        release_forks(state)
        while True:
            before = self._moves()
            grow(state)
            if not in_flight or state.preemptions == before[0]:  # a token of a preempted request may be in flight
                admit(state, self.config.seated_tokens - int(state.seats.left().sum()))
            rows, counts = self._choose()
            if len(rows):
                state.launched_step += 1
                copies, state.block_copies = state.block_copies, []
                return build(state.seats, state.launched_step, state.settled_step, rows, counts, copies)
            if in_flight or self._moves() == before:
                return None
            # Somebody gave way or took a seat and still nobody can run; with no step in flight nothing else would come
            # back to it.

    def _choose(self) -> tuple[Int64, Int64]:
        """Seats of the next step, decodes first, and how many positions each computes."""
        config = self.config
        seats = self._state.seats
        waits_for_its_token = seats.constrained & (seats.drawn_in > self._state.settled_step)
        left = np.where(waits_for_its_token, 0, seats.left())
        decodes = np.flatnonzero(left == 1)
        budget_tokens = config.max_num_batched_tokens - len(decodes)
        chunk_seats, chunk_counts = chunks(self._state.seats, left, budget_tokens, config.shared_prompt_tokens)
        counts = np.concatenate((np.ones(len(decodes), np.int64), chunk_counts))
        return np.concatenate((decodes, chunk_seats)), counts

    def _moves(self) -> tuple[int, int]:
        return self._state.preemptions, self._state.seats.stays

    def tell_layers(self, scheduled: Scheduled, end_layer: int) -> None:
        """The oldest step in flight has written KV of layers [0, end_layer); `settle` follows, or `fail_all`."""
        settle.tell_layers(self._state, scheduled, end_layer)

    def settle(self, scheduled: Scheduled, result: StepResult) -> None:
        settle.settle(self._state, scheduled, result)

    def drain(self) -> list[EngineEvent]:
        """Events since the last call, in order."""
        events, self._state.events = self._state.events, []
        return events

    def fail_all(self, reason: str) -> None:
        """The engine is broken: every request ends. Its blocks stay as they are, since nothing more will run."""
        self._state.events.extend(RequestFailed(key, reason) for key in self._state.requests)
        self._state.requests.clear()

    def status(self, *, has_work: bool, step_tokens: int) -> EngineStatus:
        state = self._state
        lines = (state.forking, state.waiting, state.ready, state.reservations)
        return EngineStatus(
            steps=state.settled_step,
            running=state.seats.taken,
            waiting=sum(map(len, lines)),
            queued_tokens=sum(len(request.history) for request in state.waiting) + state.seats.prompt_positions_left(),
            blocks_free=state.pool.free,
            blocks_cached=state.pool.cached,
            blocks_in_use=state.pool.in_use,
            blocks_total=state.pool.total,
            has_work=has_work,
            step_tokens=step_tokens,
            preemptions=state.preemptions,
            skips=dict(state.skips),
        )

    def check(self) -> None:
        """Prove that every block, seat and place in a line has exactly one owner, and that the books agree."""
        state, seats = self._state, self._state.seats
        state.pool.check(block for request in state.requests.values() for block in request.blocks)
        assert not state.block_copies, "a block was to be copied by a plan that was not made"
        for stage, line in (
            (Stage.FORKING, state.forking),
            (Stage.WAITING, state.waiting),
            (Stage.RESERVING, state.reservations),
            (Stage.READY, state.ready),
        ):
            assert list(line) == self._in_stage(stage), f"the line of {stage} differs from those who are {stage}"
        running = sorted((request for request in seats.requests if request is not None), key=lambda r: r.arrival)
        assert running == self._in_stage(Stage.RUNNING), "the seated differ from those who run"
        holding = (Stage.RUNNING, Stage.READY, Stage.RESERVED, Stage.HELD)
        for request in state.requests.values():
            assert not request.blocks or request.stage in holding, f"{request.key} is {request.stage} and holds blocks"
        for request in running:
            table = seats.table.rows(np.array([request.seat]), np.array([len(request.blocks) * self.config.block_size]))
            assert table[0].tolist() == request.blocks, f"{request.key}: its row of the table differs from its blocks"
        assert np.all(seats.computed <= seats.scheduled), "KV has settled that was never scheduled"
        assert np.all(seats.scheduled <= seats.length), "positions beyond the history are scheduled"
        assert np.all(seats.length <= seats.max_length), "a sequence is longer than it may be"

    def _in_stage(self, stage: Stage) -> list[Request]:
        return sorted((r for r in self._state.requests.values() if r.stage is stage), key=lambda r: r.arrival)
