"""What the order-free digest depends on: every bit, its place, the seed and the length; and on no order of summation."""

from __future__ import annotations

import numpy as np

from kv_transfer.device_digest import MASK, finish, nh_sum, payload_digest


def payload(words: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, words * 8).astype(np.uint8)


def test_every_bit_of_a_word_counts() -> None:
    data = payload(64)
    sound = payload_digest(5, data)
    for bit in range(64):
        data[8 * 17 + bit // 8] ^= 1 << bit % 8
        assert payload_digest(5, data) != sound
        data[8 * 17 + bit // 8] ^= 1 << bit % 8


def test_the_same_words_in_another_order_have_another_digest() -> None:
    data = payload(64)
    swapped = data.reshape(-1, 8)[::-1].reshape(-1).copy()
    assert payload_digest(5, data) != payload_digest(5, swapped)


def test_seed_and_length_count() -> None:
    data = payload(32)
    assert payload_digest(5, data) != payload_digest(6, data)
    zeros = [payload_digest(5, np.zeros(8 * words, np.uint8)) for words in (1, 2, 3, 4)]
    assert len(set(zeros)) == 4


def test_sums_of_parts_make_the_whole() -> None:
    """What lets thread blocks sum in any order: a word's term depends on its place and on nothing else."""
    data = payload(100)
    whole = nh_sum(9, data)
    first, last = data.copy(), data.copy()
    first[400:], last[:400] = 0, 0
    nothing = nh_sum(9, np.zeros_like(data))
    assert (nh_sum(9, first) + nh_sum(9, last) - nothing) & MASK == whole
    assert payload_digest(9, data) == finish(whole, data.size)


def test_random_payloads_collide_nowhere() -> None:
    assert len({payload_digest(1, payload(16, seed)) for seed in range(3000)}) == 3000
