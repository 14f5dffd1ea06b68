"""Who may take blocks and seats, in order of arrival.

Three lines: `waiting` wants blocks and a seat, `reservations` want blocks, `ready` wants a seat. The oldest that could move
moves. When the oldest that wants blocks lacks them, nobody younger may take any: no request is overtaken for ever.
Those who have their blocks still go to their seats.
"""

from __future__ import annotations

from engine.port import KvReserved, Mode, PrefillReserved
from engine.request import Request, Stage
from engine.scheduler.forks import fork_source, take_forked
from engine.scheduler.state import State, add_blocks, open_account, take_blocks


def admit(state: State, budget_tokens: int) -> None:
    """Move requests into blocks and seats; `budget_tokens`: tokens that nobody seated has claimed yet."""
    blocks_left = True
    while (request := _next(state, budget_tokens, blocks_left)) is not None:
        match request.stage:
            case Stage.READY:
                state.ready.remove(request)
                state.seats.take(request)
                add_blocks(state, request)  # the transfer's blocks may end before the next position; growth tries again
            case Stage.WAITING:
                blocks_left = _start(state, request)
            case Stage.RESERVING:
                blocks_left = _reserve(state, request)
            case _:
                raise AssertionError(f"{request.key} is {request.stage} and in a line")
        if request.seat >= 0:
            budget_tokens -= len(request.history) - request.computed
    if not blocks_left:
        state.skips["no_free_blocks"] += 1
    elif state.waiting or state.ready:
        state.skips["token_budget" if state.seats.empty else "max_num_seqs"] += 1


def _next(state: State, budget_tokens: int, blocks_left: bool) -> Request | None:
    seat_left = state.seats.empty > 0 and budget_tokens > 0
    movable = (
        state.ready.first if seat_left else None,
        state.waiting.first if seat_left and blocks_left else None,
        state.reservations.first if blocks_left else None,
    )
    return min((request for request in movable if request is not None), key=lambda r: r.arrival, default=None)


def _start(state: State, request: Request) -> bool:
    """Blocks for the whole history, then a seat.

    One position at least is left to compute, since its logits are wanted; but not on a prefill node that has the whole history
    in its cache: the decode node draws from one position sooner than this one would from a whole block. Where the prompt's log
    probabilities are wanted, all positions are.
    """
    length = len(request.history)
    lent = request.mode is Mode.PREFILL_ONLY
    source = fork_source(state, request)
    reusable = 0 if request.unscored else length if lent else length - 1
    taken = take_blocks(state, request, length, reusable) if source is None else take_forked(state, request, source)
    if not taken:
        return False
    state.waiting.remove(request)
    open_account(request, request.computed)
    if request.computed == length:
        request.stage = Stage.HELD
    else:
        state.seats.take(request)
    if lent:
        blocks = tuple(request.blocks)
        words = state.pool.owner_words(blocks)
        state.events.append(PrefillReserved(request.key, blocks, words, request.computed))
    return True


def _reserve(state: State, request: Request) -> bool:
    """Blocks for a transfer's positions. All of them may come from the cache: the first token comes with the transfer."""
    if not take_blocks(state, request, request.reserve_end, min(request.reserve_end, len(request.history))):
        return False
    state.reservations.remove(request)
    request.stage = Stage.RESERVED
    state.events.append(KvReserved(request.key, tuple(request.blocks), request.computed, request.reserve_end))
    return True
