"""Every query of a step meets each split of its keys once, in items that the kernel has room for."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from engine.attention.invariant_items import (
    ITEM_WORDS,
    SPLIT,
    rows_aligned,
    write_chunk_items,
    write_decode_items,
)
from engine.build import BuildOptions, build_engine
from foundation.errors import ConfigurationError

WORDS = 1 << 18


def items_of(words: np.ndarray, begin: int = 0) -> np.ndarray:
    count = int(words[begin])
    return words[begin + ITEM_WORDS : begin + (count + 1) * ITEM_WORDS].reshape(count, ITEM_WORDS)


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("block_size", [1, 16, 100, 1000])
def test_a_decode_has_an_item_for_each_split_and_knows_its_position(seed: int, block_size: int) -> None:
    rng = np.random.default_rng(seed)
    rows = int(rng.integers(1, 40))
    contexts = rng.integers(1, 5 * SPLIT, rows)
    counts = -(-contexts // block_size)
    page_start = np.concatenate(([0], np.cumsum(counts))).astype(np.int32)
    words = np.full(WORDS, -9, np.int32)
    used = write_decode_items(words, page_start, block_size)
    assert (words[used:] == -9).all()
    items = items_of(words, 2 * rows_aligned(rows))
    parts = words[: 2 * rows].reshape(rows, 2)
    last = (contexts - 1) % block_size + 1
    for row, context in enumerate(contexts.tolist()):
        mine = items[items[:, 0] == row]
        assert (mine[:, 1] == 1).all()
        assert (mine[:, 2] + last[mine[:, 7]] == context - 1).all()
        assert (mine[:, 3] == page_start[row]).all()
        assert mine[:, 4].tolist() == list(range(len(mine)))
        assert (mine[:, 5] == mine[:, 4] + 1).all()
        assert len(mine) * SPLIT >= context
        first, joined = parts[row].tolist()
        places = [-1] if len(mine) == 1 else list(range(first, first + joined))
        assert mine[:, 6].tolist() == places
    placed = items[items[:, 6] >= 0, 6]
    assert len(set(placed.tolist())) == len(placed)


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("item_queries", [1, 4, 16])
def test_chunks_are_cut_into_items_that_hold_every_query_once_the_longest_first(seed: int, item_queries: int) -> None:
    rng = np.random.default_rng(seed)
    rows = int(rng.integers(1, 12))
    counts = rng.integers(1, 200, rows)
    contexts = (counts + rng.integers(0, 3 * SPLIT, rows)).astype(np.int32)
    query_start = np.concatenate(([0], np.cumsum(counts))).astype(np.int32)
    page_start = (np.arange(rows + 1) * 300 + 7).astype(np.int32)
    words = np.full(WORDS, -9, np.int32)
    assert write_chunk_items(words, query_start, page_start, contexts, item_queries) == words[0]
    items, positions, pages = items_of(words), np.full(query_start[-1], -1), np.full(query_start[-1], -1)
    assert (words[(len(items) + 1) * ITEM_WORDS :] == -9).all()
    for first, count, position, page, first_split, end_split, place, row in items.tolist():
        assert 1 <= count <= item_queries
        assert (positions[first : first + count] == -1).all()
        positions[first : first + count] = np.arange(position, position + count)
        pages[first : first + count] = page
        assert (first_split, place, row) == (0, -1, -1)
        assert (end_split - 1) * SPLIT < position + count <= end_split * SPLIT
    want = np.concatenate([np.arange(end - n, end) for n, end in zip(counts, contexts, strict=True)])
    assert positions.tolist() == want.tolist()
    assert pages.tolist() == np.repeat(page_start[:-1], counts).tolist()
    assert (np.diff(items[:, 2] + items[:, 1]) <= 0).all()


def test_a_cpu_refuses_to_promise_equal_bits() -> None:
    with pytest.raises(ConfigurationError, match="--batch-invariant: needs a GPU"):
        build_engine(BuildOptions(model=Path("nowhere"), batch_invariant=True))
