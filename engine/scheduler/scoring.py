"""Log probabilities of prompts: which of a step's tokens are scored, and what their scores become.

A token's logits say how likely the next one is, so position p of a prompt is scored by the token at p - 1. A prompt is scored
as its chunks are computed. One that is preempted meanwhile computes all of it again, and what was reported is not repeated.

Must not know: torch, pools.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from engine.port import PromptScored
from engine.request import Request, Stage
from engine.scheduler.seats import Seats
from engine.step import Int64, ScoredTokens, TokenScores


@dataclass(frozen=True, slots=True)
class Scoring:
    """The next `count` scores are those of positions `position`... of this request's prompt."""

    request: Request
    position: int
    count: int


NO_SCORING: tuple[tuple[Scoring, ...], ScoredTokens | None] = ((), None)


def scored_tokens(
    seats: Seats, rows: Int64, counts: Int64, query_start: npt.NDArray[np.int32]
) -> tuple[tuple[Scoring, ...], ScoredTokens | None]:
    """Of a step that computes `counts[r]` positions of seat `rows[r]`, whose tokens begin at `query_start[r]`."""
    scoring, tokens, next_token_ids = [], [], []
    for row in np.flatnonzero(np.isin(rows, list(seats.scoring))).tolist():
        request = seats.request(int(rows[row]))
        start = int(seats.scheduled[rows[row]])
        count = min(int(counts[row]), request.rules.prompt_length - 1 - start)
        if count > 0:
            scoring.append(Scoring(request, start + 1, count))
            tokens.append(query_start[row] + np.arange(count, dtype=np.int64))
            next_token_ids.append(np.frombuffer(request.history[start + 1 : start + 1 + count], np.int64))
    if not scoring:
        return NO_SCORING
    best = max(one.request.sampling.prompt_logprobs or 0 for one in scoring)
    return tuple(scoring), ScoredTokens(np.concatenate(tokens), np.concatenate(next_token_ids), best)


def take_scores(seats: Seats, scoring: Sequence[Scoring], scores: TokenScores) -> list[PromptScored]:
    """What a finished step says of prompts, without what has been reported.

    Scores of a request that has lost its seat since are true all the same: they were computed from whole KV.
    """
    events, end = [], 0
    for one in scoring:
        begin, end = end, end + one.count
        request, known = one.request, one.request.scored - one.position
        if request.stage is Stage.CLOSED or known >= one.count:
            continue
        assert known >= 0, f"{request.key}: scores from {one.position} on, and {request.scored} is the next"
        events.append(_scored(request, slice(begin + known, end), scores))
        request.scored = one.position + one.count
        if not request.unscored:
            seats.scoring.discard(request.seat)
    return events


def _scored(request: Request, part: slice, scores: TokenScores) -> PromptScored:
    wanted = request.sampling.prompt_logprobs
    return PromptScored(
        request.key,
        request.scored,
        tuple(scores.logprobs[part].tolist()),
        tuple(scores.ranks[part].tolist()),
        tuple(scores.top_token_ids[part, :wanted].ravel().tolist()),
        tuple(scores.top_logprobs[part, :wanted].ravel().tolist()),
    )
