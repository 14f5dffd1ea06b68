"""Steps of nobody's requests: where their positions lie, and which rows draw."""

from __future__ import annotations

import numpy as np

from engine.trial_steps import trial_step, trial_step_in_one_block


def test_the_positions_of_a_trial_step_lie_where_its_block_tables_say() -> None:
    tables = np.array([[5, 2, 0], [7, 1, 9]], np.int32)
    plan = trial_step(3, [1, 4], [6, 11], tables, block_size=4)
    assert plan.number == 3
    assert plan.positions.tolist() == [5, 7, 8, 9, 10]
    assert plan.slot_mapping.tolist() == [2 * 4 + 1, 1 * 4 + 3, 9 * 4, 9 * 4 + 1, 9 * 4 + 2]
    assert plan.query_start.tolist() == [0, 1, 5]
    assert plan.context_lengths.tolist() == [6, 11]
    assert plan.sample_tokens.tolist() == [0, 4]
    assert plan.sampling.position.tolist() == [6, 11]


def test_a_trial_step_in_one_block_touches_no_other() -> None:
    plan = trial_step_in_one_block(0, [1, 9], [30, 9], block=6, block_size=4)
    assert set((plan.slot_mapping // 4).tolist()) == {6}
    assert plan.block_tables.tolist() == [[6] * 8, [6] * 8]


def test_every_row_of_a_trial_step_draws_greedily_from_no_earlier_step() -> None:
    plan = trial_step_in_one_block(0, [1, 9], [30, 9], block=6, block_size=4)
    assert not plan.sampling.temperature.any()
    assert plan.sampling.logprobs.tolist() == [-1, -1]
    assert set(plan.feedback.tolist()) == {-1}
