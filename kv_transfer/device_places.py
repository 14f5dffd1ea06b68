"""What one copy on a GPU is told and tells, and where that lies: in pinned memory, so that nothing is copied to or fro.

Must not know: torch, Triton, pools.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

WORD_BYTES = 8
_SEED, _DIGEST, _TRAILER, _BLOCKS = 0, 1, 2, 3


@dataclass(frozen=True, slots=True)
class ParcelPlace:
    """Addresses of what one copy reads and writes: `message` (payload and trailer), `blocks` (int32, those that cover the
    parcel's positions), `expected` (int64, their owner words), `seed` (int64), `outcome` (int64 [2]: the digest, and what
    stands in the trailer). All but the message may be pinned memory."""

    message: int
    blocks: int
    expected: int
    seed: int
    outcome: int
    block_count: int


def place_words(blocks: int) -> int:
    """How long a place is for copies of at most so many blocks: even, so that all of a row of places begin at multiples of 16."""
    words = _BLOCKS + blocks + -(-blocks // 2)
    return words + words % 2


class PinnedPlace:
    """One copy's seed; the digest, the trailer; owner words, block ids."""

    def __init__(self, words: npt.NDArray[np.uint64]) -> None:
        """`words`: `place_words` of the memory, contiguous."""
        self._words = words
        self.address = words.ctypes.data

    def write(
        self, seed: int, ids: npt.NDArray[np.int64], owner_words: npt.NDArray[np.uint64], message: int
    ) -> ParcelPlace:
        """`owner_words` may be none; the ids lie behind as many words as there are ids."""
        self._words[_SEED] = seed
        ids_at = _BLOCKS + len(ids)
        self._words[_BLOCKS : _BLOCKS + len(owner_words)] = owner_words
        self._words[ids_at:].view(np.int32)[: len(ids)] = ids
        return ParcelPlace(
            message=message,
            blocks=self.address + WORD_BYTES * ids_at,
            expected=self.address + WORD_BYTES * _BLOCKS,
            seed=self.address + WORD_BYTES * _SEED,
            outcome=self.address + WORD_BYTES * _DIGEST,
            block_count=len(ids),
        )

    def outcome(self) -> tuple[int, int]:
        """Digest and trailer, once the copy has ended."""
        return int(self._words[_DIGEST]), int(self._words[_TRAILER])
