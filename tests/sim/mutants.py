# ruff: noqa: T201 - a verb that prints its figures
"""The proof is itself tested: planted bugs, each switched on in turn, each to be caught by the search.

A mutant replaces one attribute of the real machines (or of the modelled rim) and names the smallest world that shows it.

    python tests/sim/mutants.py [NAME ...]
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from multiprocessing import get_context
from typing import Any
from unittest.mock import patch

import transfer_actions
from explorer import EARLY_LAYERS, WORLDS, Found, explore
from transfer_world import Budget, Content, Plan, transfer

from foundation.ids import CreditNumber
from kv_transfer.protocol import decode_pair, decode_side, decode_turn, prefill_pair, prefill_turn, sending
from kv_transfer.protocol.credit import SLOT_TRANSITIONS, Arena, SlotState, SlotStep
from kv_transfer.protocol.decode_transfer import ParcelVerified, Whole
from kv_transfer.protocol.effects import NodeFirstToken, Scatter
from kv_transfer.protocol.events import Reserved
from kv_transfer.protocol.messages import FirstToken
from kv_transfer.protocol.prefill_transfer import PrefillTransfer


@dataclass(frozen=True)
class Mutant:
    """`attributes` are (owner, name, replacement); `entries` are (table, key, replacement)."""

    name: str
    world: tuple[Plan, Budget]
    attributes: tuple[tuple[Any, str, Any], ...] = ()
    entries: tuple[tuple[dict[Any, Any], Any, Any], ...] = ()

    @contextmanager
    def planted(self) -> Iterator[None]:
        with ExitStack() as stack:
            for owner, name, replacement in self.attributes:
                stack.enter_context(patch.object(owner, name, replacement))
            for table, key, replacement in self.entries:
                changed: Mapping[Any, Any] = {key: replacement}
                stack.enter_context(patch.dict(table, changed))
            yield


def _no_refusal(expected: Content, found: Content | None) -> str:
    return ""


def _refusal_without_position(expected: Content, found: Content | None) -> str:
    same = found is not None and found._replace(parcel_index=0) == expected._replace(parcel_index=0)
    return "" if same else "bad_digest"


def _commit_by_count(found: Any, layout: Any) -> Any:
    return Whole if found.manifest is not None and found.granted == len(found.parcels) else None


def _verified_when_landed(turn: Any, event: Any) -> None:
    _real_landed(turn, event)
    for effect in turn.out.effects:
        if isinstance(effect, Scatter):
            landed = turn.transfers[effect.transfer]
            digest = Content(effect.session, effect.credit, effect.transfer, effect.parcel_index).digest
            verified = landed.verified.put(effect.parcel_index, digest)
            turn.settle(replace(landed.take(ParcelVerified), verified=verified))


_real_landed = decode_side._landed
_real_offered = decode_side._offered
_real_grant = Arena.grant
_real_end = decode_turn.DecodeTurn.end
_real_session_over = decode_pair.session_over
_real_give_up = decode_side._give_up
_real_prefill_end = prefill_turn.PrefillTurn.end


def _reserve_without_the_node(turn: Any, asked: Any, offer: Any) -> None:
    _real_offered(turn, asked, offer)
    decode_side._reserved(turn, Reserved(asked.id, 0, offer.expected_positions))


def _scatter_even_if_late(turn: Any, event: Any) -> None:
    found = decode_side._open_slot(turn, event)
    if found is None:
        return
    arena, slot = found
    arena = arena.take(event.credit, SlotStep.LAND)
    late = turn.transfers.get(slot.transfer)
    if slot.state is not SlotState.QUARANTINED and late is not None:
        arena = arena.take(event.credit, SlotStep.SCATTER)
        turn.out.add(decode_side._scatter(arena, late, slot))
    elif slot.state is not SlotState.QUARANTINED:
        arena = arena.take(event.credit, SlotStep.DROP)
    turn.keep_arena(arena)
    turn.grant(event.peer)


def _cancel_on_abort(self: Any, ending: Any, step: type, reason: str, **how: Any) -> None:
    self.resolve_unused(ending, frozenset())
    _real_end(self, ending, step, reason, **how)


def _number_is_the_slot(self: Arena, owner: Any, parcel_index: int, length: int) -> Any:
    arena, slot, credit = _real_grant(self, owner, parcel_index, length)
    reused = CreditNumber(slot)
    taken = arena.taken.drop(credit).put(reused, replace(arena.taken[credit], credit=reused))
    return replace(arena, taken=taken), slot, reused


def _first_token_again(turn: Any, asked: Any, message: FirstToken) -> None:
    turn.put(replace(asked.take(FirstToken), first_token=True))
    turn.out.add(NodeFirstToken(asked.id, message.tokens[0] if message.tokens else None))


def _close_the_endpoint(turn: Any, event: Any, reason: str) -> None:
    ending = turn.transfers.get(event.transfer)
    _real_give_up(turn, event, reason)
    if ending is not None and ending.peer in turn.peers:
        _real_session_over(turn, turn.peers[ending.peer], "aborted")


def _error_is_a_fence(turn: Any, peer: Any, reason: str) -> None:
    _real_session_over(turn, peer, reason)
    if peer.session in turn.arenas:
        turn.keep_arena(turn.arenas[peer.session].fence())


def _forget_at_once(
    self: Any, ending: Any, step: type, reason: str, *, failed: bool, acknowledged: bool = False
) -> None:
    _real_prefill_end(self, ending, step, reason, failed=failed, acknowledged=acknowledged)
    if ending.id in self.transfers:
        self.settle(replace(self.transfers[ending.id], acknowledged=True))


def _whatever_layer(self: Any, parcel: Any) -> bool:
    return bool(parcel.end_position <= max(self.computed_positions, self.ahead_positions))


def _nothing(*args: Any, **kwargs: Any) -> None:
    return None


def _always(*args: Any, **kwargs: Any) -> bool:
    return True


def _never(*args: Any, **kwargs: Any) -> bool:
    return False


def _no_credits(*args: Any, **kwargs: Any) -> tuple[()]:
    return ()


SENDER_WRITES = Plan((transfer("r"),), positions=1, lane="sender_writes")
RECEIVER_READS = Plan((transfer("r"),), positions=1, lane="receiver_reads")
SMALL = Plan((transfer("r"),), positions=1)

MUTANTS = (
    Mutant(
        "a slot is free without proof once its session is lost",
        (RECEIVER_READS, Budget(endpoint=1)),
        entries=((SLOT_TRANSITIONS, (SlotState.POSTED, SlotStep.QUARANTINE), SlotState.FREE),),
    ),
    Mutant(
        "an old incarnation is accepted",
        (SENDER_WRITES, Budget(crash_p=1)),
        ((decode_pair, "right_incarnations", _always), (prefill_pair, "right_incarnations", _always)),
    ),
    Mutant("the digest is not looked at", WORLDS["corrupt"], ((transfer_actions, "scatter_refusal", _no_refusal),)),
    Mutant(
        "the digest's seed has no positions",
        WORLDS["corrupt"],
        ((transfer_actions, "scatter_refusal", _refusal_without_position),),
    ),
    Mutant("commit by count", WORLDS["quiet"], ((decode_turn, "verdict", _commit_by_count),)),
    Mutant("commit before the device is done", WORLDS["quiet"], ((decode_side, "_landed", _verified_when_landed),)),
    Mutant(
        "the negative notice is dropped",
        WORLDS["prefill fails"],
        ((prefill_turn.PrefillTurn, "say_ending", _nothing),),
    ),
    Mutant("credits before a reservation", WORLDS["quiet"], ((decode_side, "_offered", _reserve_without_the_node),)),
    Mutant("a late parcel is scattered", (SMALL, Budget(abort=1)), ((decode_side, "_landed", _scatter_even_if_late),)),
    Mutant(
        "receives are cancelled on abort",
        (SMALL, Budget(abort=1)),
        attributes=((decode_turn.DecodeTurn, "end", _cancel_on_abort),),
        entries=((SLOT_TRANSITIONS, (SlotState.POSTED, SlotStep.KNOWN_UNUSED), SlotState.FREE),),
    ),
    Mutant("Drained without its list", (SMALL, Budget(abort=1)), ((prefill_turn, "used_credits", _no_credits),)),
    Mutant("a credit number is used again", WORLDS["one slot, abort"], ((Arena, "grant", _number_is_the_slot),)),
    Mutant(
        "blocks are given back under a gather",
        (SMALL, Budget(abort=1)),
        ((sending.SendingSlots, "gathers_open", _never),),
    ),
    Mutant("the first token is taken twice", WORLDS["repeat"], ((decode_side, "_first_token", _first_token_again),)),
    Mutant(
        "one transfer's end closes the endpoint",
        (SMALL, Budget(abort=1)),
        ((decode_side, "_give_up", _close_the_endpoint),),
    ),
    Mutant(
        "an error is a fence on a sender-written lane",
        WORLDS["sender writes, endpoint"],
        ((decode_pair, "session_over", _error_is_a_fence),),
    ),
    Mutant(
        "the end is told while a scatter is open",
        (SMALL, Budget(abort=1)),
        ((decode_turn.DecodeTurn, "_scatters_open", _never),),
    ),
    Mutant("after a break nothing is said again by D", WORLDS["cut"], ((decode_pair, "_say_again", _nothing),)),
    Mutant(
        "after a break nothing is said again by P",
        WORLDS["cut"],
        ((prefill_pair, "_say_again", _nothing),),
    ),
    Mutant(
        "credits that nobody used are never withdrawn",
        (SMALL, Budget(abort=1)),
        ((decode_turn.DecodeTurn, "resolve_unused", lambda *args: 0),),
    ),
    Mutant(
        "early layers stand for all",
        (EARLY_LAYERS, Budget(prefill_fails=1)),
        ((PrefillTransfer, "is_computed", _whatever_layer),),
    ),
    Mutant(
        "P forgets the transfer before D has answered",
        (SMALL, Budget(abort=1, cut=1)),
        ((prefill_turn.PrefillTurn, "end", _forget_at_once),),
    ),
)


def hunt(mutant: Mutant, limit: int = 200_000) -> Found:
    """What the search finds with the bug planted."""
    with mutant.planted():
        return explore(*mutant.world, limit=limit)


def _hunt_by_name(name: str) -> Found:
    return hunt(next(mutant for mutant in MUTANTS if mutant.name == name))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="only these, so far")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="mutants hunted at once")
    arguments = parser.parse_args()
    began_s = time.perf_counter()
    names = arguments.names or [mutant.name for mutant in MUTANTS]
    caught = 0
    with ProcessPoolExecutor(arguments.jobs, mp_context=get_context("spawn")) as pool:
        for name, found in zip(names, pool.map(_hunt_by_name, names), strict=True):
            caught += bool(found.violation)
            how = f"caught: {found.violation} (after {len(found.trace)} actions)" if found.violation else "SURVIVED"
            print(f"{name}: {how}, {found.states} states", flush=True)
    print(f"mutants caught: {caught} of {len(names)}, {time.perf_counter() - began_s:.0f} s")
    return 0 if caught == len(names) else 1


if __name__ == "__main__":
    sys.exit(main())
