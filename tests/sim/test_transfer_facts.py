"""Single facts about the two sides, each shown on real machines in a small world."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from transfer_actions import apply, run_quietly
from transfer_invariants import check
from transfer_world import Action, Budget, D, P, Plan, World, actions, at_rest, is_progress, new_world, transfer

from foundation.ids import CreditNumber, Incarnation, NodeId, SessionNonce, SlotIndex, TransferId
from kv_transfer.plan.parcels import ParcelName, TooManyParcels, cut_parcels
from kv_transfer.port import BeginTransfer
from kv_transfer.protocol import decode_side, events, messages, prefill_side
from kv_transfer.protocol.credit import Arena, SlotStep, all_free
from kv_transfer.protocol.deadlines import Limits, Watch, decode_waits, prefill_waits
from kv_transfer.protocol.decode_turn import DecodeSide
from kv_transfer.protocol.effects import (
    CancelReceive,
    Count,
    Gather,
    NodeEnded,
    NodeReleased,
    OpenLane,
    OpenStream,
    PostReceive,
    QuarantineArena,
    ReleaseArena,
    Send,
    SendParcel,
)
from kv_transfer.protocol.events import Fenced, LaneOpened, LeaseExpired, MessageReceived, Silent, Stalled, StreamOpened
from kv_transfer.protocol.local import LocalNode
from kv_transfer.protocol.messages import Credits, Envelope, Failed, HelloRefused, Offer, Refused
from kv_transfer.protocol.peer import hello_mismatch
from kv_transfer.protocol.prefill_turn import PrefillSide
from kv_transfer.protocol.sending import new_sending_slots
from kv_transfer.protocol.table import Table

R = transfer("r")


def until(
    world: World, wanted: Callable[[World], bool], avoid: Callable[[Action], bool] = lambda action: False
) -> World:
    """Let things happen by themselves until the world is as wanted."""
    for _ in range(200):
        if wanted(world):
            return world
        world, _ = apply(world, next(a for a in actions(world) if is_progress(a) and not avoid(a)))
        check(world)
    raise AssertionError("never")


def sent(effects: tuple[Any, ...], kind: type) -> list[Any]:
    return [e.envelope.message for e in effects if isinstance(e, Send) and isinstance(e.envelope.message, kind)]


def of(effects: tuple[Any, ...], kind: type) -> list[Any]:
    return [effect for effect in effects if isinstance(effect, kind)]


def d_hears(world: World, message: Any) -> tuple[DecodeSide, tuple[Any, ...]]:
    assert world.d is not None
    envelope = Envelope(world.d.peers[P].incarnation, world.d.local.incarnation, message)
    return decode_side.handle(world.d, MessageReceived(P, envelope))


def ready_world(**plan: Any) -> World:
    """A world whose pair is READY and whose transfer r has been asked for."""
    return until(new_world(Plan((R,), **plan), Budget()), lambda w: w.p is not None and R in w.p.transfers)


def all_verified(world: World) -> bool:
    held = world.d.transfers.get(R) if world.d else None
    return held is not None and bool(held.parcels) and len(held.verified) == len(held.parcels)


# --- manifests ----------------------------------------------------------------------------------------------------


def sealable() -> tuple[World, messages.Sealed]:
    """A world in which everything is verified on D, and the manifest that is on its way."""
    world = until(new_world(Plan((R,)), Budget()), lambda w: _sealed_next(w) and all_verified(w))
    sealed = world.to_d[0].message
    assert isinstance(sealed, messages.Sealed)
    return world, sealed


def _sealed_next(world: World) -> bool:
    return bool(world.to_d) and isinstance(world.to_d[0].message, messages.Sealed)


def _tampered(sealed: messages.Sealed, parcels: tuple[messages.SealedParcel, ...]) -> messages.Sealed:
    return replace(sealed, parcels=parcels, digest_of_all=sum(parcel.digest for parcel in parcels))


def test_a_true_manifest_commits() -> None:
    world, sealed = sealable()
    _, effects = d_hears(world, sealed)
    assert sent(effects, messages.Committed)


@pytest.mark.parametrize("fault", ["hole", "overlap", "order", "stranger", "digest", "sum"])
def test_a_manifest_that_is_not_d_s_own_plan_is_refused(fault: str) -> None:
    world, sealed = sealable()
    first, second = sealed.parcels
    manifest = {
        "hole": _tampered(sealed, (first,)),
        "overlap": _tampered(sealed, (first, first)),
        "order": _tampered(sealed, (second, first)),
        "stranger": _tampered(sealed, (first, second, replace(second, name=second.name._replace(end_position=9)))),
        "digest": _tampered(sealed, (first, replace(second, digest=second.digest + 1))),
        "sum": replace(sealed, digest_of_all=sealed.digest_of_all + 1),
    }[fault]
    _, effects = d_hears(world, manifest)
    assert sent(effects, messages.Abort) == [messages.Abort(R, "bad_manifest")]
    assert not sent(effects, messages.Committed)
    assert of(effects, NodeEnded)[0].verified_positions == 2


# --- credits ------------------------------------------------------------------------------------------------------


def arena(slots: int = 4, limit: int = 1000) -> Arena:
    return Arena(P, "p:0", Incarnation(1), 1, SessionNonce(1), 8, limit, all_free(slots))


def test_granted_bytes_stay_within_what_the_link_carries_but_one_parcel_always_may() -> None:
    tight = arena(limit=30)
    tight, _, _ = tight.grant(R, 0, 40)
    assert not tight.may_grant(1)
    assert arena(limit=30).may_grant(40)


def test_credit_numbers_are_never_used_again_in_their_session() -> None:
    numbers, held = [], arena(slots=1)
    for _ in range(3):
        held, _, number = held.grant(R, 0, 8)
        numbers.append(number)
        held = held.take(number, SlotStep.LAND).take(number, SlotStep.DROP)
        held.check()
    assert numbers == [0, 1, 2]


def test_f33_a_quarantined_slot_is_free_by_its_own_completion_or_a_fence_and_by_nothing_else() -> None:
    held, _, number = arena(slots=2).grant(R, 0, 8)
    held, _, other = held.grant(R, 1, 8)
    held = held.quarantine()
    assert held.unresolved == 2
    held = held.take(number, SlotStep.LAND)
    assert held.unresolved == 1
    assert held.fence().settled
    with pytest.raises(AssertionError, match="QUARANTINED"):
        held.take(other, SlotStep.KNOWN_UNUSED)


def test_parcels_that_are_not_computed_yet_get_at_most_half_of_the_slots() -> None:
    world = until(
        ready_world(positions=6, slots=4), lambda w: bool(w.reserving), avoid=lambda action: action[0] == "scattered"
    )
    assert world.d is not None
    assert world.d.transfers[R].ready_positions == 0
    side, effects = decode_side.handle(world.d, events.Reserved(R, 0, 6))
    assert len(of(effects, PostReceive)) == 2
    computed, effects = d_hears(replace(world, d=side), Offer(R, 6, 6))
    assert len(of(effects, PostReceive)) == 2
    assert not computed.arenas[1].free


def test_freed_slots_are_granted_again_a_quarter_of_the_arena_at_a_time() -> None:
    world = ready_world(positions=12, chunk=12, slots=8)
    world = until(world, lambda w: len(w.scatters) == 3, avoid=lambda action: action[0] == "scattered")
    side = world.d
    assert side is not None
    granted = []
    for landed, content in sorted(world.scatters):
        side, effects = decode_side.handle(
            side, events.Scattered(P, landed.session, CreditNumber(landed.credit), content.digest)
        )
        granted.append([len(credits.credits) for credits in sent(effects, Credits)])
    assert granted == [[], [2], []]


def test_an_arena_of_few_slots_grants_each_again_at_once() -> None:
    few, many = arena(slots=3), arena(slots=9)
    assert not few.grant(R, 0, 8)[0].grant(R, 1, 8)[0].grant(R, 2, 8)[0].worth_granting
    assert few.grant(R, 0, 8)[0].grant(R, 1, 8)[0].worth_granting
    for index in range(8):
        assert many.worth_granting
        many, _, _ = many.grant(R, index, 8)
    assert not many.worth_granting


def test_credits_follow_the_reservation_at_once_even_when_there_is_nothing_to_grant() -> None:
    world = until(ready_world(positions=2, cached=2), lambda w: bool(w.reserving))
    assert world.d is not None
    _, effects = decode_side.handle(world.d, events.Reserved(R, 2, 2))
    [credits] = sent(effects, Credits)
    assert (credits.from_position, credits.credits) == (2, ())


def test_every_receive_is_posted_before_its_credit_is_said() -> None:
    world = until(ready_world(positions=2, chunk=2, slots=4), lambda w: bool(w.reserving))
    assert world.d is not None
    _, effects = decode_side.handle(world.d, events.Reserved(R, 0, 2))
    kinds = [type(effect) for effect in effects]
    assert kinds.index(PostReceive) < kinds.index(Send)


# --- pairing ------------------------------------------------------------------------------------------------------


def test_f16_an_unlike_p_is_refused_naming_the_field_and_d_ends_its_transfers_with_it() -> None:
    world = until(new_world(Plan((R,)), Budget()), lambda w: bool(w.to_p))
    assert world.p is not None
    unlike = replace(world.p.local.hello, fingerprint=replace(world.p.local.hello.fingerprint, rope="other"))
    world = replace(world, p=replace(world.p, local=replace(world.p.local, hello=unlike)))
    assert world.p is not None
    _, answers = prefill_side.handle(world.p, MessageReceived(D, world.to_p[0]))
    [refusal] = sent(answers, HelloRefused)
    assert refusal.reason == "rope: 'other' here, 'r' there"

    assert world.d is not None
    envelope = Envelope(Incarnation(2001), world.d.local.incarnation, refusal)
    side, effects = decode_side.handle(world.d, MessageReceived(P, envelope))
    assert of(effects, NodeEnded)[0].reason == "refused: rope: 'other' here, 'r' there"
    assert not side.peers
    assert not side.transfers


@pytest.mark.parametrize(
    ("unlike", "reason"),
    [
        ({"pipeline_parallel": 1 << 12}, "pipeline_parallel is 4096"),
        ({"head_dim": 2}, "head_dim: "),
    ],
    ids=str,
)
def test_f16_a_layout_that_cannot_be_is_refused_by_name(unlike: dict[str, int], reason: str) -> None:
    side = ready_world().d
    assert side is not None
    ours = side.local.hello
    theirs = replace(ours, layout=replace(ours.layout, **unlike))  # type: ignore[arg-type]
    assert (hello_mismatch(ours, theirs, cut_parcels) or "").startswith(reason)
    assert hello_mismatch(ours, ours, cut_parcels) is None


def test_f16_a_slot_that_holds_not_even_one_head_is_refused_by_name() -> None:
    side = ready_world().d
    assert side is not None
    ours = side.local.hello
    assert (hello_mismatch(ours, replace(ours, slot_bytes=4), cut_parcels) or "").startswith("slot_bytes is 4")


def test_a_session_ends_before_its_credit_numbers_do() -> None:
    side = asked_side()
    worn = replace(side, arenas=side.arenas.put(1, replace(side.arenas[1], next_number=13_000_000)))
    side, effects = decode_side.handle(worn, events.Begin(_request(transfer("s"))))
    assert [ended.reason for ended in of(effects, NodeEnded)] == ["credit_numbers_exhausted"]
    assert of(effects, OpenStream)
    assert list(side.transfers) == [transfer("s")]


def test_f40_with_enough_arenas_in_quarantine_no_further_session_is_opened() -> None:
    world = new_world(Plan((R,)), Budget())
    assert world.d is not None
    lost, _, _ = arena().grant(R, 0, 8)
    full = replace(world.d, arenas=Table({1: lost.quarantine(), 2: replace(lost.quarantine(), session=2)}))
    side, effects = decode_side.handle(full, events.Begin(_request(R)))
    assert of(effects, NodeEnded)[0].reason == "quarantine_full"
    assert not side.transfers
    assert not side.peers


def _request(name: TransferId) -> BeginTransfer:
    return BeginTransfer(name, P, "p:0", b"t", (0, 1), (), b"", 600.0)


def test_a_fence_from_another_incarnation_frees_nothing() -> None:
    world = until(ready_world(), lambda w: bool(w.posted))
    assert world.d is not None
    lost, _, _ = arena().grant(R, 0, 8)
    stale = replace(lost.quarantine(), session=99, incarnation=Incarnation(5))
    world = replace(world, d=replace(world.d, arenas=world.d.arenas.put(99, stale)))
    side, effects = d_hears(world, messages.SessionClosed(99))
    assert side.arenas[99] == stale
    assert not of(effects, ReleaseArena)


def test_a_session_that_is_lost_with_nothing_in_flight_releases_its_arena_at_once() -> None:
    world = ready_world()
    assert world.d is not None
    side, effects = decode_side.handle(world.d, events.EndpointLost(P, 1, "endpoint_lost"))
    assert of(effects, ReleaseArena)
    assert not of(effects, QuarantineArena)
    assert not side.arenas


def test_f28_one_transfer_s_end_is_not_noticed_by_its_neighbour() -> None:
    neighbours = (transfer("a"), transfer("b"))
    alone = run_quietly(new_world(Plan(neighbours[1:]), Budget()))
    world = until(new_world(Plan(neighbours, slots=4), Budget(abort=1)), lambda w: bool(w.moving))
    world, _ = apply(world, ("abort", neighbours[0]))
    world = run_quietly(world)
    assert at_rest(world)
    assert world.outcomes[neighbours[1]] == alone.outcomes[neighbours[1]] == "committed"


# --- early layers -------------------------------------------------------------------------------------------------


def early_credits(first: int, end: int) -> Credits:
    return Credits(
        R, 0, 8, first, tuple(messages.Credit(CreditNumber(n), 16) for n in range(first, end)), SessionNonce(501)
    )


def early_side(credits: int = 4) -> PrefillSide:
    """P has reserved two positions of two layers, and has credits for the first of its four parcels; all, unless said."""
    world = ready_world(parcels_per_position=2, sending_slots=4)
    world = until(world, lambda w: w.p is not None and w.p.transfers[R].expected_positions > 0)
    assert world.p is not None
    return p_hears(world.p, early_credits(0, credits))[0]


def gathered_by(side: PrefillSide, *told: Any) -> list[list[tuple[int, int]]]:
    """(position, layer) of the parcels that each event has gathered, one after the other."""
    found = []
    for event in told:
        side, effects = prefill_side.handle(side, event)
        assert not sent(effects, Offer) or isinstance(event, events.Computed)
        gathers = of(effects, Gather)
        for gather in gathers:
            side, effects = prefill_side.handle(side, events.Gathered(gather.slot, 1))
            gathers += of(effects, Gather)
        found.append([(gather.parcel.first_position, gather.parcel.first_layer) for gather in gathers])
    return found


def test_a_few_gathers_are_asked_for_at_a_time_so_that_the_first_parcel_is_sent_early() -> None:
    side, effects = prefill_side.handle(early_side(), events.Computed(R, 2))
    first, _ = of(effects, Gather)
    side, effects = prefill_side.handle(side, events.Gathered(first.slot, 1))
    assert [type(effect) for effect in effects] == [SendParcel, Gather, Gather]


def test_early_layers_are_gathered_before_their_step_has_ended_and_the_last_never() -> None:
    told = (
        events.LayersComputed(R, 1, 1),
        events.Computed(R, 1),
        events.LayersComputed(R, 2, 1),
        events.Computed(R, 2),
    )
    assert gathered_by(early_side(), *told) == [[(0, 0)], [(0, 1)], [(1, 0)], [(1, 1)]]


def test_parcels_keep_their_order_where_a_step_computes_several_runs() -> None:
    told = (events.LayersComputed(R, 2, 1), events.Computed(R, 2))
    assert gathered_by(early_side(), *told) == [[(0, 0)], [(0, 1), (1, 0), (1, 1)]]


def test_early_layers_are_gone_with_the_step_that_fails() -> None:
    side, effects = prefill_side.handle(early_side(), events.LayersComputed(R, 2, 1))
    (gather,) = of(effects, Gather)
    side, effects = prefill_side.handle(side, events.PrefillFailed(R, "engine_error"))
    assert sent(effects, Failed) == [Failed(R, "engine_error")]
    assert not of(effects, NodeReleased)
    side, effects = prefill_side.handle(side, events.Gathered(gather.slot, 1))
    assert not of(effects, SendParcel)
    assert of(effects, NodeReleased) == [NodeReleased(R, "engine_error")]


# --- asking -------------------------------------------------------------------------------------------------------


def p_hears(
    side: PrefillSide, message: Any, refusal: str = "", peer: NodeId = D
) -> tuple[PrefillSide, tuple[Any, ...]]:
    pair = side.peers[peer]
    envelope = Envelope(pair.incarnation, side.local.incarnation, message)
    return prefill_side.handle(side, MessageReceived(peer, envelope, refusal))


def ask(name: TransferId, positions: int = 2) -> messages.Ask:
    return messages.Ask(name, b"t", tuple(range(positions)), (), b"", 1, 600.0)


def second_d(side: PrefillSide) -> PrefillSide:
    """P with another decode node paired to it."""
    other = NodeId("D2")
    hello = replace(side.local.hello, node_id=other, session=50)
    side, _ = prefill_side.handle(side, StreamOpened(other, 0))
    envelope = Envelope(Incarnation(4001), Incarnation(0), hello)
    side, _ = prefill_side.handle(side, MessageReceived(other, envelope))
    return prefill_side.handle(side, LaneOpened(other, 50, SessionNonce(0), 0, 0, "tcp", 1e9))[0]


def test_f18_a_ticket_that_is_not_valid_is_refused_by_name_and_nothing_is_kept() -> None:
    world = ready_world()
    assert world.p is not None
    side, effects = p_hears(world.p, ask(transfer("x")), "expired")
    assert sent(effects, Refused) == [Refused(transfer("x"), "expired", 0.0)]
    assert side == world.p


def test_f36_a_higher_attempt_through_another_d_ends_the_lower_one() -> None:
    world = ready_world()
    assert world.p is not None
    side = second_d(world.p)
    side, effects = p_hears(side, ask(transfer("r", attempt=2)), peer=NodeId("D2"))
    assert sent(effects, Failed) == [Failed(R, "superseded")]
    assert [released.transfer for released in of(effects, NodeReleased)] == [R]
    side, effects = p_hears(side, ask(transfer("r", attempt=1, try_number=2)))
    assert [refused.reason for refused in sent(effects, Refused)] == ["superseded"]


def test_what_p_computes_for_a_d_that_has_not_reserved_is_capped() -> None:
    world = ready_world()
    assert world.p is not None
    side = replace(world.p, local=replace(world.p.local, unreserved_positions=3))
    side, effects = p_hears(side, ask(transfer("s")))
    assert not sent(effects, Refused)
    side, effects = p_hears(side, ask(transfer("t")))
    assert [refused.reason for refused in sent(effects, Refused)] == ["too_many_unreserved"]


def test_a_hung_d_holds_only_its_share_of_the_sending_slots() -> None:
    sending = new_sending_slots(4, slots_per_session=2)
    for index in range(2):
        assert sending.available(session=1)
        sending, _ = sending.gather(1, R, index, CreditNumber(index))
    assert not sending.available(session=1)
    assert sending.available(session=2)


@pytest.mark.parametrize(
    "broken",
    [
        {"slot_bytes": 1 << 30},
        {"slot_bytes": 0},
        {"from_position": 7},
        {"first_parcel": 1},
        {"credits": (messages.Credit(CreditNumber(0), 17),)},
        {"credits": tuple(messages.Credit(CreditNumber(n), 16) for n in range(3))},
    ],
    ids=str,
)
def test_credits_that_do_not_fit_p_s_own_cut_end_the_transfer(broken: dict[str, Any]) -> None:
    world = until(ready_world(), lambda w: w.p is not None and w.p.transfers[R].expected_positions > 0)
    assert world.p is not None
    good = Credits(R, 0, 8, 0, (messages.Credit(CreditNumber(0), 16),), SessionNonce(501))
    assert not sent(p_hears(world.p, good)[1], Failed)
    _, effects = p_hears(world.p, replace(good, **broken))
    assert sent(effects, Failed) == [Failed(R, "bad_credits")]


def cut_into_too_many(*cut: Any) -> tuple[ParcelName, ...]:
    raise TooManyParcels("slot_bytes is 8: too many parcels")


def test_f17_p_refuses_credits_whose_slots_are_so_small_that_a_transfer_would_be_too_many_parcels() -> None:
    world = until(ready_world(), lambda w: w.p is not None and w.p.transfers[R].expected_positions > 0)
    assert world.p is not None
    side = replace(world.p, local=replace(world.p.local, cut=cut_into_too_many))
    _, effects = p_hears(side, Credits(R, 0, 8, 0, (messages.Credit(CreditNumber(0), 16),), SessionNonce(501)))
    assert sent(effects, Failed) == [Failed(R, "bad_credits")]


def test_f17_d_keeps_its_cached_prefix_when_the_rest_would_be_too_many_parcels() -> None:
    world = until(ready_world(), lambda w: w.d is not None and w.d.transfers[R].expected_positions > 0)
    assert world.d is not None
    side = replace(world.d, local=replace(world.d.local, cut=cut_into_too_many))
    side, effects = decode_side.handle(side, events.Reserved(R, 1, world.d.transfers[R].expected_positions))
    assert sent(effects, messages.Abort) == [messages.Abort(R, "too_many_parcels")]
    assert of(effects, NodeEnded) == [NodeEnded(R, "too_many_parcels", 1, 1, 0)]
    assert not sent(effects, Credits)


def test_f17_two_sends_are_never_open_under_one_credit_number() -> None:
    world = until(ready_world(), lambda w: w.p is not None and w.p.transfers[R].expected_positions > 0)
    assert world.p is not None
    side, _ = prefill_side.handle(world.p, events.Computed(R, world.plan.positions))
    twice = (messages.Credit(CreditNumber(0), 16),) * 2
    side, effects = p_hears(side, Credits(R, 0, 8, 0, twice, SessionNonce(501)))
    first, second = (gather.slot for gather in of(effects, Gather))
    side, effects = prefill_side.handle(side, events.Gathered(first, 1))
    assert len(of(effects, SendParcel)) == 1
    side, effects = prefill_side.handle(side, events.Gathered(second, 2))
    assert not of(effects, SendParcel)
    assert sent(effects, Failed) == [Failed(R, "bad_credits")]


@pytest.mark.parametrize("number", ["live", "closing"])
def test_f17_a_session_number_of_another_pair_is_refused_until_that_session_is_fenced(number: str) -> None:
    world = ready_world()
    assert world.p is not None
    side, session = world.p, world.p.peers[D].session
    if number == "closing":
        side, _ = p_hears(side, messages.SessionClosed(session))
    other = NodeId("D2")

    def hello(side: PrefillSide) -> tuple[PrefillSide, tuple[Any, ...]]:
        envelope = Envelope(
            Incarnation(4001), Incarnation(0), replace(side.local.hello, node_id=other, session=session)
        )
        return prefill_side.handle(
            prefill_side.handle(side, StreamOpened(other, 0))[0], MessageReceived(other, envelope)
        )

    refused, effects = hello(side)
    assert not of(effects, OpenLane)
    assert len(sent(effects, HelloRefused)) == 1
    assert other not in refused.peers
    if number == "closing":
        assert of(hello(prefill_side.handle(refused, Fenced(D, session))[0])[1], OpenLane)


@pytest.mark.parametrize("offer", [Offer(R, 3, 2), Offer(R, 0, 5)], ids=str)
def test_an_offer_of_what_was_not_asked_for_ends_the_transfer(offer: Offer) -> None:
    _, effects = d_hears(ready_world(), offer)
    assert [ended.reason for ended in of(effects, NodeEnded)] == ["bad_offer"]


def test_f37_a_first_token_for_another_position_is_not_taken() -> None:
    _, effects = d_hears(ready_world(), messages.FirstToken(R, 1, None))
    assert [ended.reason for ended in of(effects, NodeEnded)] == ["bad_first_token"]


def test_f06_a_send_that_breaks_ends_the_session_and_d_hears_of_each_transfer() -> None:
    world = until(ready_world(), lambda w: bool(w.flight))
    assert world.p is not None
    slot = next(index for index, _ in world.sends)
    side, effects = prefill_side.handle(world.p, events.SendFailed(SlotIndex(slot), "connection_reset"))
    assert sent(effects, Failed) == [Failed(R, "connection_reset")]
    assert [released.reason for released in of(effects, NodeReleased)] == ["connection_reset"]
    assert not side.peers


def test_gone_while_a_credit_is_open_ends_the_session_since_nobody_can_say_what_was_used() -> None:
    world = until(ready_world(), lambda w: bool(w.posted))
    side, effects = d_hears(world, messages.Gone(R))
    assert Count(P, "gone_with_credits") in effects
    assert not of(effects, CancelReceive)
    assert side.arenas[1].unresolved == 1


# --- deadlines ----------------------------------------------------------------------------------------------------

LIMITS = Limits()


def looks(side: DecodeSide, times_s: list[float], change: Callable[[DecodeSide, int], DecodeSide]) -> list[Any]:
    watch = Watch()
    passed: list[Any] = []
    for index, now_s in enumerate(times_s):
        side = change(side, index)
        watch, events_now = watch.look(decode_waits(side, LIMITS), now_s)
        passed.extend(events_now)
    return passed


def hearing(side: DecodeSide, index: int) -> DecodeSide:
    """The peer sends heartbeats, but its engine stands still."""
    beat = messages.Heartbeat(5, True)
    return side if index == 0 else d_hears_side(side, beat)


def working(side: DecodeSide, index: int) -> DecodeSide:
    return d_hears_side(side, messages.Heartbeat(index, True))


def d_hears_side(side: DecodeSide, message: Any) -> DecodeSide:
    envelope = Envelope(side.peers[P].incarnation, side.local.incarnation, message)
    return decode_side.handle(side, MessageReceived(P, envelope))[0]


SECONDS = [float(second) for second in range(30)]


def asked_side() -> DecodeSide:
    side = ready_world().d
    assert side is not None
    return side


def test_a_peer_of_whom_nothing_is_heard_is_silent_after_the_limit() -> None:
    assert Silent(P) in looks(asked_side(), [0.0, 1.0, 1.9, 2.0], lambda side, _: side)
    assert Silent(P) not in looks(asked_side(), [0.0, 1.0, 1.9], lambda side, _: side)


def test_f02_a_heartbeat_alone_proves_no_progress() -> None:
    passed = looks(asked_side(), SECONDS[:5], hearing)
    assert Stalled(R) in passed
    assert Silent(P) not in passed


def test_f14_slow_is_not_dead() -> None:
    assert looks(asked_side(), SECONDS, working) == []


def test_f02_no_progress_ends_the_transfer_and_only_that() -> None:
    side, effects = decode_side.handle(asked_side(), Stalled(R))
    assert [ended.reason for ended in of(effects, NodeEnded)] == ["prefill_stalled"]
    assert P in side.peers


def test_a_lease_that_is_not_renewed_ends_the_transfer_on_p() -> None:
    side = ready_world().p
    assert side is not None
    watch = Watch()
    passed: list[Any] = []
    for second in SECONDS:
        side, _ = p_hears(side, messages.Heartbeat(int(second), True, (R,) if second < 5 else ()))
        watch, events_now = watch.look(prefill_waits(side, LIMITS), second + 10.0)
        passed.extend(events_now)
    assert passed == []
    for second in range(30, 36):
        side, _ = p_hears(side, messages.Heartbeat(second, True))
        watch, events_now = watch.look(prefill_waits(side, LIMITS), second + 10.0)
        passed.extend(events_now)
    assert passed == [LeaseExpired(R)]
    _, effects = prefill_side.handle(side, LeaseExpired(R))
    assert sent(effects, Failed) == [Failed(R, "lease")]


def test_d_is_not_waited_for_while_it_holds_back_credits_for_early_layers() -> None:
    side, _ = prefill_side.handle(early_side(credits=1), events.LayersComputed(R, 1, 1))
    side, _ = prefill_side.handle(side, events.Computed(R, 1))
    assert Stalled(R) in {wait.event for wait in prefill_waits(side, LIMITS)}
    side, _ = p_hears(side, early_credits(1, 2))
    side, _ = prefill_side.handle(side, events.LayersComputed(R, 2, 1))
    assert Stalled(R) not in {wait.event for wait in prefill_waits(side, LIMITS)}
    side, _ = prefill_side.handle(side, events.Computed(R, 2))
    assert Stalled(R) in {wait.event for wait in prefill_waits(side, LIMITS)}


def test_a_local_node_is_no_part_of_a_state_s_identity() -> None:
    side = asked_side()
    other = LocalNode(Incarnation(9), side.local.hello, 0, sum)
    assert replace(side, local=other) == side
    assert hash(replace(side, local=other)) == hash(side)


def test_the_sender_s_completion_moves_nothing_on_d() -> None:
    world = until(ready_world(), lambda w: bool(w.sends))
    assert world.p is not None
    side, effects = prefill_side.handle(world.p, events.Sent(SlotIndex(next(slot for slot, _ in world.sends))))
    assert not [effect for effect in effects if isinstance(effect, Send | SendParcel)]
    assert side.transfers == world.p.transfers
