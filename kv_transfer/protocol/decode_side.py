"""The decode node's side of all its transfers: `handle(side, event) -> (side, effects)`.

Every event ends the same way: what it freed is granted again, what it proved is settled. Completions of the data plane
name session and credit; messages name incarnations and transfer; what does not match anything changes nothing and is counted.

Must not know: sockets, clocks, tensors.
"""

from __future__ import annotations

from typing import assert_never

from kv_transfer.plan.parcels import TooManyParcels
from kv_transfer.protocol import decode_pair
from kv_transfer.protocol.credit import Arena, Slot, SlotState, SlotStep
from kv_transfer.protocol.decode_transfer import (
    BadManifest,
    CreditsUnused,
    DecodeState,
    DecodeTransfer,
    ParcelRefused,
    ParcelVerified,
    manifest_error,
)
from kv_transfer.protocol.decode_turn import DecodeSide, DecodeTurn
from kv_transfer.protocol.effects import DecodeEffect, NodeFirstToken, NodeReserve, Scatter
from kv_transfer.protocol.events import (
    Beat,
    Begin,
    DecodeEvent,
    DialRefused,
    End,
    EndpointLost,
    Fenced,
    Idle,
    Landed,
    LaneFailed,
    LaneOpened,
    MessageReceived,
    ReceiveCancelled,
    ReceiveFailed,
    Reserved,
    Scattered,
    Silent,
    Stalled,
    StreamLost,
    StreamOpened,
    Unavailable,
)
from kv_transfer.protocol.messages import (
    Accepted,
    Drained,
    Failed,
    FirstToken,
    FromPrefill,
    Gone,
    Offer,
    PairMessage,
    Refused,
    Released,
    Sealed,
)
from kv_transfer.protocol.peer import Peer, PeerState
from kv_transfer.protocol.record import replace

STALLED = {
    DecodeState.ASKED: "prefill_stalled",
    DecodeState.RESERVED: "transfer_stalled",
    DecodeState.LANDING: "transfer_stalled",
}
"""Reason of a transfer that ends because nothing moved, by the state it waited in."""


def handle(side: DecodeSide, event: DecodeEvent) -> tuple[DecodeSide, tuple[DecodeEffect, ...]]:
    turn = DecodeTurn(side)
    _dispatch(turn, event)
    return turn.side(), tuple(turn.out.effects)


def _dispatch(turn: DecodeTurn, event: DecodeEvent) -> None:
    match event:
        case MessageReceived():
            _message_received(turn, event)
        case Landed():
            _landed(turn, event)
        case Scattered():
            _scattered(turn, event)
        case ReceiveFailed():
            _receive_failed(turn, event)
        case ReceiveCancelled():
            _receive_cancelled(turn, event)
        case Begin():
            decode_pair.begin(turn, event.request)
        case Reserved():
            _reserved(turn, event)
        case Unavailable():
            _give_up(turn, event, event.reason)
        case End():
            _give_up(turn, event, event.reason)
        case Stalled():
            _stalled(turn, event)
        case StreamOpened():
            decode_pair.stream_opened(turn, event)
        case StreamLost():
            decode_pair.stream_lost(turn, event)
        case DialRefused():
            decode_pair.dial_refused(turn, event)
        case LaneOpened():
            decode_pair.lane_opened(turn, event)
        case LaneFailed():
            decode_pair.lane_failed(turn, event)
        case EndpointLost():
            peer = turn.peers.get(event.peer)
            if peer is not None and peer.session == event.session:
                decode_pair.session_over(turn, peer, event.reason)
        case Fenced():
            decode_pair.fenced(turn, event)
        case Silent():
            if peer := turn.peers.get(event.peer):
                decode_pair.session_over(turn, peer, "silent")
        case Idle():
            peer = turn.peers.get(event.peer)
            if peer is not None and not turn.transfers_of(event.peer):
                decode_pair.session_over(turn, peer, "idle")
        case Beat():
            decode_pair.beat(turn, event)
        case _:
            assert_never(event)


# --- from the node ------------------------------------------------------------------------------------------------


def _reserved(turn: DecodeTurn, event: Reserved) -> None:
    """The node holds the blocks. From here on the cut is fixed, and with it what has to arrive: nothing, if it were too many
    parcels."""
    transfer = turn.transfers.get(event.transfer)
    if transfer is None or not transfer.accepts(Reserved):
        return
    assert 0 <= event.from_position <= event.end_position == transfer.expected_positions
    peer, arena = turn.peers[transfer.peer], turn.arenas[transfer.session]
    assert peer.hello is not None
    reserved = replace(
        transfer.take(Reserved),
        turn=turn.next_turn,
        from_position=event.from_position,
        end_position=event.from_position,
        slot_bytes=arena.slot_bytes,
    )
    try:
        parcels = turn.local.cut(
            event.from_position, event.end_position, peer.hello.layout, turn.local.layout, arena.slot_bytes
        )
    except TooManyParcels:
        turn.end(reserved, End, "too_many_parcels", abort=True)
        return
    turn.put(replace(reserved, end_position=event.end_position, parcels=parcels))
    turn.next_turn += 1
    turn.grant(transfer.peer)


def _give_up(turn: DecodeTurn, event: End | Unavailable, reason: str) -> None:
    transfer = turn.transfers.get(event.transfer)
    if transfer is not None and transfer.accepts(type(event)):
        already = transfer.state is DecodeState.ENDING
        turn.end(transfer, type(event), reason, abort=not already)


def _stalled(turn: DecodeTurn, event: Stalled) -> None:
    """No progress in the state's limit. A P that leaves an Abort unanswered while it lives breaks the whole session."""
    transfer = turn.transfers.get(event.transfer)
    if transfer is None:
        return
    if transfer.state is DecodeState.COMMITTED:
        turn.put(transfer.take(Stalled))
    elif transfer.state is DecodeState.ENDING:
        peer = turn.peers.get(transfer.peer)
        if peer is not None and peer.session == transfer.session:
            decode_pair.session_over(turn, peer, "unresponsive")
    else:
        turn.end(transfer, Stalled, STALLED[transfer.state], abort=True)


# --- from the data plane ------------------------------------------------------------------------------------------


def _open_slot(turn: DecodeTurn, event: Landed | ReceiveFailed | ReceiveCancelled) -> tuple[Arena, Slot] | None:
    """The slot that a completion is about; None when a fence has resolved it before."""
    arena = turn.arenas.get(event.session)
    slot = None if arena is None else arena.taken.get(event.credit)
    if arena is None or slot is None:
        turn.out.count(event.peer, "resolved_already")
        return None
    return arena, slot


def _landed(turn: DecodeTurn, event: Landed) -> None:
    found = _open_slot(turn, event)
    if found is None:
        return
    arena, slot = found
    transfer = turn.transfers.get(slot.transfer)
    if slot.state is SlotState.QUARANTINED:
        arena = arena.take(event.credit, SlotStep.LAND)
    elif slot.state is SlotState.POSTED and transfer is not None and transfer.state is DecodeState.LANDING:
        arena = arena.take(event.credit, SlotStep.LAND, SlotStep.SCATTER)
        turn.out.add(_scatter(arena, transfer, slot))
    else:
        arena = arena.take(event.credit, SlotStep.LAND, SlotStep.DROP)
        turn.out.count(event.peer, "late_parcel")
    turn.keep_arena(arena)
    turn.grant_again(arena)


def _scatter(arena: Arena, transfer: DecodeTransfer, slot: Slot) -> Scatter:
    parcel = transfer.parcels[slot.parcel_index]
    return Scatter(arena.peer, arena.session, slot.credit, slot.index, transfer.id, slot.parcel_index, parcel)


def _receive_failed(turn: DecodeTurn, event: ReceiveFailed) -> None:
    found = _open_slot(turn, event)
    if found is None:
        return
    arena, slot = found
    arena = arena.take(event.credit, SlotStep.FAILED)
    turn.keep_arena(arena)
    transfer = turn.transfers.get(slot.transfer)
    if transfer is not None and transfer.state is DecodeState.LANDING:
        turn.end(transfer, ParcelRefused, event.reason, abort=True)
    turn.grant_again(arena)


def _receive_cancelled(turn: DecodeTurn, event: ReceiveCancelled) -> None:
    if found := _open_slot(turn, event):
        arena = found[0].take(event.credit, SlotStep.CANCELLED)
        turn.keep_arena(arena)
        turn.grant_again(arena)


def _scattered(turn: DecodeTurn, event: Scattered) -> None:
    """Verified and finished on the device, or refused. Counts for the verified prefix even if the transfer is ending."""
    arena = turn.arenas[event.session]
    slot = arena.taken.get(event.credit)
    assert slot is not None, f"scatter of credit {event.credit} finished twice"
    arena = arena.take(event.credit, SlotStep.FINISH)
    turn.keep_arena(arena)
    transfer = turn.transfers[slot.transfer]
    if not event.refusal:
        verified = transfer.verified.put(slot.parcel_index, event.digest)
        turn.settle(replace(transfer.take(ParcelVerified), verified=verified))
    elif transfer.state is DecodeState.LANDING:
        turn.end(transfer, ParcelRefused, event.refusal, abort=True)
    else:
        turn.settle(transfer.take(ParcelRefused))
    turn.grant_again(arena)


# --- from P -------------------------------------------------------------------------------------------------------


def _message_received(turn: DecodeTurn, event: MessageReceived) -> None:
    peer = turn.peers.get(event.peer)
    if peer is None or not peer.streaming:
        turn.out.count(event.peer, "no_session")
        return
    if not decode_pair.right_incarnations(turn, peer, event):
        return
    message = event.envelope.message
    peer = peer.heard(message)
    turn.peers = turn.peers.put(event.peer, peer)
    if isinstance(message, PairMessage):
        decode_pair.pair_message(turn, peer, message, event.envelope.sender)
    elif not isinstance(message, FromPrefill | Gone) or peer.state is not PeerState.READY:
        turn.out.count(event.peer, f"unexpected_{_label(message)}")
    else:
        _transfer_message(turn, peer, message)


def _transfer_message(turn: DecodeTurn, peer: Peer, message: FromPrefill | Gone) -> None:
    transfer = turn.transfers.get(message.transfer)
    if transfer is None or transfer.peer != peer.node_id or transfer.session != peer.session:
        turn.out.count(peer.node_id, f"unknown_{_label(message)}")
        if not isinstance(message, Gone):
            turn.out.tell(peer, Gone(message.transfer))
        return
    if not transfer.accepts(type(message)):
        turn.out.count(peer.node_id, f"late_{_label(message)}")
        return
    match message:
        case Accepted():
            turn.put(transfer.take(Accepted))
        case Offer():
            _offered(turn, transfer, message)
        case FirstToken():
            _first_token(turn, transfer, message)
        case Sealed():
            _sealed(turn, transfer, message)
        case Released():
            turn.put(transfer.take(Released))
        case Failed():
            _failed(turn, transfer, message)
        case Drained():
            _drained(turn, peer, transfer, message)
        case Refused():
            turn.end(transfer, Refused, f"refused: {message.reason}", abort=False, drained=True)
        case Gone():
            decode_pair.gone(turn, transfer)
        case _:
            assert_never(message)


def _label(message: object) -> str:
    return type(message).__name__.lower()


def _offered(turn: DecodeTurn, transfer: DecodeTransfer, offer: Offer) -> None:
    """The first Offer asks the node for blocks; later ones say that more is computed."""
    if not 0 <= offer.ready_positions <= offer.expected_positions == transfer.first_token_position:
        turn.end(transfer, Failed, "bad_offer", abort=True)
        return
    first = not transfer.expected_positions
    ready = max(transfer.ready_positions, offer.ready_positions)
    turn.put(replace(transfer.take(Offer), ready_positions=ready, expected_positions=offer.expected_positions))
    if first:
        turn.out.add(NodeReserve(transfer.id, offer.expected_positions))
    turn.grant(transfer.peer)


def _first_token(turn: DecodeTurn, transfer: DecodeTransfer, message: FirstToken) -> None:
    """Taken once; from then on it is history."""
    if transfer.first_token:
        turn.out.count(transfer.peer, "late_firsttoken")
    elif message.position != transfer.first_token_position or message.tokens == ():
        turn.end(transfer, Failed, "bad_first_token", abort=True)
    else:
        turn.put(replace(transfer.take(FirstToken), first_token=True))
        turn.out.add(NodeFirstToken(transfer.id, message.tokens[0] if message.tokens else None))


def _sealed(turn: DecodeTurn, transfer: DecodeTransfer, message: Sealed) -> None:
    if transfer.manifest is not None:
        turn.out.count(transfer.peer, "late_sealed")
    elif error := manifest_error(transfer, message, turn.local.digest_of_all):
        turn.end(transfer, BadManifest, error, abort=True)
    else:
        turn.settle(replace(transfer.take(Sealed), manifest=message))


def _failed(turn: DecodeTurn, transfer: DecodeTransfer, message: Failed) -> None:
    """Void once P has sealed: all that was wanted has been sent."""
    if transfer.manifest is not None and transfer.state is DecodeState.LANDING:
        turn.out.count(transfer.peer, "failed_after_sealed")
        turn.put(replace(transfer, void_failure=message.reason))
    else:
        turn.end(transfer, Failed, message.reason, abort=False)


def _drained(turn: DecodeTurn, peer: Peer, transfer: DecodeTransfer, message: Drained) -> None:
    """P's last word on this transfer's credits. The answer lets P forget the transfer, unless D still means to commit it."""
    unused = turn.resolve_unused(transfer, frozenset(message.used_credits))
    drained = replace(transfer.take(Drained), drained=True)
    if transfer.state is DecodeState.ENDING:
        turn.settle(drained)
        turn.out.tell(peer, Gone(transfer.id))
    elif unused or transfer.manifest is None:
        turn.end(drained, CreditsUnused, transfer.void_failure or "credits_unused", abort=False)
    else:
        turn.put(drained)
