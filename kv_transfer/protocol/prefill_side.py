"""The prefill node's side of all its transfers: `handle(side, event) -> (side, effects)`.

P does what D's credits allow and no more: a parcel is gathered only under a credit, once its KV is computed, into a sending
slot of its own. When a transfer ends, P starts no further send of it and can therefore say at once which credits it used.

Must not know: sockets, clocks, tensors, how tickets are checked.
"""

from __future__ import annotations

from typing import assert_never

from foundation.ids import NodeId
from kv_transfer.plan.parcels import TooManyParcels
from kv_transfer.protocol import prefill_pair
from kv_transfer.protocol.effects import NodePrefill, NodeReleased, PrefillEffect, SendParcel
from kv_transfer.protocol.events import (
    Beat,
    Computed,
    EndpointLost,
    Fenced,
    Gathered,
    Idle,
    LaneFailed,
    LaneOpened,
    LayersComputed,
    LeaseExpired,
    MessageReceived,
    PrefillEvent,
    PrefillFailed,
    PrefillRefused,
    PrefillReserved,
    SendFailed,
    SendRefused,
    Sent,
    Silent,
    Stalled,
    StreamLost,
    StreamOpened,
    TokenSampled,
)
from kv_transfer.protocol.local import LocalNode
from kv_transfer.protocol.messages import (
    Abort,
    Accepted,
    Ask,
    Committed,
    Credits,
    FirstToken,
    FromDecode,
    Gone,
    Offer,
    PairMessage,
    Refused,
    Released,
)
from kv_transfer.protocol.peer import Peer, PeerState
from kv_transfer.protocol.prefill_transfer import (
    BadCredits,
    GatherRefused,
    ParcelGathered,
    PrefillState,
    PrefillTransfer,
    Superseded,
)
from kv_transfer.protocol.prefill_turn import PrefillSide, PrefillTurn
from kv_transfer.protocol.record import replace
from kv_transfer.protocol.sending import SendingStep

BUSY_RETRY_S = 1.0
"""Retry hint of a refusal for too many unreserved positions."""


def handle(side: PrefillSide, event: PrefillEvent) -> tuple[PrefillSide, tuple[PrefillEffect, ...]]:
    turn = PrefillTurn(side)
    _dispatch(turn, event)
    return turn.side(), tuple(turn.out.effects)


def _dispatch(turn: PrefillTurn, event: PrefillEvent) -> None:
    match event:
        case MessageReceived():
            _message_received(turn, event)
        case Gathered():
            _gathered(turn, event)
        case Sent():
            turn.sending = turn.sending.take(event.slot, SendingStep.SENT)
            turn.pump()
        case SendRefused():
            _send_refused(turn, event)
        case SendFailed():
            _send_failed(turn, event)
        case PrefillReserved() | PrefillRefused() | LayersComputed() | Computed() | TokenSampled() | PrefillFailed():
            _node_event(turn, event)
        case Stalled():
            _stalled(turn, event)
        case LeaseExpired():
            transfer = turn.transfers.get(event.transfer)
            if transfer is not None and transfer.accepts(LeaseExpired):
                turn.end(transfer, LeaseExpired, "lease", failed=True)
        case StreamOpened():
            prefill_pair.stream_opened(turn, event)
        case StreamLost():
            prefill_pair.stream_lost(turn, event)
        case LaneOpened():
            prefill_pair.lane_opened(turn, event)
        case LaneFailed():
            prefill_pair.lane_failed(turn, event)
        case EndpointLost():
            _endpoint_lost(turn, event.peer, event.session, event.reason)
        case Fenced():
            prefill_pair.fenced(turn, event)
        case Silent():
            if peer := turn.peers.get(event.peer):
                prefill_pair.session_over(turn, peer, "silent", tell=True)
        case Idle():
            pass  # D opens and closes sessions
        case Beat():
            prefill_pair.beat(turn, event)
        case _:
            assert_never(event)


# --- from the node ------------------------------------------------------------------------------------------------


def _node_event(
    turn: PrefillTurn,
    event: PrefillReserved | PrefillRefused | LayersComputed | Computed | TokenSampled | PrefillFailed,
) -> None:
    """The engine may speak of a transfer that has just ended: it has been, or will be, told."""
    transfer = turn.transfers.get(event.transfer)
    if transfer is None or not transfer.accepts(type(event)):
        return
    match event:
        case PrefillReserved():
            _reserved(turn, transfer, event)
        case PrefillRefused():
            turn.out.tell(turn.peer_of(transfer), Refused(transfer.id, event.reason, event.retry_after_s))
            turn.put(transfer.take(PrefillRefused))
        case LayersComputed():
            _layers_computed(turn, transfer, event)
        case Computed():
            _computed(turn, transfer, event.positions)
        case TokenSampled():
            _token_sampled(turn, transfer, event)
        case PrefillFailed():
            turn.end(transfer, PrefillFailed, event.reason, failed=True)
        case _:
            assert_never(event)


def _reserved(turn: PrefillTurn, transfer: PrefillTransfer, event: PrefillReserved) -> None:
    assert event.cached_positions <= event.expected_positions == transfer.history_positions
    reserved = replace(
        transfer.take(PrefillReserved),
        computed_positions=event.cached_positions,
        expected_positions=event.expected_positions,
    )
    turn.put(reserved)
    _offer(turn, reserved)


def _layers_computed(turn: PrefillTurn, transfer: PrefillTransfer, event: LayersComputed) -> None:
    """D is not told: what leaves early is under credits that it has granted for all."""
    assert transfer.computed_positions < event.positions <= transfer.expected_positions
    assert transfer.ahead_layers < event.end_layer < turn.local.layout.layers
    ahead = replace(transfer.take(LayersComputed), ahead_positions=event.positions, ahead_layers=event.end_layer)
    turn.put(ahead)
    turn.pump()


def _computed(turn: PrefillTurn, transfer: PrefillTransfer, positions: int) -> None:
    assert transfer.computed_positions <= positions <= transfer.expected_positions
    computed = replace(transfer.take(Computed), computed_positions=positions, ahead_positions=0, ahead_layers=0)
    turn.put(computed)
    _offer(turn, computed)
    turn.pump()


def _offer(turn: PrefillTurn, transfer: PrefillTransfer) -> None:
    offer = Offer(transfer.id, transfer.computed_positions, transfer.expected_positions)
    turn.out.tell(turn.peer_of(transfer), offer)


def _token_sampled(turn: PrefillTurn, transfer: PrefillTransfer, event: TokenSampled) -> None:
    """At once, ahead of the KV."""
    assert transfer.first_token is None, f"a second first token of {transfer.id}"
    message = FirstToken(transfer.id, transfer.history_positions, event.tokens)
    turn.out.tell(turn.peer_of(transfer), message)
    turn.seal(replace(transfer.take(TokenSampled), first_token=message))


def _stalled(turn: PrefillTurn, event: Stalled) -> None:
    """No progress in the state's limit. A D that leaves Drained unanswered while it lives breaks the whole session."""
    transfer = turn.transfers.get(event.transfer)
    if transfer is None:
        return
    peer = turn.peer_of(transfer)
    if transfer.state is PrefillState.ENDING and peer is not None:
        prefill_pair.session_over(turn, peer, "unresponsive", tell=True)
    elif transfer.accepts(Stalled):
        turn.end(transfer, Stalled, "transfer_stalled", failed=True)


# --- from the data plane ------------------------------------------------------------------------------------------


def _gathered(turn: PrefillTurn, event: Gathered) -> None:
    """A number that D has granted twice is good for one send at a time."""
    slot = turn.sending.slots[event.slot]
    transfer = turn.transfers[slot.transfer]
    doubled = turn.sending.sends(slot.session, slot.credit)
    sound = transfer.state is PrefillState.SENDING and not event.refusal and not doubled
    turn.sending = turn.sending.take(event.slot, SendingStep.SEND if sound else SendingStep.DROP)
    if sound:
        credit = transfer.credits[slot.parcel_index]
        assert transfer.nonce is not None
        turn.out.add(
            SendParcel(transfer.peer, transfer.session, transfer.nonce, credit.number, event.slot, credit.length)
        )
        digests = transfer.digests.put(slot.parcel_index, event.digest)
        turn.seal(replace(transfer.take(ParcelGathered), digests=digests))
    elif transfer.state is not PrefillState.SENDING:
        turn.settle(transfer)
    elif doubled:
        turn.end(transfer, BadCredits, "bad_credits", failed=True)
    else:
        turn.end(transfer, GatherRefused, event.refusal, failed=True)
    turn.pump()


def _send_refused(turn: PrefillTurn, event: SendRefused) -> None:
    """Not one byte has left: the credit is as unused as before. Once `Drained` has named it as used, D cannot be told: then its
    slot is free again only with the session."""
    slot = turn.sending.slots[event.slot]
    turn.sending = turn.sending.take(event.slot, SendingStep.SENT)
    transfer = turn.transfers.get(slot.transfer)
    if transfer is not None and transfer.state is not PrefillState.ENDING:
        unused = replace(transfer, digests=transfer.digests.drop(slot.parcel_index))
        turn.end(unused, SendRefused, event.reason, failed=True)
    else:
        _session_lost(turn, slot.session, event.reason)
    turn.pump()


def _send_failed(turn: PrefillTurn, event: SendFailed) -> None:
    slot = turn.sending.slots[event.slot]
    turn.sending = turn.sending.take(event.slot, SendingStep.SENT)
    _session_lost(turn, slot.session, event.reason)
    turn.pump()


def _session_lost(turn: PrefillTurn, session: int, reason: str) -> None:
    for peer in turn.peers.values():
        if peer.session == session:
            _endpoint_lost(turn, peer.node_id, session, reason)


def _endpoint_lost(turn: PrefillTurn, node: NodeId, session: int, reason: str) -> None:
    peer = turn.peers.get(node)
    if peer is not None and peer.session == session:
        prefill_pair.session_over(turn, peer, reason, tell=True)


# --- from D -------------------------------------------------------------------------------------------------------


def _message_received(turn: PrefillTurn, event: MessageReceived) -> None:
    peer = turn.peers.get(event.peer)
    if peer is None or not peer.streaming:
        turn.out.count(event.peer, "no_session")
        return
    if not prefill_pair.right_incarnations(turn, peer, event):
        return
    message = event.envelope.message
    peer = peer.heard(message)
    turn.peers = turn.peers.put(event.peer, peer)
    if isinstance(message, PairMessage):
        prefill_pair.pair_message(turn, peer, event, message)
    elif not isinstance(message, FromDecode | Gone) or peer.state is not PeerState.READY:
        turn.out.count(event.peer, f"unexpected_{_label(message)}")
    elif isinstance(message, Ask):
        _asked(turn, peer, message, event.ticket_refusal)
    else:
        _transfer_message(turn, peer, message)


def _label(message: object) -> str:
    return type(message).__name__.lower()


def _asked(turn: PrefillTurn, peer: Peer, ask: Ask, ticket_refusal: str) -> None:
    known = [transfer for transfer in turn.transfers.values() if transfer.id.request == ask.transfer.request]
    if any(transfer.id == ask.transfer for transfer in known):
        turn.out.count(peer.node_id, "late_ask")
        return
    refusal, retry_after_s = ticket_refusal, 0.0
    if not refusal and any(transfer.id > ask.transfer for transfer in known):
        refusal = "superseded"
    if not refusal and _unreserved_positions(turn, peer) > turn.local.unreserved_positions:
        refusal, retry_after_s = "too_many_unreserved", BUSY_RETRY_S
    if refusal:
        turn.out.tell(peer, Refused(ask.transfer, refusal, retry_after_s))
        return
    for transfer in known:
        if transfer.accepts(Superseded):
            turn.end(transfer, Superseded, "superseded", failed=True)
    turn.put(PrefillTransfer(ask, peer.node_id, peer.session, turn.next_turn))
    turn.next_turn += 1
    turn.out.tell(peer, Accepted(ask.transfer))
    turn.out.add(NodePrefill(ask))


def _unreserved_positions(turn: PrefillTurn, peer: Peer) -> int:
    """What P computes, or is about to compute, for this D without knowing that D has room for it."""
    waiting = (PrefillState.QUEUED, PrefillState.RESERVED)
    return sum(transfer.history_positions for transfer in turn.transfers_of(peer.node_id) if transfer.state in waiting)


def _transfer_message(turn: PrefillTurn, peer: Peer, message: Credits | Committed | Abort | Gone) -> None:
    transfer = turn.transfers.get(message.transfer)
    if transfer is None or transfer.peer != peer.node_id or transfer.session != peer.session:
        turn.out.count(peer.node_id, f"unknown_{_label(message)}")
        if not isinstance(message, Gone):
            turn.out.tell(peer, Gone(message.transfer))
        return
    if not transfer.accepts(type(message)) or (isinstance(message, Committed) and not transfer.sealed):
        turn.out.count(peer.node_id, f"late_{_label(message)}")
        return
    match message:
        case Credits():
            _credits(turn, transfer, message)
        case Committed():
            _committed(turn, peer, transfer)
        case Abort():
            turn.end(transfer, Abort, message.reason, failed=False)
        case Gone():
            turn.end(transfer, Gone, "gone", failed=False, acknowledged=True)
        case _:
            assert_never(message)


def _credits(turn: PrefillTurn, transfer: PrefillTransfer, message: Credits) -> None:
    """The i-th credit carries the i-th parcel; credits that are known already change nothing."""
    if transfer.state is PrefillState.RESERVED:
        cut = _cut(turn, transfer, message)
        if cut is None:
            turn.end(transfer, BadCredits, "bad_credits", failed=True)
            return
        transfer = cut
    fresh = message.credits[len(transfer.credits) - message.first_parcel :]
    wanted = transfer.parcels[len(transfer.credits) : len(transfer.credits) + len(fresh)]
    lengths = [parcel.wire_bytes(turn.local.layout) + turn.local.trailer_bytes for parcel in wanted]
    if message.first_parcel > len(transfer.credits) or [credit.length for credit in fresh] != lengths:
        turn.end(transfer, BadCredits, "bad_credits", failed=True)
        return
    turn.seal(replace(transfer.take(Credits), credits=transfer.credits + fresh))
    turn.pump()


def _cut(turn: PrefillTurn, transfer: PrefillTransfer, message: Credits) -> PrefillTransfer | None:
    """P's own cut, which D's first Credits fixes; None when there is none."""
    peer = turn.peer_of(transfer)
    assert peer is not None
    assert peer.hello is not None
    fits = _slot_fits(turn.local, message.slot_bytes) and 0 <= message.from_position <= transfer.expected_positions
    if not fits:
        return None
    try:
        parcels = turn.local.cut(
            message.from_position,
            transfer.expected_positions,
            turn.local.layout,
            peer.hello.layout,
            message.slot_bytes,
        )
    except TooManyParcels:
        return None
    return replace(
        transfer,
        from_position=message.from_position,
        slot_bytes=message.slot_bytes,
        nonce=message.nonce,
        parcels=parcels,
    )


def _slot_fits(local: LocalNode, slot_bytes: int) -> bool:
    return 2 * local.layout.head_bytes <= slot_bytes <= local.hello.slot_bytes


def _committed(turn: PrefillTurn, peer: Peer, transfer: PrefillTransfer) -> None:
    turn.out.tell(peer, Released(transfer.id))
    if not transfer.reported:
        turn.out.add(NodeReleased(transfer.id, "committed"))
    turn.put(transfer.take(Committed))
