"""The batch's copy of who holds which blocks, as one array, so that a step's plan is made by indexing.

Row = seat in the batch. Entries beyond a row's blocks are stale and never read: a plan reads positions below a row's length.

Must not know: pools, requests.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from foundation.ids import BlockId

Int32 = npt.NDArray[np.int32]
Int64 = npt.NDArray[np.int64]


class BlockTable:
    def __init__(self, rows: int, blocks_per_row: int, block_size: int) -> None:
        self.block_size = block_size
        self.counts = np.zeros(rows, np.int64)
        self._blocks = np.zeros((rows, blocks_per_row), np.int32)

    def assign(self, row: int, blocks: Sequence[BlockId]) -> None:
        self.counts[row] = 0
        self.append(row, blocks)

    def append(self, row: int, blocks: Sequence[BlockId]) -> None:
        start = self.counts[row]
        self._blocks[row, start : start + len(blocks)] = blocks
        self.counts[row] = start + len(blocks)

    def slots(self, rows: Int64, positions: Int64) -> Int64:
        """Where the KV of each (row, position) goes: block id * block_size + offset. Shapes [T]."""
        blocks, offsets = np.divmod(positions, self.block_size)
        return self._blocks[rows, blocks].astype(np.int64) * self.block_size + offsets

    def rows(self, rows: Int64, lengths: Int64) -> Int32:
        """Block ids of each row up to its length, shape [R, most blocks of a row], padded with 0."""
        blocks = -(-lengths // self.block_size)
        width = int(blocks.max(initial=0))
        table = self._blocks[rows, :width]
        table[np.arange(width) >= blocks[:, None]] = 0
        return table
