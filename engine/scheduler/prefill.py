"""Chunks of prompts for what the decodes leave of a step's tokens: the oldest first, each as far as the budget goes."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from engine.scheduler.seats import Seats

Int64 = npt.NDArray[np.int64]


def chunks(seats: Seats, left: Int64, budget_tokens: int) -> tuple[Int64, Int64]:
    """Seats and token counts of this step's chunks. `left`: positions that each seat may schedule."""
    chosen: list[int] = []
    counts: list[int] = []
    for seat in seats.by_arrival(left > 1):
        if budget_tokens <= 0:
            break
        count = min(int(left[seat]), budget_tokens)
        budget_tokens -= count
        chosen.append(seat)
        counts.append(count)
    return np.array(chosen, np.int64), np.array(counts, np.int64)
