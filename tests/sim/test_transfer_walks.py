"""Random walks through worlds that are too large to be searched: many transfers, chunks, slots, and misfortunes together."""

from __future__ import annotations

import random

import pytest
from transfer_actions import apply
from transfer_invariants import check
from transfer_world import (
    Action,
    Budget,
    Plan,
    World,
    actions,
    at_rest,
    is_progress,
    new_world,
    transfer,
    waits_for_nobody,
)

SEEDS = 150
STEPS_LIMIT = 4000
MISFORTUNE = 0.08
"""Chance of a misfortune, while the budget has one, at each step."""


def random_world(dice: random.Random) -> World:
    positions = dice.randint(1, 5)
    plan = Plan(
        transfers=tuple(transfer(f"r{index % 3}", attempt=1 + index // 3) for index in range(dice.randint(1, 5))),
        positions=positions,
        chunk=dice.randint(1, positions),
        cached=dice.randint(0, positions) if dice.random() < 0.3 else 0,
        slots=dice.choice((1, 2, 3, 4, 8, 9)),
        sending_slots=dice.randint(1, 4),
        lane=dice.choice(("close_fences", "receiver_reads", "sender_writes")),
        parcels_per_position=dice.randint(1, 2),
        declines=dice.random() < 0.2,
        one_by_one=dice.random() < 0.3,
        by_layer=dice.random() < 0.5,
    )
    return new_world(plan, Budget(*(dice.randint(0, 2) for _ in Budget._fields)))


def walk(seed: int) -> tuple[World, list[Action]]:
    """A world that was harassed for a while and then left alone."""
    dice = random.Random(seed)
    world = random_world(dice)
    path: list[Action] = []
    for step in range(STEPS_LIMIT):
        assert not waits_for_nobody(world), "all is quiet, everybody is alive, and the world is not at rest"
        found = sorted(actions(world), key=repr)  # sets of names have no order of their own: a seed must mean one walk
        progress = [action for action in found if is_progress(action)]
        misfortunes = [action for action in found if not is_progress(action)]
        if misfortunes and step < STEPS_LIMIT // 2 and dice.random() < MISFORTUNE:
            action = dice.choice(misfortunes)
        elif at_rest(world) and not world.to_begin:
            return world, path
        else:
            assert progress, "nothing can happen, and the world is not at rest"
            action = dice.choice(progress)
        path.append(action)
        world, _ = apply(world, action)
        check(world)
    return world, path


@pytest.mark.parametrize("chunk", range(10))
def test_every_walk_keeps_the_invariants_and_comes_to_rest(chunk: int) -> None:
    for seed in range(chunk, SEEDS, 10):
        try:
            world, path = walk(seed)
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from error
        assert at_rest(world), f"seed {seed}: not at rest after {len(path)} steps"
