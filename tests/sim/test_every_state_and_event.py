"""Every state of a transfer meets every message and every event, also those that make no sense there.

The states are real ones: the first world of the search for each pair of states that D's and P's halves can be in.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
from explorer import WORLDS
from transfer_actions import apply
from transfer_world import D, P, World, actions, new_world, transfer

from foundation.ids import CreditNumber, Incarnation, SessionNonce, TransferId
from kv_transfer.protocol import decode_side, events, messages, prefill_side
from kv_transfer.protocol.credit import SLOT_TRANSITIONS, SlotState, SlotStep, step
from kv_transfer.protocol.decode_transfer import DECODE_TRANSITIONS, DecodeState
from kv_transfer.protocol.effects import Count, Send
from kv_transfer.protocol.messages import Envelope, Gone
from kv_transfer.protocol.peer import PeerState
from kv_transfer.protocol.prefill_transfer import PREFILL_TRANSITIONS, PrefillState

R = transfer("r")
STRANGER = transfer("nobody")
STATES_LIMIT = 4000


@cache
def samples() -> tuple[World, ...]:
    """One world for each pair of states of the two halves of a transfer."""
    found: dict[tuple[str, str], World] = {}
    for plan, budget in (WORLDS["abort"], WORLDS["prefill fails"]):
        frontier, seen = [new_world(plan, budget)], set[int]()
        while frontier and len(seen) < STATES_LIMIT:
            world = frontier.pop(0)
            for action in actions(world):
                following, _ = apply(world, action)
                if hash(following) not in seen:
                    seen.add(hash(following))
                    frontier.append(following)
            found.setdefault(_states(world), world)
    return tuple(world for world in found.values() if _paired(world))


def _states(world: World) -> tuple[str, str]:
    assert world.d is not None
    assert world.p is not None
    d, p = world.d.transfers.get(R), world.p.transfers.get(R)
    return (d.state.name if d else "none", p.state.name if p else "none")


def _paired(world: World) -> bool:
    peers = (world.d.peers.get(P), world.p.peers.get(D)) if world.d and world.p else ()
    return bool(peers) and all(peer is not None and peer.state is PeerState.READY for peer in peers)


def from_p(name: TransferId) -> tuple[Any, ...]:
    return (
        messages.Accepted(name),
        messages.Refused(name, "busy", 1.0),
        messages.Offer(name, 1, 2),
        messages.FirstToken(name, 2, None),
        messages.Sealed(name, (), 0),
        messages.Released(name),
        messages.Failed(name, "why"),
        messages.Drained(name, ()),
        messages.Gone(name),
    )


def from_d(name: TransferId) -> tuple[Any, ...]:
    return (
        messages.Credits(name, 0, 8, 0, (messages.Credit(CreditNumber(0), 16),), SessionNonce(501)),
        messages.Committed(name),
        messages.Abort(name, "why"),
        messages.Gone(name),
    )


def told_d(world: World, message: Any, sender: Incarnation | None = None) -> tuple[Any, tuple[Any, ...]]:
    assert world.d is not None
    envelope = Envelope(sender or world.d.peers[P].incarnation, world.d.local.incarnation, message)
    return decode_side.handle(world.d, events.MessageReceived(P, envelope))


def told_p(world: World, message: Any, sender: Incarnation | None = None) -> tuple[Any, tuple[Any, ...]]:
    assert world.p is not None
    envelope = Envelope(sender or world.p.peers[D].incarnation, world.p.local.incarnation, message)
    return prefill_side.handle(world.p, events.MessageReceived(D, envelope))


def test_the_samples_hold_every_state_that_is_ever_stored() -> None:
    d_states, p_states = zip(*(_states(world) for world in samples()), strict=True)
    # RESERVED lasts only while the stream is broken: here it becomes LANDING in the same turn
    assert set(d_states) >= {state.name for state in DecodeState} - {"CLOSED", "RESERVED"}
    assert set(p_states) >= {state.name for state in PrefillState} - {"RELEASED"}


def test_a_message_that_does_not_fit_the_state_changes_nothing_and_is_counted() -> None:
    met = 0
    for world in samples():
        assert world.d is not None
        assert world.p is not None
        for message in from_p(R):
            transfer_state = world.d.transfers.get(R)
            if transfer_state is None or transfer_state.accepts(type(message)):
                continue
            side, effects = told_d(world, message)
            assert side == world.d
            assert any(isinstance(effect, Count) for effect in effects)
            met += 1
        for message in from_d(R):
            sending_state = world.p.transfers.get(R)
            if sending_state is None or sending_state.accepts(type(message)):
                continue
            side, effects = told_p(world, message)
            assert side == world.p
            assert any(isinstance(effect, Count) for effect in effects)
            met += 1
    assert met > 50


def test_a_message_that_fits_is_handled_and_said_twice_does_no_more_harm() -> None:
    for world in samples():
        for message in from_p(R):
            side, _ = told_d(world, message)
            told_d(replace(world, d=side), message) if P in side.peers else None
        for message in from_d(R):
            side, _ = told_p(world, message)
            told_p(replace(world, p=side), message) if D in side.peers else None


@pytest.mark.parametrize("message", from_p(STRANGER), ids=lambda message: type(message).__name__)
def test_d_answers_gone_to_whoever_speaks_of_a_transfer_it_does_not_know(message: Any) -> None:
    for world in samples():
        side, effects = told_d(world, message)
        assert side == world.d
        answers = [effect.envelope.message for effect in effects if isinstance(effect, Send)]
        assert answers == ([] if isinstance(message, Gone) else [Gone(STRANGER)])


@pytest.mark.parametrize("message", from_d(STRANGER), ids=lambda message: type(message).__name__)
def test_p_answers_gone_to_whoever_speaks_of_a_transfer_it_does_not_know(message: Any) -> None:
    for world in samples():
        side, effects = told_p(world, message)
        assert side == world.p
        answers = [effect.envelope.message for effect in effects if isinstance(effect, Send)]
        assert answers == ([] if isinstance(message, Gone) else [Gone(STRANGER)])


def test_f09_nothing_that_another_incarnation_says_changes_anything() -> None:
    for world in samples():
        for message in from_p(R):
            assert told_d(world, message, Incarnation(77))[0] == world.d
        for message in from_d(R):
            assert told_p(world, message, Incarnation(77))[0] == world.p


def test_what_the_node_says_too_late_changes_nothing() -> None:
    late_for_d = (events.Reserved(R, 0, 2), events.Unavailable(R, "no_blocks"))
    late_for_p = (
        events.PrefillReserved(R, 0, 2),
        events.LayersComputed(R, 2, 1),
        events.Computed(R, 2),
        events.TokenSampled(R, None),
        events.PrefillFailed(R, "why"),
        events.LeaseExpired(R),
    )
    for world in samples():
        assert world.d is not None
        assert world.p is not None
        if R not in world.d.transfers or world.d.transfers[R].state is DecodeState.ENDING:
            for event in late_for_d:
                assert decode_side.handle(world.d, event) == (world.d, ())
            assert decode_side.handle(world.d, events.End(R, "done"))[0] == world.d
        if R not in world.p.transfers or world.p.transfers[R].state is PrefillState.ENDING:
            for sampled in late_for_p:
                assert prefill_side.handle(world.p, sampled) == (world.p, ())


@pytest.mark.parametrize("state", SlotState)
@pytest.mark.parametrize("slot_step", SlotStep)
def test_a_slot_takes_only_the_steps_of_its_table(state: SlotState, slot_step: SlotStep) -> None:
    if (state, slot_step) in SLOT_TRANSITIONS:
        assert step(state, slot_step) is SLOT_TRANSITIONS[state, slot_step]
    else:
        with pytest.raises(AssertionError, match=state.name):
            step(state, slot_step)


def test_a_posted_slot_is_free_only_by_its_own_completion_by_being_unused_or_by_a_fence() -> None:
    """Walks back from FREE: no step named after time, and none that skips the proof."""
    proofs = {step for (state, step), target in SLOT_TRANSITIONS.items() if target is SlotState.FREE}
    assert proofs == {
        SlotStep.DROP,
        SlotStep.FINISH,
        SlotStep.LAND,
        SlotStep.CANCELLED,
        SlotStep.FAILED,
        SlotStep.FENCE,
    }


def test_terminal_states_have_no_way_out_and_all_others_have_one() -> None:
    for table, terminal in ((DECODE_TRANSITIONS, DecodeState.CLOSED), (PREFILL_TRANSITIONS, PrefillState.RELEASED)):
        leaving = {state for (state, _), target in table.items() if target is not state}
        assert leaving == set(type(terminal)) - {terminal}


def test_d_ends_committed_or_ending_and_never_one_after_the_other() -> None:
    targets = {target for (state, _), target in DECODE_TRANSITIONS.items() if state is DecodeState.COMMITTED}
    assert targets == {DecodeState.CLOSED}
    assert DecodeState.COMMITTED not in {
        target for (state, _), target in DECODE_TRANSITIONS.items() if state is DecodeState.ENDING
    }
