# ruff: noqa: T201 - a verb that prints its figures
"""Breadth-first search through every interleaving of a small world (`transfer_world`), with the real protocol machines.

In every state the invariants are checked; at the end, that rest is reachable from every state by what happens by itself
(progress and deadlines, no misfortune). Where a search stops before it has seen everything, each state on its border is
followed to rest instead, which proves it for all states seen. A violation is shown as the shortest list of actions that
leads to it.

    python tests/sim/explorer.py [--states N] [--world NAME] [--jobs N]
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from array import array
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from multiprocessing import get_context

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

BORDER_LIMIT = 500
"""Steps within which a state on the border must come to rest."""


@dataclass(frozen=True)
class Found:
    """What a search has seen. `complete`: every reachable state was visited. `violation` is "" or names the invariant, and
    `trace` is then the way there; `stuck` counts states that were not shown to reach rest."""

    states: int
    transitions: int
    complete: bool
    stuck: int
    violation: str
    trace: tuple[Action, ...]


class Search:
    def __init__(self, start: World, limit: int) -> None:
        self.limit = limit
        self.identity: dict[int, int] = {}
        self.parents: array[int] = array("q")
        self.came_by: list[Action] = []
        self.sources: array[int] = array("q")
        self.targets: array[int] = array("q")
        self.resting: list[int] = []
        self.transitions = 0
        self.frontier: list[tuple[int, World]] = []
        self._visit(start, -1, ())

    def run(self) -> Found:
        while self.frontier and len(self.parents) < self.limit:
            layer, self.frontier = self.frontier, []
            for number, world in layer:
                violation, action = self._expand(number, world)
                if violation:
                    trace = (*self._trace(number), *([action] if action else []))
                    return Found(len(self.parents), self.transitions, False, 0, violation, trace)
        complete = not self.frontier
        violation, trace = self._follow_border()
        stuck = [] if violation else self._stuck()
        if stuck:
            violation, trace = "I7: rest cannot be reached", self._trace(stuck[0])
        return Found(len(self.parents), self.transitions, complete, len(stuck), violation, trace)

    def _expand(self, number: int, world: World) -> tuple[str, Action]:
        found = actions(world)
        if waits_for_nobody(world):
            return "I7: all is quiet, everybody is alive, and it is not at rest", ()
        for action in found:
            try:
                following, _ = apply(world, action)
                check(following)
            except (AssertionError, KeyError, IndexError) as error:
                return f"{type(error).__name__}: {error}", action
            self.transitions += 1
            target = self._visit(following, number, action)
            if is_progress(action):
                self.sources.append(number)
                self.targets.append(target)
        return "", ()

    def _visit(self, world: World, parent: int, action: Action) -> int:
        key = hash(world)
        number = self.identity.get(key)
        if number is None:
            number = len(self.parents)
            self.identity[key] = number
            self.parents.append(parent)
            self.came_by.append(action)
            self.frontier.append((number, world))
            if at_rest(world):
                self.resting.append(number)
        return number

    def _trace(self, number: int) -> tuple[Action, ...]:
        trace = []
        while self.parents[number] >= 0:
            trace.append(self.came_by[number])
            number = self.parents[number]
        return tuple(reversed(trace))

    def _follow_border(self) -> tuple[str, tuple[Action, ...]]:
        """Follow every state that was not expanded to rest, or to a state that was followed before."""
        followed: set[int] = set()
        for number, world in self.frontier:
            way: list[Action] = []
            passed: set[int] = set()
            try:
                while (key := hash(world)) not in followed and not at_rest(world):
                    passed.add(key)
                    action = next((action for action in actions(world) if is_progress(action)), None)
                    if action is None or len(way) == BORDER_LIMIT:
                        return "I7: rest was not reached", (*self._trace(number), *way)
                    way.append(action)
                    world, _ = apply(world, action)
                    check(world)
            except (AssertionError, KeyError, IndexError) as error:
                return f"{type(error).__name__}: {error}", (*self._trace(number), *way)
            followed |= passed
            self.resting.append(number)
        return "", ()

    def _stuck(self) -> list[int]:
        """States from which no resting state can be reached."""
        backwards: dict[int, list[int]] = {}
        for source, target in zip(self.sources, self.targets, strict=True):
            backwards.setdefault(target, []).append(source)
        reached, todo = set(self.resting), list(self.resting)
        while todo:
            for source in backwards.get(todo.pop(), ()):
                if source not in reached:
                    reached.add(source)
                    todo.append(source)
        return [number for number in range(len(self.parents)) if number not in reached]


FULL = 10_000_000


def explore(plan: Plan, budget: Budget, limit: int = FULL) -> Found:
    return Search(new_world(plan, budget), limit).run()


ONE = (transfer("r"),)
TWO = (transfer("r"), transfer("s"))
AGAIN = (transfer("r"), transfer("r", attempt=2))
TRIES = (transfer("r"), transfer("r", try_number=2))
EARLY_LAYERS = Plan(ONE, positions=1, parcels_per_position=2, by_layer=True)

WORLDS: dict[str, tuple[Plan, Budget]] = {
    "quiet": (Plan(ONE), Budget()),
    "abort": (Plan(ONE), Budget(abort=1)),
    "prefill fails": (Plan(ONE), Budget(prefill_fails=1)),
    "abort and failure": (Plan(ONE, positions=1), Budget(abort=1, prefill_fails=1)),
    "cut": (Plan(ONE), Budget(cut=1)),
    "cut and abort": (Plan(ONE, positions=1), Budget(cut=1, abort=1)),
    "repeat": (Plan(ONE, positions=1), Budget(repeat=1)),
    "corrupt": (Plan(ONE), Budget(corrupt=1)),
    "wrong source": (Plan(ONE), Budget(wrong_source=1)),
    "send refused": (Plan(ONE), Budget(send_refused=1)),
    "sends refused": (Plan(ONE, chunk=2), Budget(send_refused=2)),
    "send refused after an abort": (Plan(ONE, positions=1), Budget(send_refused=1, abort=1)),
    "receive fails": (Plan(ONE), Budget(receive_fails=1)),
    "unavailable": (Plan(ONE), Budget(unavailable=1)),
    "endpoint": (Plan(ONE, positions=1), Budget(endpoint=1)),
    "prefill node dies": (Plan(ONE, positions=1), Budget(crash_p=1)),
    "decode node dies": (Plan(ONE, positions=1), Budget(crash_d=1)),
    "hang": (Plan(ONE, positions=1), Budget(deadline=1)),
    "hang and abort": (Plan(ONE, positions=1), Budget(deadline=1, abort=1)),
    "receiver reads, endpoint": (Plan(ONE, positions=1, lane="receiver_reads"), Budget(endpoint=1, abort=1)),
    "sender writes, endpoint": (Plan(ONE, positions=1, lane="sender_writes"), Budget(endpoint=1)),
    "sender writes, death": (Plan(ONE, positions=1, lane="sender_writes"), Budget(crash_p=1)),
    "one slot, abort": (Plan(ONE, slots=1, sending_slots=1), Budget(abort=1)),
    "superseded": (Plan(AGAIN, positions=1), Budget()),
    "everything is cached": (Plan(ONE, cached=2), Budget(abort=1)),
    "two transfers": (Plan(TWO, positions=1, slots=1, sending_slots=1), Budget()),
    "prefill node dies, next try": (Plan(TRIES, positions=1, one_by_one=True), Budget(crash_p=1)),
    "early layers, prefill fails": (EARLY_LAYERS, Budget(prefill_fails=1)),
    "early layers, abort": (EARLY_LAYERS, Budget(abort=1)),
    "early layers, prefill node dies": (EARLY_LAYERS, Budget(crash_p=1)),
    "decode node dies, next attempt": (Plan(AGAIN, positions=1, one_by_one=True), Budget(crash_d=1)),
}
"""Worlds that are searched in full."""

LARGE: dict[str, tuple[Plan, Budget]] = {
    "two transfers, abort": (Plan(TWO, positions=1), Budget(abort=1)),
    "two transfers, one slot, abort": (Plan(TWO, positions=1, slots=1, sending_slots=1), Budget(abort=1)),
    "two cuts": (Plan(ONE, positions=1), Budget(cut=2)),
    "cut, abort and failure": (Plan(ONE, positions=1), Budget(cut=1, abort=1, prefill_fails=1)),
    "abort, cut and repeat": (Plan(ONE, positions=1), Budget(cut=1, abort=1, repeat=1)),
    "early layers, cut and failure": (EARLY_LAYERS, Budget(prefill_fails=1, cut=1)),
    "both die": (Plan(TRIES, positions=1, one_by_one=True), Budget(crash_p=1, crash_d=1)),
    "hang and abort, two parcels": (Plan(ONE), Budget(deadline=1, abort=1)),
    "hang and cut": (Plan(ONE, positions=1), Budget(deadline=1, cut=1)),
    "endpoint, cut and abort": (Plan(ONE, positions=1), Budget(endpoint=1, cut=1, abort=1)),
    "death and next try where the receiver reads": (
        Plan(TRIES, positions=1, one_by_one=True, lane="receiver_reads"),
        Budget(crash_p=1, abort=1),
    ),
    "death and next try where the sender writes": (
        Plan(TRIES, positions=1, one_by_one=True, lane="sender_writes"),
        Budget(crash_p=1, abort=1),
    ),
    "endpoint and next try where the sender writes": (
        Plan(TRIES, positions=1, one_by_one=True, lane="sender_writes"),
        Budget(endpoint=1),
    ),
}
"""Worlds for `make explore`; each is searched in full, or up to a tenth of the states that are asked for."""

ANYTHING = Budget(abort=2, cut=2, repeat=2, crash_p=1, crash_d=1, deadline=2, endpoint=1, prefill_fails=1)
WHOLE: dict[str, tuple[Plan, Budget]] = {
    "everything, closing fences": (Plan(TWO, positions=3), ANYTHING),
    "everything, the receiver reads": (Plan(TWO, positions=3, lane="receiver_reads"), ANYTHING),
    "everything, the sender writes": (Plan(TWO, positions=3, lane="sender_writes"), ANYTHING),
}
"""Two transfers of three parcels over two slots, six credits a session; two aborts, two cuts, two repeated messages, a death
and restart of each side, two deadlines out of the blue, a broken endpoint, a failing prefill, in any order and combination.
Nobody can see all of it; the first is searched up to the states that are asked for, the others up to a tenth of them."""


ALL = WHOLE | LARGE | WORLDS


def _search(name: str, limit: int) -> tuple[str, Found]:
    return name, explore(*ALL[name], limit=limit)


def _limit(name: str, states: int) -> int:
    """How far a world is searched when so many states are asked for."""
    if name in WORLDS:
        return FULL
    return states if name == next(iter(WHOLE)) else states // 10


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--states", type=int, default=600_000, help="how far the worlds go that are too large to see")
    parser.add_argument("--world", action="append", choices=sorted(ALL), help="only this one, so far (repeatable)")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="worlds searched at once")
    arguments = parser.parse_args()
    names = arguments.world or list(ALL)
    limits = [arguments.states if arguments.world else _limit(name, arguments.states) for name in names]
    found_of: dict[str, Found] = {}
    began_s = time.perf_counter()
    with ProcessPoolExecutor(arguments.jobs, mp_context=get_context("spawn")) as pool:
        for search in as_completed([pool.submit(_search, *which) for which in zip(names, limits, strict=True)]):
            name, found = search.result()
            found_of[name] = found
            extent = "all of them" if found.complete else "not all of them"
            print(f"{name}: {found.states} distinct states, {extent}; {found.transitions} transitions", flush=True)
            if found.violation:
                print(f"  {found.violation}", *(f"    {action}" for action in found.trace), sep="\n", flush=True)
    everything = found_of.values()
    print(
        f"explored {sum(found.states for found in everything)} distinct states of {len(names)} worlds "
        f"({sum(found.complete for found in everything)} in full), "
        f"{sum(found.transitions for found in everything)} transitions: "
        f"{sum(bool(found.violation) for found in everything)} violations, "
        f"{sum(found.stuck for found in everything)} states that cannot reach rest, "
        f"{time.perf_counter() - began_s:.0f} s on {arguments.jobs} cores"
    )
    return 1 if any(found.violation for found in everything) else 0


if __name__ == "__main__":
    sys.exit(main())
