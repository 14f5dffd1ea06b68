"""The blocks of one transfer, as its copies read them: made once, when they are reserved, for every parcel.

Must not know: pools, devices, the protocol's states.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kv_transfer.plan.parcels import ParcelName


@dataclass(frozen=True, slots=True, eq=False)
class TransferBlocks:
    """`ids` [n] int64: the blocks that cover positions [0, ...) in order. `owner_words` uint64: what P's blocks must hold while
    they are read, [n]; none on D, to which its blocks belong until the transfer commits."""

    ids: npt.NDArray[np.int64]
    owner_words: npt.NDArray[np.uint64]

    @classmethod
    def of(cls, block_ids: npt.ArrayLike, owner_words: npt.ArrayLike = ()) -> TransferBlocks:
        return cls(np.asarray(block_ids, np.int64), np.asarray(owner_words, np.uint64))

    def covering(self, parcel: ParcelName, block_size: int) -> slice:
        """The part that holds the parcel's positions."""
        first, end = parcel.first_position // block_size, -(-parcel.end_position // block_size)
        assert end <= len(self.ids), f"{parcel} ends beyond {len(self.ids)} blocks of {block_size}"
        return slice(first, end)


NO_BLOCKS = TransferBlocks.of(())
