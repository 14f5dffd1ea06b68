"""Commands, taken between steps. What a command asks of a request that is gone is ignored: it may just have ended."""

from __future__ import annotations

from typing import assert_never

from engine.port import (
    Cancel,
    Command,
    KvReserved,
    KvUnavailable,
    Mode,
    ReleaseKv,
    RequestFailed,
    ReserveKv,
    StartFromKv,
    Submit,
    TokenSampled,
)
from engine.request import Request, Stage, open_request, refusal
from engine.scheduler.state import State, close, leave, name_blocks, open_account, wait


def take(state: State, command: Command) -> None:
    if isinstance(command, Submit):
        _submit(state, command)
        return
    request = state.requests.get(command.key)
    if request is None:
        return
    match command:
        case ReserveKv():
            _reserve(state, request, command)
        case StartFromKv():
            _start(state, request, command)
        case ReleaseKv():
            assert request.mode is Mode.PREFILL_ONLY, f"{request.key} is {request.mode}; nothing of it is lent out"
            close(state, request)
        case Cancel():
            close(state, request)
        case _:
            assert_never(command)


def _submit(state: State, command: Submit) -> None:
    assert command.key not in state.requests, f"{command.key} is alive already"
    reason = refusal(command, state.config)
    if len(state.requests) - state.seats.taken >= state.config.max_waiting_requests:
        reason = reason or "queue_full"
    grammar = None
    if reason is None and command.sampling.grammar:
        grammar = state.grammars.open(command.sampling.grammar) if state.grammars is not None else None
        reason = None if grammar is not None else "invalid_grammar"
    if reason is not None:
        state.events.append(RequestFailed(command.key, reason))
        return
    state.arrivals += 1
    request = open_request(command, state.arrivals, state.config, grammar)
    state.requests[request.key] = request
    if request.stage is Stage.WAITING:
        wait(state, request)
    elif request.stage is Stage.FORKING:
        state.forking.add(request)


def _reserve(state: State, request: Request, command: ReserveKv) -> None:
    if command.end_position > state.config.capacity_positions:
        state.events.append(KvUnavailable(request.key, "prompt_exceeds_kv_cache"))
        return
    if request.stage is Stage.AWAITING:
        request.reserve_end = command.end_position
        request.stage = Stage.RESERVING
        state.reservations.add(request)
        return
    assert request.stage is Stage.RESERVED, f"{request.key} is {request.stage}; it cannot reserve"
    block_size = state.config.block_size
    if command.end_position > len(request.blocks) * block_size:
        state.events.append(KvUnavailable(request.key, "reservation_cannot_grow"))
        return
    request.reserve_end = command.end_position
    request.computed = max(request.computed, min(command.computed_positions, command.end_position))
    whole = request.computed // block_size * block_size
    state.events.append(KvReserved(request.key, tuple(request.blocks), whole, command.end_position))


def _start(state: State, request: Request, command: StartFromKv) -> None:
    assert request.stage in (Stage.AWAITING, Stage.RESERVING, Stage.RESERVED), f"{request.key} has started already"
    if command.first_token is not None:
        position = len(request.history)
        request.history.append(command.first_token)
        reason = request.rules.reason(position, command.first_token)
        if reason is not None:
            state.events.append(TokenSampled(request.key, position, command.first_token, reason))
            close(state, request)
            return
    if request.stage is not Stage.RESERVED:
        assert command.computed_positions == 0, f"{request.key}: KV of positions that were never reserved"
        leave(state, request)
        wait(state, request)
        return
    received = max(command.computed_positions, request.computed)
    assert received <= request.reserve_end, (
        f"{request.key}: {received} positions received, {request.reserve_end} reserved"
    )
    request.computed = _leave_one(state, request, received)
    open_account(request, request.computed)
    name_blocks(state, request, request.cached // state.config.block_size, request.computed)
    request.stage = Stage.READY
    state.ready.add(request)


def _leave_one(state: State, request: Request, received: int) -> int:
    """Positions that count as computed when the last one's logits are still wanted.

    Computing it again writes its KV again, so a block that others may read is given up and its positions are computed anew.
    """
    length = len(request.history)
    if received < length:
        return received
    index = (length - 1) // state.config.block_size
    if state.pool.is_private(request.blocks[index]):
        return length - 1
    state.pool.release(request.blocks[index:], state.launched_step)
    del request.blocks[index:]
    return index * state.config.block_size
