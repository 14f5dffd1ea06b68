"""Who owns which block of KV. Accounting only: the bytes are storage's.

A block is in exactly one of four places:

- free:      nobody's, nothing of worth in it
- cached:    nobody's, but named in the prefix index; the least recently used goes first when free ones run out
- settling:  nobody's any more, but a launched step may still touch it; becomes cached or free when that step has settled
- in use:    referenced by one or more requests

free + cached + in use = total, with the settling ones counted as in use. A block leaves `free` or `cached` for a new owner
only, and then gets a new owner word, a number never given before, in the array that its bytes' storage keeps: whoever reads
the block later can tell whether it is still the one that was meant.

Must not know: requests, torch, what a step does.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from engine.kv_cache.prefix_index import PrefixIndex
from foundation.ids import BlockId

UInt64 = npt.NDArray[np.uint64]


class BlockPool:
    def __init__(self, owner_words: UInt64, index: PrefixIndex) -> None:
        """`owner_words`: shape [blocks]; this pool is its only writer."""
        self.total = len(owner_words)
        self.index = index
        self._owner_words = owner_words
        self._next_owner_word = 1
        self._references = [0] * self.total
        self._free = [BlockId(block) for block in reversed(range(self.total))]
        self._cached: dict[BlockId, None] = {}
        self._settling: dict[BlockId, int] = {}
        self._settled_step = 0

    @property
    def free(self) -> int:
        return len(self._free)

    @property
    def cached(self) -> int:
        return len(self._cached)

    @property
    def settling(self) -> int:
        return len(self._settling)

    @property
    def in_use(self) -> int:
        return self.total - len(self._free) - len(self._cached)

    @property
    def available(self) -> int:
        """Blocks that could be handed out now."""
        return len(self._free) + len(self._cached)

    def acquire(self, shared: Sequence[BlockId], fresh: int, spare: int = 0) -> list[BlockId] | None:
        """References on the `shared` (indexed) blocks and on `fresh` new ones, in this order; or None, and nothing happens.

        `spare` blocks must be left available.
        """
        revived = sum(1 for block in shared if block in self._cached)
        if self.available - revived < fresh + spare:
            return None
        for block in shared:
            if not self._references[block]:
                self._settling.pop(block, None)
                self._cached.pop(block, None)
            self._references[block] += 1
        return [*shared, *(self._hand_out() for _ in range(fresh))]

    def _hand_out(self) -> BlockId:
        if self._free:
            block = self._free.pop()
        else:
            block = next(iter(self._cached))
            del self._cached[block]
            self.index.forget(block)
        assert not self._references[block], f"block {block} still has an owner"
        self._references[block] = 1
        self._owner_words[block] = self._next_owner_word
        self._next_owner_word += 1
        return block

    def release(self, blocks: Iterable[BlockId], last_step: int) -> None:
        """Give one reference on each block back; `last_step` is the last launched step that may touch them.

        Blocks are taken in order of position; the last becomes the least recently used, so that prefixes outlive their
        continuations.
        """
        for block in reversed(list(blocks)):
            assert self._references[block] > 0, f"block {block} has no owner to give it back"
            self._references[block] -= 1
            if self._references[block]:
                continue
            if last_step > self._settled_step:
                self._settling[block] = last_step
            else:
                self._retire(block)

    def settle(self, step: int) -> None:
        """Steps up to this one have finished on the device."""
        assert step >= self._settled_step, f"step {step} settled after step {self._settled_step}"
        self._settled_step = step
        # Steps are launched in order, so the settling ones lie in order of their fence.
        while self._settling:
            block, last_step = next(iter(self._settling.items()))
            if last_step > step:
                return
            del self._settling[block]
            self._retire(block)

    def _retire(self, block: BlockId) -> None:
        if block in self.index:
            self._cached[block] = None
        else:
            self._free.append(block)

    def is_private(self, block: BlockId) -> bool:
        """Whether its one owner may write into it: nobody else reads it now or may find it in the index."""
        return self._references[block] == 1 and block not in self.index

    def owner_words(self, blocks: Sequence[BlockId]) -> tuple[int, ...]:
        return tuple(self._owner_words[np.array(blocks, np.int64)].tolist())

    def check(self, owned: Iterable[BlockId]) -> None:
        """Prove the books: `owned` are all blocks that requests hold, once for each holder."""
        references = [0] * self.total
        for block in owned:
            references[block] += 1
        assert references == self._references, "references differ from what requests hold"
        held = {block for block, count in enumerate(references) if count}
        places = (set(self._free), set(self._cached), set(self._settling), held)
        assert len(self._free) == len(places[0]), "a block is free twice"
        assert sum(len(place) for place in places) == self.total, "free + cached + in use differs from total"
        assert set().union(*places) == set(range(self.total)), "a block is nowhere"
        self.index.check()
        assert places[1] <= self.index.blocks(), "a cached block has no name"
        assert not places[0] & self.index.blocks(), "a free block has a name"
        assert all(step > self._settled_step for step in self._settling.values()), "a settled block was not given back"
        words = self._owner_words[np.fromiter(held | places[1] | places[2], np.int64)]
        assert np.all(words > 0), "a block was handed out without an owner word"
        assert np.all(words < self._next_owner_word), "an owner word is from the future"
        assert len(np.unique(words)) == len(words), "two blocks share an owner word"
