"""The digests of a transfer's parcels: an immutable mapping, whatever order they come in."""

from __future__ import annotations

import random

from kv_transfer.plan.parcels import PARCELS_AT_MOST
from kv_transfer.protocol.digests import PARCELS_A_PAGE, Digests


def filled(order: list[int]) -> Digests:
    digests = Digests()
    for index in order:
        digests = digests.put(index, index + 1)
    return digests


def test_they_hold_what_a_dict_would_and_no_copy_changes_another() -> None:
    dice = random.Random(1)
    digests, expected = Digests(), dict[int, int]()
    for _ in range(2000):
        before, was = digests, dict(expected)
        index = dice.randrange(3 * PARCELS_A_PAGE)
        if index in expected and dice.random() < 0.5:
            digests = digests.drop(index)
            del expected[index]
        else:
            expected[index] = dice.getrandbits(64)
            digests = digests.put(index, expected[index])
        assert (dict(before), len(before)) == (was, len(was))
        assert (dict(digests), len(digests)) == (expected, len(expected))


def test_the_order_in_which_parcels_come_makes_no_difference() -> None:
    order = list(range(200))
    shuffled = random.Random(2).sample(order, len(order))
    one, other = filled(order), filled(shuffled)
    assert one == other
    assert hash(one) == hash(other)
    assert one != other.drop(7)
    assert one == other.drop(7).put(7, 8)
    assert Digests() == filled([5]).drop(5)


def test_a_digest_more_copies_a_page_and_the_list_of_pages() -> None:
    assert PARCELS_AT_MOST // PARCELS_A_PAGE <= 256
    before = filled(list(range(10 * PARCELS_A_PAGE)))
    after = before.put(10 * PARCELS_A_PAGE, 0)
    assert all(after._pages[page] is before._pages[page] for page in range(10))
