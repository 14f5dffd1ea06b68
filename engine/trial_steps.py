"""Steps of nobody's requests: what runners are warmed up and measured with. Token ids are 0, and each row draws greedily.

Must not know: requests, schedulers, who runs a step.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from engine.step import SamplingRows, StepPlan


def greedy_rows(positions: Sequence[int]) -> SamplingRows:
    """One draw for each of these positions."""
    rows = len(positions)
    return SamplingRows(
        temperature=np.zeros(rows, np.float32),
        top_k=np.zeros(rows, np.int32),
        top_p=np.ones(rows, np.float32),
        min_p=np.zeros(rows, np.float32),
        seed=np.zeros(rows, np.uint64),
        choice_index=np.zeros(rows, np.int32),
        position=np.asarray(positions, np.int64),
        logprobs=np.full(rows, -1, np.int32),
    )


def trial_step(
    number: int, counts: Sequence[int], contexts: Sequence[int], block_tables: npt.NDArray[np.int32], block_size: int
) -> StepPlan:
    """Row r holds the last counts[r] of contexts[r] positions, which lie in the blocks of block_tables[r]."""
    lengths = np.array(counts, np.int32)
    positions = np.concatenate([np.arange(end - count, end) for count, end in zip(counts, contexts, strict=True)])
    rows = np.repeat(np.arange(len(counts)), lengths)
    blocks = block_tables[rows, positions // block_size].astype(np.int64)
    return StepPlan(
        number=number,
        token_ids=np.zeros(len(positions), np.int64),
        feedback=np.full(len(positions), -1, np.int32),
        positions=positions,
        slot_mapping=blocks * block_size + positions % block_size,
        query_start=np.concatenate(([0], np.cumsum(lengths))).astype(np.int32),
        context_lengths=np.array(contexts, np.int32),
        block_tables=block_tables,
        sample_tokens=np.cumsum(lengths).astype(np.int32) - 1,
        sampling=greedy_rows(contexts),
    )


def trial_step_in_one_block(
    number: int, counts: Sequence[int], contexts: Sequence[int], block: int, block_size: int
) -> StepPlan:
    """All positions of all rows lie in this block, which nobody owns."""
    tables = np.full((len(counts), -(-max(contexts) // block_size)), block, np.int32)
    return trial_step(number, counts, contexts, tables, block_size)
