"""Step plans written by hand: rows of (token ids, first position, blocks)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from engine import trial_steps
from engine.step import SamplingRows, StepPlan


def greedy_rows(count: int, positions: Sequence[int], logprobs: int = -1) -> SamplingRows:
    return replace(trial_steps.greedy_rows(positions), logprobs=np.full(count, logprobs, np.int32))


def batch_plan(
    number: int,
    rows: Sequence[tuple[Sequence[int], int, Sequence[int]]],
    block_size: int,
    *,
    feedback: Sequence[int] = (),
    sample: Sequence[bool] = (),
    sampling: SamplingRows | None = None,
) -> StepPlan:
    """A plan for rows of (token ids, position of the first, block ids). `feedback` gives each token's source or -1;
    `sample` says which rows draw (default: all)."""
    token_ids = [token for ids, _, _ in rows for token in ids]
    positions = [first + i for ids, first, _ in rows for i in range(len(ids))]
    slots = [
        blocks[(first + i) // block_size] * block_size + (first + i) % block_size
        for ids, first, blocks in rows
        for i in range(len(ids))
    ]
    query_start = np.cumsum([0, *(len(ids) for ids, _, _ in rows)])
    contexts = [first + len(ids) for ids, first, _ in rows]
    tables = np.zeros((len(rows), max(len(blocks) for _, _, blocks in rows)), np.int32)
    for row, (_, _, blocks) in enumerate(rows):
        tables[row, : len(blocks)] = blocks
    drawing = [row for row in range(len(rows)) if not sample or sample[row]]
    return StepPlan(
        number=number,
        token_ids=np.asarray(token_ids, np.int64),
        feedback=np.asarray(feedback if feedback else [-1] * len(token_ids), np.int32),
        positions=np.asarray(positions, np.int64),
        slot_mapping=np.asarray(slots, np.int64),
        query_start=query_start.astype(np.int32),
        context_lengths=np.asarray(contexts, np.int32),
        block_tables=tables,
        sample_tokens=np.asarray([query_start[row + 1] - 1 for row in drawing], np.int32),
        sampling=sampling or greedy_rows(len(drawing), [contexts[row] for row in drawing]),
    )
