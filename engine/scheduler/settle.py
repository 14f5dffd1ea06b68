"""What a finished step changes: KV counts, tokens join histories, sequences end.

A row whose seat has changed hands since the launch (preempted, ended, cancelled) counts no KV. Its token is still true when
only the seat was lost: it was drawn from whole KV, and its position is the next one of the history.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from engine.port import (
    KvComputed,
    KvLayersComputed,
    Mode,
    RequestFailed,
    RequestKey,
    TokenLogprob,
    TokenSampled,
)
from engine.request import Request, Stage
from engine.scheduler.plan import Scheduled
from engine.scheduler.scoring import take_scores
from engine.scheduler.state import State, close, hold, name_blocks
from engine.step import Int64, StepResult


def settle(state: State, scheduled: Scheduled, result: StepResult) -> None:
    number = scheduled.plan.number
    assert number == state.settled_step + 1, f"step {number} settled after step {state.settled_step}"
    assert len(result.token_ids) == len(scheduled.drawing), f"step {number} drew another number of tokens than planned"
    state.settled_step = number
    state.pool.settle(number)
    _count_kv(state, scheduled)
    if scheduled.scoring:
        assert result.scores is not None, f"step {number} has tokens to score and no scores"
        state.events.extend(take_scores(state.seats, scheduled.scoring, result.scores))
    _take_tokens(state, scheduled, result)


def tell_layers(state: State, scheduled: Scheduled, end_layer: int) -> None:
    """The step that is next to settle has written KV of layers [0, end_layer), and may still fail."""
    rows, ends = _live_rows(state, scheduled)
    state.events.extend(KvLayersComputed(key, end, end_layer) for key, end in _leaving(state, rows, ends))


def _live_rows(state: State, scheduled: Scheduled) -> tuple[Int64, Int64]:
    """Seats that have not changed hands since the launch, and how far the step computes them."""
    live = state.seats.stay[scheduled.seats] == scheduled.stays
    return scheduled.seats[live], scheduled.ends[live]


def _leaving(state: State, rows: Int64, ends: Int64) -> Iterator[tuple[RequestKey, int]]:
    seats = state.seats
    offered = ~seats.preemptible[rows]
    for seat, end in zip(rows[offered].tolist(), ends[offered].tolist(), strict=True):
        yield seats.request(seat).key, end


def _count_kv(state: State, scheduled: Scheduled) -> None:
    seats = state.seats
    rows, ends = _live_rows(state, scheduled)
    seats.computed[rows] = ends
    full = ends // state.config.block_size
    more = full > seats.named_blocks[rows]
    for seat, end in zip(rows[more].tolist(), ends[more].tolist(), strict=True):
        name_blocks(state, seats.request(seat), int(seats.named_blocks[seat]), end)
    seats.named_blocks[rows] = full
    state.events.extend(KvComputed(key, end) for key, end in _leaving(state, rows, ends))


def _take_tokens(state: State, scheduled: Scheduled, result: StepResult) -> None:
    seats = state.seats
    rows = scheduled.drawing
    live = seats.stay[scheduled.seats[rows]] == scheduled.stays[rows]
    seats.last_token[scheduled.seats[rows[live]]] = result.token_ids[live]
    positions = scheduled.plan.sampling.position.tolist()
    for sample, (request, position, token_id) in enumerate(
        zip(scheduled.drawing_requests, positions, result.token_ids.tolist(), strict=True)
    ):
        if request.stage is Stage.CLOSED:
            continue  # cancelled, or ended by the step before
        assert position == len(request.history), f"{request.key}: token for {position} at {len(request.history)}"
        if request.grammar is not None and request.grammar.lost:
            state.events.append(RequestFailed(request.key, "invalid_grammar"))
            close(state, request)
            continue
        request.history.append(token_id)
        reason = request.rules.reason(position, token_id)
        event = TokenSampled(request.key, position, token_id, reason)
        if request.account is not None or request.sampling.logprobs is not None:
            event = _with_particulars(event, request, result, sample)
        state.events.append(event)
        if request.mode is Mode.PREFILL_ONLY:
            hold(state, request)
        elif reason is not None:
            close(state, request)


def _with_particulars(event: TokenSampled, request: Request, result: StepResult, sample: int) -> TokenSampled:
    """The event with the prompt account, if this is the first token that is reported, and with the logprobs wanted."""
    account, request.account = request.account, None
    logprob: float | None = None
    best: tuple[TokenLogprob, ...] = ()
    wanted = request.sampling.logprobs
    if wanted is not None:
        assert result.logprobs is not None, f"{request.key} wants logprobs and the step has none"
        logprob = float(result.logprobs[sample])
        best = _best(result, sample, wanted)
    return TokenSampled(
        event.key,
        event.position,
        event.token_id,
        event.finish_reason,
        logprob,
        best,
        account.cached if account else None,
        account.transferred if account else None,
        account.computed if account else None,
    )


def _best(result: StepResult, sample: int, wanted: int) -> tuple[TokenLogprob, ...]:
    if not wanted:
        return ()
    assert result.top_token_ids is not None
    assert result.top_logprobs is not None
    ids = np.asarray(result.top_token_ids[sample, :wanted]).tolist()
    values = np.asarray(result.top_logprobs[sample, :wanted]).tolist()
    return tuple(TokenLogprob(token_id, value) for token_id, value in zip(ids, values, strict=True))
