"""The pool's books, one fact a test."""

from __future__ import annotations

from array import array

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from engine.kv_cache.block_pool import BlockPool
from engine.kv_cache.prefix_index import PrefixIndex, extend_chain
from foundation.ids import BlockId


def pool_of(blocks: int) -> tuple[BlockPool, np.ndarray]:
    words = np.zeros(blocks, np.uint64)
    return BlockPool(words, PrefixIndex()), words


def take(pool: BlockPool, fresh: int) -> list[BlockId]:
    blocks = pool.acquire((), fresh)
    assert blocks is not None
    return blocks


def test_more_than_is_available_is_refused_whole() -> None:
    pool, _ = pool_of(4)
    assert pool.acquire((), 5) is None
    assert pool.acquire((), 4, spare=1) is None
    assert (pool.free, pool.in_use) == (4, 0)


def test_f15_a_block_is_handed_out_again_only_after_the_last_step_that_may_touch_it() -> None:
    pool, _ = pool_of(1)
    blocks = take(pool, 1)
    pool.settle(1)
    pool.release(blocks, last_step=3)
    assert pool.acquire((), 1) is None
    pool.settle(2)
    assert pool.acquire((), 1) is None
    assert pool.in_use == 1
    pool.settle(3)
    assert pool.acquire((), 1) == blocks


def test_each_owner_of_a_block_has_its_own_word() -> None:
    pool, words = pool_of(1)
    seen = set()
    for _ in range(3):
        blocks = take(pool, 1)
        seen.add(pool.owner_words(blocks))
        assert pool.owner_words(blocks) == (int(words[0]),)
        pool.release(blocks, 0)
    assert len(seen) == 3


def test_a_cached_block_keeps_its_word_for_whoever_shares_it() -> None:
    pool, _ = pool_of(2)
    blocks = take(pool, 1)
    words = pool.owner_words(blocks)
    pool.index.insert(b"name", blocks[0])
    pool.release(blocks, 0)
    assert pool.acquire(blocks, 0) == blocks
    assert pool.owner_words(blocks) == words


def test_free_blocks_go_first_then_the_least_recently_used_cached_ones_ends_before_beginnings() -> None:
    pool, _ = pool_of(4)
    old, new = take(pool, 2), take(pool, 1)
    for block in (*old, *new):
        pool.index.insert(bytes([block]), block)
    pool.release(old, 0)
    pool.release(new, 0)
    assert take(pool, 1) == [BlockId(3)]
    assert take(pool, 3) == [old[1], old[0], new[0]]
    assert len(pool.index) == 0


def test_a_settling_block_that_is_found_in_the_index_is_shared_at_once_and_not_freed_later() -> None:
    pool, _ = pool_of(1)
    blocks = take(pool, 1)
    pool.index.insert(b"name", blocks[0])
    pool.release(blocks, last_step=1)
    assert pool.acquire(blocks, 0) == blocks
    pool.settle(1)
    pool.check(blocks)
    assert (pool.in_use, pool.cached) == (1, 0)


def test_blocks_that_are_shared_do_not_count_as_room_for_fresh_ones() -> None:
    pool, _ = pool_of(2)
    blocks = take(pool, 1)
    pool.index.insert(b"name", blocks[0])
    pool.release(blocks, 0)
    assert pool.acquire(blocks, 2) is None
    assert pool.cached == 1


def test_giving_back_what_nobody_holds_is_a_bug() -> None:
    pool, _ = pool_of(1)
    blocks = take(pool, 1)
    pool.release(blocks, 0)
    with pytest.raises(AssertionError, match="no owner"):
        pool.release(blocks, 0)


def test_the_books_notice_a_forgotten_reference() -> None:
    pool, _ = pool_of(3)
    take(pool, 1)
    with pytest.raises(AssertionError, match="references differ"):
        pool.check(())


def test_the_first_block_of_a_name_keeps_it() -> None:
    index = PrefixIndex()
    index.insert(b"name", BlockId(1))
    index.insert(b"name", BlockId(2))
    assert index.lookup([b"name"]) == [1]
    assert BlockId(2) not in index


def test_a_switched_off_index_knows_nothing() -> None:
    index = PrefixIndex(enabled=False)
    index.insert(b"name", BlockId(1))
    assert index.lookup([b"name"]) == []


def test_a_blocks_name_depends_on_everything_before_it() -> None:
    chains: list[list[bytes]] = [[], [], []]
    for chain, tokens in zip(chains, ((1, 2, 3, 4), (9, 2, 3, 4), (1, 2, 3, 5)), strict=True):
        extend_chain(chain, array("q", tokens), 2, 2)
    assert chains[0][0] == chains[2][0] != chains[1][0]
    assert len({chain[1] for chain in chains}) == 3


def test_a_chain_grows_to_the_same_names_step_by_step() -> None:
    history = array("q", range(12))
    at_once: list[bytes] = []
    extend_chain(at_once, history, 4, 3)
    slowly: list[bytes] = []
    for blocks in range(4):
        extend_chain(slowly, history, 4, blocks)
    assert slowly == at_once


class PoolWalk(RuleBasedStateMachine):
    """Holders take, share, name and give back in any order, while steps are launched and settle."""

    holders = Bundle("holders")

    def __init__(self) -> None:
        super().__init__()
        self.pool, _ = pool_of(6)
        self.held: list[list[BlockId]] = []
        self.launched = self.settled = 0
        self.fences: dict[BlockId, int] = {}
        self.names = 0

    def _fenced(self, blocks: list[BlockId]) -> None:
        for block in blocks:
            assert self.fences.pop(block, 0) <= self.settled, "handed out under a launched step"

    @rule(target=holders, fresh=st.integers(0, 4))
    def take(self, fresh: int) -> list[BlockId]:
        blocks = self.pool.acquire((), fresh) or []
        self._fenced(blocks)
        self.held.append(blocks)
        return blocks

    @rule(target=holders, fresh=st.integers(0, 2), data=st.data())
    def share(self, fresh: int, data: st.DataObject) -> list[BlockId]:
        named = sorted(self.pool.index.blocks())
        shared = data.draw(st.lists(st.sampled_from(named), unique=True, max_size=3)) if named else []
        blocks = self.pool.acquire(shared, fresh) or []
        self._fenced(blocks[len(shared) :])
        self.held.append(blocks)
        return blocks

    @rule(holder=holders)
    def name(self, holder: list[BlockId]) -> None:
        for block in holder:
            if block not in self.pool.index:
                self.names += 1
                self.pool.index.insert(self.names.to_bytes(4, "big"), block)

    @rule(holder=consumes(holders))
    def give_back(self, holder: list[BlockId]) -> None:
        self.held = [blocks for blocks in self.held if blocks is not holder]
        self.pool.release(holder, self.launched)
        for block in holder:
            self.fences[block] = self.launched

    @rule()
    def launch(self) -> None:
        self.launched += 1

    @rule()
    def settle(self) -> None:
        self.settled = min(self.settled + 1, self.launched)
        self.pool.settle(self.settled)

    @invariant()
    def books_balance(self) -> None:
        self.pool.check(block for blocks in self.held for block in blocks)
        assert self.pool.free + self.pool.cached + self.pool.in_use == self.pool.total


PoolWalk.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestPoolWalk = PoolWalk.TestCase
