"""Which block holds the KV of which token history. Whole blocks only.

A block's name is a hash chained over all tokens up to its end, so equal names mean equal histories. The hash is
cryptographic: tokens come from clients, and a collision would serve one client's KV to another.

The index owns no block: the pool asks it to forget a block before handing it out again.

Must not know: reference counts, requests.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from hashlib import blake2b

from foundation.ids import BlockId

DIGEST_BYTES = 32
ROOT = b"decant prefix".ljust(DIGEST_BYTES, b"\0")


def extend_chain(chain: list[bytes], history: array[int], block_size: int, blocks: int) -> None:
    """Append names to `chain` until it covers the first `blocks` whole blocks of `history` (64-bit token ids)."""
    for index in range(len(chain), blocks):
        digest = blake2b(chain[-1] if chain else ROOT, digest_size=DIGEST_BYTES)
        digest.update(history[index * block_size : (index + 1) * block_size])
        chain.append(digest.digest())


class PrefixIndex:
    """A one-to-one map between names and blocks; with `enabled=False` it stays empty."""

    def __init__(self, *, enabled: bool = True) -> None:
        self.enabled = enabled
        self._block_of: dict[bytes, BlockId] = {}
        self._name_of: dict[BlockId, bytes] = {}

    def __contains__(self, block: BlockId) -> bool:
        return block in self._name_of

    def __len__(self) -> int:
        return len(self._name_of)

    def lookup(self, chain: Sequence[bytes]) -> list[BlockId]:
        """Blocks of the longest known prefix of `chain`."""
        blocks: list[BlockId] = []
        for name in chain:
            block = self._block_of.get(name)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def insert(self, name: bytes, block: BlockId) -> None:
        """Name a block that is full and computed. The first block of a name keeps it; a later twin stays nameless."""
        if self.enabled and name not in self._block_of:
            assert block not in self._name_of, f"block {block} has a name already"
            self._block_of[name] = block
            self._name_of[block] = name

    def forget(self, block: BlockId) -> None:
        del self._block_of[self._name_of.pop(block)]

    def blocks(self) -> set[BlockId]:
        return set(self._name_of)

    def check(self) -> None:
        assert len(self._block_of) == len(self._name_of), "two names for a block, or two blocks for a name"
        for block, name in self._name_of.items():
            assert self._block_of[name] == block, f"block {block} is not the one its name leads to"
