"""What the scheduler knows, and the moves by which a request takes and gives back blocks and seats.

Each request is in one stage (engine/request.py); `leave` undoes whatever that stage holds, so that no other code has to know.
Nobody waits while holding: blocks for a whole history are taken at once or not at all; a seated request that lacks its next
block gives way to every older one (growth).

Must not know: torch, threads, the runner.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import assert_never

from engine.config import EngineConfig
from engine.grammar import Grammars
from engine.kv_cache.block_pool import BlockPool
from engine.kv_cache.prefix_index import extend_chain
from engine.port import EngineEvent, RequestKey
from engine.request import PromptAccount, Request, Stage
from engine.scheduler.lines import Line
from engine.scheduler.seats import Seats
from foundation.ids import BlockId


@dataclass(slots=True, eq=False)
class State:
    config: EngineConfig
    pool: BlockPool
    seats: Seats
    grammars: Grammars | None = None
    """None: this engine serves no grammars."""
    requests: dict[RequestKey, Request] = field(default_factory=dict)
    """Every request that has not ended."""
    forking: Line = field(default_factory=Line)
    waiting: Line = field(default_factory=Line)
    reservations: Line = field(default_factory=Line)
    ready: Line = field(default_factory=Line)
    events: list[EngineEvent] = field(default_factory=list)
    block_copies: list[tuple[BlockId, BlockId]] = field(default_factory=list)
    """(from, to) pairs that the next plan makes first."""
    skips: Counter[str] = field(default_factory=Counter)
    arrivals: int = 0
    launched_step: int = 0
    settled_step: int = 0
    preemptions: int = 0


def blocks_for(state: State, positions: int) -> int:
    return -(-positions // state.config.block_size)


def take_blocks(state: State, request: Request, end_position: int, reusable_positions: int) -> bool:
    """Blocks for positions [0, end_position), at most `reusable_positions` of them from the prefix cache; or nothing.

    One block is left for each running sequence, so that whoever is let in does not have to leave at the next step.
    """
    assert not request.blocks, f"{request.key} has blocks already"
    block_size = state.config.block_size
    shared: list[BlockId] = []
    if state.pool.index.enabled:
        reusable_blocks = reusable_positions // block_size
        extend_chain(request.chain, request.history, block_size, reusable_blocks)
        shared = state.pool.index.lookup(request.chain[:reusable_blocks])
    return take_shared(state, request, shared, end_position)


def take_shared(state: State, request: Request, shared: Sequence[BlockId], end_position: int) -> bool:
    """References on the whole blocks `shared`, whose KV stands, and fresh blocks up to `end_position`; or nothing."""
    spare = int(state.seats.preemptible.sum())
    blocks = state.pool.acquire(shared, blocks_for(state, end_position) - len(shared), spare)
    if blocks is None:
        return False
    request.blocks = blocks
    request.cached = request.computed = len(shared) * state.config.block_size
    return True


def missing_blocks(state: State, request: Request) -> int:
    """Blocks that a seated request's history needs beyond those it has."""
    return blocks_for(state, int(state.seats.length[request.seat])) - len(request.blocks)


def add_blocks(state: State, request: Request) -> bool:
    """Give a seated request the blocks that its history lacks, all or none."""
    blocks = state.pool.acquire((), max(missing_blocks(state, request), 0))
    if blocks is None:
        return False
    request.blocks += blocks
    state.seats.table.append(request.seat, blocks)
    return True


def name_blocks(state: State, request: Request, named: int, computed: int) -> None:
    """Offer the whole blocks below position `computed` to the prefix index, from block `named` on."""
    if not state.pool.index.enabled:
        return
    full = computed // state.config.block_size
    extend_chain(request.chain, request.history, state.config.block_size, full)
    for index in range(named, full):
        state.pool.index.insert(request.chain[index], request.blocks[index])


def give_blocks_back(state: State, request: Request) -> None:
    state.pool.release(request.blocks, state.launched_step)
    request.blocks = []
    request.computed = request.cached = 0


def leave(state: State, request: Request) -> None:
    """Give back place, seat and blocks of the request's stage. The caller sets the next one."""
    match request.stage:
        case Stage.FORKING:
            state.forking.remove(request)
        case Stage.WAITING:
            state.waiting.remove(request)
        case Stage.RESERVING:
            state.reservations.remove(request)
        case Stage.READY:
            state.ready.remove(request)
        case Stage.RUNNING:
            state.seats.leave(request)
        case Stage.AWAITING | Stage.RESERVED | Stage.HELD:
            pass
        case Stage.CLOSED:
            raise AssertionError(f"{request.key} has ended already")
        case _:
            assert_never(request.stage)
    give_blocks_back(state, request)


def close(state: State, request: Request) -> None:
    leave(state, request)
    request.stage = Stage.CLOSED
    del state.requests[request.key]


def hold(state: State, request: Request) -> None:
    """A prefill node's request has its first token: the seat is free, the blocks stay for its transfer."""
    state.seats.leave(request)
    request.stage = Stage.HELD


def wait(state: State, request: Request) -> None:
    request.stage = Stage.WAITING
    state.waiting.add(request)


def preempt(state: State, request: Request) -> None:
    """Take everything from the request; it computes its history again in its turn."""
    assert request.may_be_preempted, f"{request.key} may not be preempted"
    leave(state, request)
    wait(state, request)
    state.preemptions += 1


def open_account(request: Request, computed: int) -> None:
    """Remember where the KV of the given history came from: positions below `computed` stand in the request's blocks.

    Once only: what a preemption takes later changes nothing in it.
    """
    if not request.accounted:
        request.accounted = True
        present = min(computed, request.given_length)
        cached = min(request.cached, present)
        request.account = PromptAccount(cached, present - cached, request.given_length - present)
