# ruff: noqa: T201 - a verb that prints its figures
"""The simulation is itself tested: planted bugs, each to be caught by some seed.

Bugs of the protocol's machines are those of `mutants`, which the search catches on small worlds; the others lie where only a
whole cluster looks: bytes, blocks, the engine, the router.

    python tests/sim/cluster_mutants.py [NAME ...]
"""

from __future__ import annotations

import os
import sys
import time
from dataclasses import replace
from typing import Any

from mutants import MUTANTS as MACHINE_MUTANTS
from mutants import Mutant
from transfer_world import Budget, Plan

from decode_node import service as decode_service
from decode_node import submission
from engine.kv_cache.prefix_index import PrefixIndex
from kv_transfer import data_sessions, staging
from kv_transfer.protocol.decode_transfer import DecodeTransfer
from kv_transfer.transport.base import mint_fence
from kv_transfer.transport.memory import MemorySession

SEEDS_AT_MOST = 400
FROM_THE_SEARCH = (
    "a slot is free without proof once its session is lost",
    "commit by count",
    "credits before a reservation",
    "a late parcel is scattered",
    "receives are cancelled on abort",
    "a credit number is used again",
    "one transfer's end closes the endpoint",
    "the end is told while a scatter is open",
)
NO_WORLD = (Plan(()), Budget())
"""These need no modelled world: the cluster is theirs."""

_real_start = submission.start_engine_request
_real_lookup = PrefixIndex.lookup
_real_over = data_sessions.DataSessions._over
_real_session_close = MemorySession.close


def _no_digest(seed: int, payload: Any) -> int:
    return 0


def _all_is_verified(self: Any) -> int:
    return int(self.end_position)


def _without_what_was_settled(key: Any, message: Any, prompt: Any, await_kv: bool) -> Any:
    """A stream that goes on here starts anew."""
    return replace(_real_start(key, message, prompt, await_kv), settled=())


def _one_block_too_many(self: Any, chain: Any) -> Any:
    """A block of another history is taken for the next of this one."""
    found = _real_lookup(self, chain)
    others = sorted(self._name_of.keys() - set(found))
    return [*found, others[0]] if found and others and len(found) < len(chain) else found


def _only_its_failure(self: Any, entry: Any, session: int) -> None:
    """A session that failed while it opened tells of the failure alone, even when somebody waits for its fence."""
    if entry.failure is None:
        _real_over(self, entry, session)
    else:
        del self._entries[session]


async def _closes_at_once(self: Any) -> Any:
    """Returns before those whose operations it has ended were told."""
    closing = _real_session_close(self)
    try:
        closing.send(None)
    except StopIteration as ended:
        return ended.value
    return mint_fence(self.session)


CLUSTER_MUTANTS = (
    Mutant("no digest", NO_WORLD, ((staging, "payload_digest", _no_digest),)),
    Mutant(
        "what was granted counts as verified",
        NO_WORLD,
        ((DecodeTransfer, "verified_positions", property(_all_is_verified)),),
    ),
    Mutant(
        "a stream that goes on elsewhere starts anew",
        NO_WORLD,
        ((decode_service, "start_engine_request", _without_what_was_settled),),
    ),
    Mutant("a cached block of another history", NO_WORLD, ((PrefixIndex, "lookup", _one_block_too_many),)),
    Mutant(
        "no fence for who ends a session while its lane fails",
        NO_WORLD,
        ((data_sessions.DataSessions, "_over", _only_its_failure),),
    ),
    Mutant("a fence before the operations have ended", NO_WORLD, ((MemorySession, "close", _closes_at_once),)),
)
MUTANTS = tuple(m for m in MACHINE_MUTANTS if m.name in FROM_THE_SEARCH) + CLUSTER_MUTANTS


def hunt(mutant: Mutant, seeds_at_most: int = SEEDS_AT_MOST) -> tuple[int, str]:
    """The first seed that shows it, and what it shows; (number of seeds, "") when none does."""
    from cluster_simulation import simulate

    with mutant.planted():
        for seed in range(seeds_at_most):
            outcome = simulate(seed)
            if outcome.violations:
                return seed, outcome.violations[0]
    return seeds_at_most, ""


def main(names: list[str]) -> int:
    began_s = time.monotonic()
    chosen = [mutant for mutant in MUTANTS if not names or mutant.name in names]
    caught = 0
    for mutant in chosen:
        seed, violation = hunt(mutant)
        caught += bool(violation)
        print(f"{mutant.name}: {f'caught by seed {seed}: {violation[:160]}' if violation else 'SURVIVED'}", flush=True)
    print(f"planted bugs caught by the simulation: {caught} of {len(chosen)}, {time.monotonic() - began_s:.0f} s")
    return 0 if caught == len(chosen) else 1


if __name__ == "__main__":
    if os.environ.get("PYTHONHASHSEED") != "0":
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, "PYTHONHASHSEED": "0"})
    sys.exit(main(sys.argv[1:]))
