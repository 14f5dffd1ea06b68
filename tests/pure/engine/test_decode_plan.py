"""The plan of decode attention covers every context once, longest pieces first, at addresses that depend on its shape alone."""

from __future__ import annotations

import numpy as np
import pytest

from engine.attention.decode_plan import DecodePlan, pieces_at_most, write_decode_plan

BLOCK_SIZE, PLACES, PARTIAL_BYTES = 16, 33, 16384
WORDS = 8192


def planned(counts: list[int]) -> tuple[DecodePlan, np.ndarray]:
    words = np.full(WORDS, -1, np.int32)
    page_start = np.concatenate(([0], np.cumsum(counts))).astype(np.int32) + 7
    return write_decode_plan(words, page_start, BLOCK_SIZE, PLACES, PARTIAL_BYTES), words


def array(plan: DecodePlan, words: np.ndarray, field: int, count: int) -> np.ndarray:
    begin = plan.info[field] // 4
    return words[begin : begin + count]


@pytest.mark.parametrize("case", range(40))
def test_pieces_cover_each_context_once_and_longest_go_first(case: int) -> None:
    rng = np.random.default_rng(case)
    rows = int(rng.integers(1, 300))
    counts = rng.integers(1, int(rng.choice([2, 20, 300])), rows)
    if case % 3 == 0:
        counts[rng.integers(rows)] = 4000
    plan, words = planned(counts.tolist())
    assert plan.words <= WORDS
    pieces = plan.shape.pieces
    valid = words[plan.info[12] // 4 :].view(np.bool_)[:pieces]
    used = int(valid.sum())
    assert valid[:used].all()
    chunk = int(array(plan, words, 9, 1)[0])
    assert chunk % BLOCK_SIZE == 0
    requests, chunks = array(plan, words, 4, used), array(plan, words, 6, used)
    assert sorted(zip(requests.tolist(), chunks.tolist(), strict=True)) == [
        (row, piece) for row in range(rows) for piece in range(-(-int(counts[row]) * BLOCK_SIZE // chunk))
    ]
    lengths = np.minimum(counts[requests] - chunks * (chunk // BLOCK_SIZE), chunk // BLOCK_SIZE)
    assert (np.diff(lengths) <= 0).all()
    outputs = array(plan, words, 8, rows + 1)
    assert np.diff(outputs).tolist() == np.bincount(requests, minlength=rows).tolist()
    assert outputs.tolist() == array(plan, words, 7, rows + 1).tolist()
    assert plan.shape.split == (used > rows) == bool(plan.info[14])
    assert int(array(plan, words, 2, 1)[0]) == rows


def test_plans_of_equal_shape_have_equal_addresses_and_room_for_any_contexts() -> None:
    one, _ = planned([1, 1, 400])
    other, _ = planned([500, 9, 77])
    assert one.shape == other.shape
    assert one.info == other.info
    assert one.shape.pieces == pieces_at_most(3, PLACES)
    short, _ = planned([1, 2, 3])
    assert not short.shape.split
    assert short.shape.pieces == 3
