"""A step's choices as flat arrays. Nothing is chosen here, and nothing is done for each token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from engine.request import Request
from engine.scheduler.adjustments import adjustments
from engine.scheduler.masks import banned_tokens, token_masks
from engine.scheduler.scoring import NO_SCORING, Scoring, scored_tokens
from engine.scheduler.seats import Seats
from engine.step import NO_COPIES, SamplingRows, StepPlan

Int64 = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Scheduled:
    """A plan and what its result will mean: row r computes positions up to `ends[r]` for stay `stays[r]` of seat `seats[r]`."""

    plan: StepPlan
    seats: Int64
    stays: Int64
    ends: Int64
    drawing: Int64
    """Rows that draw a token, in order of the samples."""
    drawing_requests: list[Request]
    scoring: tuple[Scoring, ...] = ()
    """Whose prompts' tokens are scored, in order of the scores."""


def build(
    seats: Seats,
    number: int,
    settled_step: int,
    rows: Int64,
    counts: Int64,
    block_copies: Sequence[tuple[int, int]] = (),
) -> Scheduled:
    """Schedule `counts[r]` positions of seat `rows[r]`, and note in the seats that this was done."""
    starts = seats.scheduled[rows]
    ends = starts + counts
    query_start = np.zeros(len(rows) + 1, np.int32)
    np.cumsum(counts, out=query_start[1:])
    total = int(query_start[-1])
    row_of_token = np.repeat(np.arange(len(rows)), counts)
    positions = np.arange(total) - query_start[row_of_token] + starts[row_of_token]

    token_ids, feedback = _inputs(seats, settled_step, rows, counts, query_start, total)
    draws = ends == seats.length[rows]
    drawing = np.flatnonzero(draws)
    drawing_seats = rows[drawing]
    scoring, scored = scored_tokens(seats, rows, counts, query_start) if seats.scoring else NO_SCORING
    plan = StepPlan(
        number=number,
        token_ids=token_ids,
        feedback=feedback,
        positions=positions,
        slot_mapping=seats.table.slots(rows[row_of_token], positions),
        query_start=query_start,
        context_lengths=ends.astype(np.int32),
        block_tables=seats.table.rows(rows, ends),
        sample_tokens=query_start[1:][drawing] - 1,
        sampling=_sampling(seats, settled_step, drawing_seats),
        block_copies=np.array(block_copies, np.int64) if block_copies else NO_COPIES,
        scored=scored,
        kv_leaves=not seats.preemptible[rows].all(),
    )
    seats.scheduled[rows] = ends
    seats.length[drawing_seats] += 1
    seats.drawn_in[drawing_seats] = number
    seats.draw_index[drawing_seats] = np.arange(len(drawing))
    requests = [seats.request(seat) for seat in drawing_seats.tolist()]
    return Scheduled(plan, rows, seats.stay[rows], ends, drawing, requests, scoring)


def _inputs(
    seats: Seats, settled_step: int, rows: Int64, counts: Int64, query_start: npt.NDArray[np.int32], total: int
) -> tuple[Int64, npt.NDArray[np.int32]]:
    """Token ids of single positions come from the seats, or from the step in flight; those of chunks from the history."""
    token_ids = np.zeros(total, np.int64)
    feedback = np.full(total, -1, np.int32)
    single = counts == 1
    places, single_rows = query_start[:-1][single], rows[single]
    at_the_end = seats.scheduled[single_rows] == seats.length[single_rows] - 1
    token_ids[places] = seats.last_token[single_rows]
    in_flight = at_the_end & (seats.drawn_in[single_rows] > settled_step)
    feedback[places[in_flight]] = seats.draw_index[single_rows[in_flight]]
    from_history = (*np.flatnonzero(~single).tolist(), *np.flatnonzero(single)[~at_the_end].tolist())
    for row in from_history:
        seat, count = int(rows[row]), int(counts[row])
        start, place = int(seats.scheduled[seat]), int(query_start[row])
        token_ids[place : place + count] = np.frombuffer(seats.request(seat).history[start : start + count], np.int64)
    return token_ids, feedback


def _sampling(seats: Seats, settled_step: int, drawing: Int64) -> SamplingRows:
    return SamplingRows(
        temperature=seats.temperature[drawing],
        top_k=seats.top_k[drawing],
        top_p=seats.top_p[drawing],
        min_p=seats.min_p[drawing],
        seed=seats.seed[drawing],
        choice_index=seats.choice_index[drawing],
        position=seats.length[drawing],
        logprobs=seats.logprobs[drawing],
        banned=banned_tokens(seats, drawing),
        adjustments=adjustments(seats, drawing, settled_step),
        masks=token_masks(seats, drawing),
    )
