"""Chunks of prompts for what the decodes leave of a step's tokens.

Where prompts and decodes meet on one device, prompts that are short enough together share the steps that they need, so that
they end together: a stream that starts before the others is only slowed by what is left of theirs, and a short prompt does not
wait for a long one. The rest (all, where `shared_prompt_tokens` is 0) go in order of arrival, as far as the budget goes.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from engine.scheduler.seats import Seats

Int64 = npt.NDArray[np.int64]

LEAST_SHARE_TOKENS = 8
"""Chunks smaller than this cost more than they even out."""


def chunks(seats: Seats, left: Int64, budget_tokens: int, shared_tokens: int) -> tuple[Int64, Int64]:
    """Seats and token counts of this step's chunks. `left`: positions that each seat may schedule; `shared_tokens`: prompts
    share the budget while they have at most so many positions left in all."""
    waiting = np.array(seats.by_arrival(left > 1), np.int64)
    lengths = left[waiting]
    together = int(np.searchsorted(np.cumsum(lengths), shared_tokens, side="right"))
    together = min(together, budget_tokens // LEAST_SHARE_TOKENS)
    counts = np.concatenate((even_shares(lengths[:together], budget_tokens), np.zeros_like(lengths[together:])))
    rest = max(0, budget_tokens - int(counts.sum()))
    counts[together:] = np.diff(np.minimum(np.cumsum(lengths[together:]), rest), prepend=0)
    return waiting[counts > 0], counts[counts > 0]


def even_shares(lengths: Int64, budget_tokens: int) -> Int64:
    """Nobody gets more than its length, and nobody less than another who would have taken more; the budget is used up."""
    shares = np.zeros_like(lengths)
    for served, index in enumerate(np.argsort(lengths, kind="stable").tolist()):
        shares[index] = min(int(lengths[index]), budget_tokens // (len(lengths) - served))
        budget_tokens -= int(shares[index])
    return shares
