"""What landing KV costs a step beyond the work that it brings: requests whose KV has landed join the batch, and contexts grow.

A step's time alone grows evenly with the tokens that its attention reads. So the phases in which nothing lands tell what a step
of any batch takes, and steps of the others are held against that, each by its own batch.

Must not know: where steps and phases come from.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

QUANTILES = {"p50": 0.5, "p99": 0.99}


class Step(NamedTuple):
    """`at_s`: when it ended. `running`: sequences in it."""

    at_s: float
    seconds: float
    running: int


class Phase(NamedTuple):
    from_s: float
    until_s: float


def prices(
    steps: Sequence[Step], alone: Sequence[Phase], landing: Mapping[str, Phase], streams: int, landed_tokens: int
) -> dict[str, dict[str, float]]:
    """By phase: what the quantiles of (seconds / seconds expected) grew by against those of the phases alone.

    `streams` sequences decode all the time, one token a step each; all others hold `landed_tokens`."""
    at_s, seconds, running = (np.array(column, float) for column in zip(*steps, strict=True))
    number = np.arange(len(steps))

    def within(phase: Phase) -> np.ndarray:
        return (phase.from_s <= at_s) & (at_s <= phase.until_s) & (running >= streams)

    quiet = np.logical_or.reduce([within(phase) for phase in alone]) & (running == streams)
    a_step_s, first_s = np.polyfit(number[quiet], seconds[quiet], 1)
    of_others_s = a_step_s / streams * landed_tokens * (running - streams)
    beyond = seconds / (first_s + a_step_s * number + of_others_s)
    usual = {name: np.quantile(beyond[quiet], share) for name, share in QUANTILES.items()}
    return {
        name: {
            quantile: float(np.quantile(beyond[within(phase)], share) / usual[quantile] - 1)
            for quantile, share in QUANTILES.items()
        }
        for name, phase in landing.items()
    }
