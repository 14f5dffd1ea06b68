"""Which thread block attends to which piece of which context: the plan that FlashInfer's tensor-core decode kernel follows.

Contexts are cut into chunks of one size, an equal share of all pages for each of the GPU's places, and longest pieces go first.
FlashInfer's own planner cuts only batches that do not fill the GPU, and keeps their order, so that one long context, or an
unlucky order of unequal ones, leaves most of the GPU idle. Smaller chunks would balance better, but a cut context costs a merge:
on an H200 one share a place was the fastest or near it for every batch tried (docs/performance.md).

The layout of the words is that of `PrefillPlanInfo` in FlashInfer 0.6.14 (include/flashinfer/attention/scheduler.cuh).

Must not know: torch, devices.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Int32 = npt.NDArray[np.int32]

PIECES_A_PLACE = 1
LEAST_CHUNK_PAGES = 8
ROW_TILE = 16
"""Query heads of one KV head that one thread block takes."""
_ALIGNED_WORDS = 4


@dataclass(frozen=True, slots=True)
class DecodeShape:
    """What a plan's addresses depend on: equal shapes may share a captured graph."""

    rows: int
    pieces: int
    """Thread blocks for each KV head, unused ones included."""
    split: bool
    """Some context is cut, so partial results are merged."""


@dataclass(frozen=True, slots=True)
class DecodePlan:
    shape: DecodeShape
    info: list[int]
    """The kernel's view: sizes and byte offsets into the words."""
    words: int


def pieces_at_most(rows: int, places: int) -> int:
    return rows + PIECES_A_PLACE * places


def write_decode_plan(out: Int32, page_start: Int32, block_size: int, places: int, partial_bytes: int) -> DecodePlan:
    """Plan for rows with pages `page_start` [R + 1] into `out`, which must hold it.

    `places`: thread blocks of one KV head that run at once. `partial_bytes`: bytes of one piece's partial result, which
    for all pieces come first in the float workspace, their sums of exponentials behind them.
    """
    counts = np.diff(page_start)
    rows = len(counts)
    chunk = max(LEAST_CHUNK_PAGES, -(-int(page_start[-1] - page_start[0]) // (places * PIECES_A_PLACE)))
    chunks = -(-counts // chunk)
    split = bool((chunks > 1).any())
    pieces = pieces_at_most(rows, places) if split else rows
    shape = DecodeShape(rows, pieces, split)
    layout = _Layout(shape)
    first_piece = np.zeros(rows + 1, np.int32)
    np.cumsum(chunks, out=first_piece[1:])
    used = int(first_piece[-1])
    row_of_piece = np.repeat(np.arange(rows, dtype=np.int32), chunks)
    piece_of_row = np.arange(used, dtype=np.int32) - first_piece[row_of_piece]
    length = np.minimum(counts[row_of_piece] - piece_of_row * chunk, chunk)
    order = np.argsort(-length, kind="stable")
    out[: layout.end] = 0
    out[layout.requests : layout.requests + used] = row_of_piece[order]
    out[layout.chunks : layout.chunks + used] = piece_of_row[order]
    out[layout.outputs : layout.outputs + rows + 1] = first_piece
    out[layout.merges : layout.merges + rows + 1] = first_piece
    out[layout.chunk_size] = chunk * block_size
    out[layout.rows] = rows
    out[layout.valid : layout.end].view(np.bool_)[:used] = True
    return DecodePlan(shape, layout.info(partial_bytes), layout.end)


class _Layout:
    """Word offsets of a plan's arrays."""

    def __init__(self, shape: DecodeShape) -> None:
        self._shape = shape
        self.end = 0
        self.requests = self._take(shape.pieces)
        self.tiles = self._take(shape.pieces)
        self.chunks = self._take(shape.pieces)
        self.outputs = self._take(shape.rows + 1)
        self.merges = self._take(shape.rows + 1)
        self.chunk_size = self._take(1)
        self.rows = self._take(1)
        self.valid = self._take(-(-shape.pieces // 4))

    def _take(self, words: int) -> int:
        begin = self.end
        self.end = -(-(begin + words) // _ALIGNED_WORDS) * _ALIGNED_WORDS
        return begin

    def info(self, partial_bytes: int) -> list[int]:
        shape = self._shape
        return [
            shape.pieces,
            shape.rows,
            4 * self.rows,
            ROW_TILE,
            4 * self.requests,
            4 * self.tiles,
            4 * self.chunks,
            4 * self.merges,
            4 * self.outputs,
            4 * self.chunk_size,
            0,
            shape.pieces * partial_bytes,
            4 * self.valid,
            1,
            int(shape.split),
        ]
