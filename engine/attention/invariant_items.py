"""A step cut into items, each a few queries of one sequence and some splits of its keys, which
`engine.kernels.invariant_attention` works on. Pure numbers.

An item has `ITEM_WORDS` int32 words: first token, queries, position of the first query (less what the row's last page holds,
where the last word names a row), first of the row's pages, first split, end split, place of the partial result (-1: it is the
result), row whose last page's length is to be added (-1: none). Item i begins at word (i + 1) * ITEM_WORDS; word 0 is the
number of items.

How a step is cut decides nothing about a bit of its results: splits lie at fixed positions, and an item's queries do not meet.

Must not know: torch, devices.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Int32 = npt.NDArray[np.int32]

SPLIT = 1024
"""Positions, counted from the first of the sequence."""
ITEM_ROWS = 64
"""Queries of an item times the query heads of a KV head, which are padded to a power of two."""
ITEM_WORDS = 8
_ALIGNED_ROWS = 8


def rows_aligned(rows: int) -> int:
    """Rows whose parts have room before the items, so that items begin where the kernel expects them: at 16 bytes' multiples."""
    return -(-rows // _ALIGNED_ROWS) * _ALIGNED_ROWS


def write_decode_items(out: Int32, page_start: Int32, block_size: int) -> int:
    """Parts and items of one query for each row with pages `page_start` [R + 1]; returns the words written.

    A row of one split has no partial result. A context that fills its last page less than wholly may have a last item without
    keys, which adds nothing.
    """
    counts = np.diff(page_start)
    rows = len(counts)
    splits = -(-counts * block_size // SPLIT)
    first = np.zeros(rows + 1, np.int32)
    np.cumsum(splits, out=first[1:])
    total = int(first[-1])
    parts = out[: 2 * rows].reshape(rows, 2)
    parts[:, 0] = first[:-1]
    parts[:, 1] = np.where(splits > 1, splits, 0)
    begin = 2 * rows_aligned(rows)
    out[begin] = total
    row = np.repeat(np.arange(rows, dtype=np.int32), splits)
    place = np.arange(total, dtype=np.int32)
    split = place - first[row]
    end = begin + (total + 1) * ITEM_WORDS
    items = out[begin + ITEM_WORDS : end].reshape(total, ITEM_WORDS)
    items[:, 0] = row
    items[:, 1] = 1
    items[:, 2] = (counts[row] - 1) * block_size - 1
    items[:, 3] = page_start[row]
    items[:, 4] = split
    items[:, 5] = split + 1
    items[:, 6] = np.where(splits[row] > 1, place, -1)
    items[:, 7] = row
    return end


def write_chunk_items(
    out: Int32, query_start: Int32, page_start: Int32, context_lengths: Int32, item_queries: int
) -> int:
    """Items of at most `item_queries` queries, those with most keys first; returns their number."""
    counts = np.diff(query_start)
    tiles = -(-counts // item_queries)
    first = np.zeros(len(counts) + 1, np.int32)
    np.cumsum(tiles, out=first[1:])
    total = int(first[-1])
    row = np.repeat(np.arange(len(counts), dtype=np.int32), tiles)
    offset = (np.arange(total, dtype=np.int32) - first[row]) * item_queries
    count = np.minimum(counts[row] - offset, item_queries)
    position = context_lengths[row] - counts[row] + offset
    order = np.argsort(-(position + count), kind="stable")
    out[0] = total
    items = out[ITEM_WORDS : (total + 1) * ITEM_WORDS].reshape(total, ITEM_WORDS)
    items[:, 0] = (query_start[row] + offset)[order]
    items[:, 1] = count[order]
    items[:, 2] = position[order]
    items[:, 3] = page_start[row][order]
    items[:, 4] = 0
    items[:, 5] = -(-(position + count)[order] // SPLIT)
    items[:, 6] = -1
    items[:, 7] = -1
    return total
