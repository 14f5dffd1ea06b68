"""The search over small worlds finds nothing wrong with the machines, and everything that is planted into them."""

from __future__ import annotations

import pytest
from explorer import WORLDS, explore
from mutants import MUTANTS, Mutant, hunt

QUICK = (
    "quiet",
    "abort and failure",
    "repeat",
    "wrong source",
    "send refused",
    "receive fails",
    "unavailable",
    "endpoint",
    "prefill node dies",
    "early layers, prefill fails",
    "early layers, prefill node dies",
    "decode node dies",
    "hang",
    "sender writes, endpoint",
    "sender writes, death",
    "receiver reads, endpoint",
    "one slot, abort",
    "everything is cached",
)
"""Worlds that are searched in full in seconds; `make explore` searches all of them."""


@pytest.mark.parametrize("name", QUICK)
def test_no_interleaving_breaks_an_invariant_and_rest_stays_reachable(name: str) -> None:
    found = explore(*WORLDS[name])
    assert not found.violation, f"{found.violation}: {found.trace}"
    assert found.complete


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_the_search_finds_the_planted_bug(mutant: Mutant) -> None:
    assert hunt(mutant).violation, f"survived: {mutant.name}"


def test_the_worlds_of_the_mutants_are_sound_without_them() -> None:
    for plan, budget in {mutant.world for mutant in MUTANTS} - set(WORLDS.values()):
        found = explore(plan, budget)
        assert not found.violation, f"{found.violation}: {found.trace}"
