"""P's end of a pair: D dials, P answers. Hello, the lane, synchronising after a break, and the end of a session.

A session ends once, in `session_over`: its transfers end, its endpoint is destroyed, and when the transport has proved that
(`Fenced`), D is told if it asks: the proof empties D's quarantine.

Must not know: how a transfer proceeds.
"""

from __future__ import annotations

from foundation.ids import Incarnation, NodeId, TransferId
from kv_transfer.protocol.effects import CloseSession, CloseStream, LaneMeasured, OpenLane
from kv_transfer.protocol.events import Beat, Fenced, LaneFailed, LaneOpened, MessageReceived, StreamLost, StreamOpened
from kv_transfer.protocol.messages import (
    Accepted,
    Gone,
    Heartbeat,
    Hello,
    HelloRefused,
    LaneReport,
    Offer,
    PairMessage,
    SessionClosed,
    Sync,
    SyncedTransfer,
    WrongIncarnation,
)
from kv_transfer.protocol.peer import NOBODY, Peer, PeerState, PeerStep, hello_mismatch
from kv_transfer.protocol.prefill_transfer import PrefillState, PrefillTransfer, SessionOver
from kv_transfer.protocol.prefill_turn import ClosingSession, PrefillTurn
from kv_transfer.protocol.record import replace


def stream_opened(turn: PrefillTurn, event: StreamOpened) -> None:
    peer = turn.peers.get(event.peer) or Peer(event.peer)
    assert not peer.streaming, f"a second stream of {event.peer}"
    turn.peers = turn.peers.put(event.peer, replace(peer, streaming=True))


def stream_lost(turn: PrefillTurn, event: StreamLost) -> None:
    peer = turn.peers.get(event.peer)
    if peer is None or not peer.streaming:
        return
    turn.out.count(event.peer, "stream_lost")
    if peer.state is PeerState.CONNECTING:
        turn.peers = turn.peers.drop(event.peer)
    else:
        turn.peers = turn.peers.put(event.peer, replace(peer.take(PeerStep.STREAM_LOST), streaming=False))


def lane_opened(turn: PrefillTurn, event: LaneOpened) -> None:
    peer = turn.peers.get(event.peer)
    if peer is None or peer.session != event.session:
        turn.out.add(CloseSession(event.peer, event.session))
        return
    peer = replace(peer, lane_open=True)
    turn.peers = turn.peers.put(event.peer, peer)
    turn.out.tell(peer, LaneReport(event.lane, event.bytes_per_second / 1e9))
    turn.pump()


def lane_failed(turn: PrefillTurn, event: LaneFailed) -> None:
    peer = turn.peers.get(event.peer)
    if peer is not None and peer.session == event.session:
        session_over(turn, peer, event.reason, tell=True)


def session_over(turn: PrefillTurn, peer: Peer, reason: str, *, tell: bool) -> None:
    """The pair's session ends. `tell`: D does not know yet, so every transfer says that it failed, and why."""
    turn.out.count(peer.node_id, reason)
    for transfer in turn.transfers_of(peer.node_id):
        if tell and transfer.state is not PrefillState.ENDING:
            turn.say_ending(replace(transfer, end_reason=reason), failed=True)
        turn.end(transfer, SessionOver, reason, failed=False, acknowledged=True)
    if peer.streaming:
        turn.out.add(CloseStream(peer.node_id))
    if peer.session:
        turn.out.add(CloseSession(peer.node_id, peer.session))
        turn.closing = turn.closing.put(peer.session, ClosingSession(peer.node_id, peer.incarnation))
    assert peer.take(PeerStep.OVER).state is PeerState.LOST
    turn.peers = turn.peers.drop(peer.node_id)


def fenced(turn: PrefillTurn, event: Fenced) -> None:
    """The endpoint is destroyed and the device synchronised: sending slots are free, and D may be told."""
    peer = turn.peers.get(event.peer)
    if peer is not None and peer.session == event.session:
        session_over(turn, peer, "endpoint_closed", tell=True)
    turn.sending = turn.sending.fence(event.session)
    if event.session in turn.closing:
        closing = turn.closing[event.session]
        turn.closing = turn.closing.drop(event.session)
        if closing.answer_due:
            _answer_closed(turn, closing.peer, closing.incarnation, event.session)
    turn.pump()


def _answer_closed(turn: PrefillTurn, node: NodeId, incarnation: Incarnation, session: int) -> None:
    """Say that the session is closed, on whichever stream D has to us; one that has no session ends with the answer."""
    peer = turn.peers.get(node)
    if peer is None or not peer.streaming:
        return
    turn.out.send(peer.node_id, incarnation, SessionClosed(session))
    if peer.state is PeerState.CONNECTING:
        turn.out.add(CloseStream(peer.node_id))
        turn.peers = turn.peers.drop(peer.node_id)


def beat(turn: PrefillTurn, event: Beat) -> None:
    for peer in turn.peers.values():
        turn.out.tell(peer, Heartbeat(event.engine_steps, event.has_work))


# --- messages -----------------------------------------------------------------------------------------------------


def right_incarnations(turn: PrefillTurn, peer: Peer, event: MessageReceived) -> bool:
    """Whether sender and addressee are who they should be; if not, the message changes nothing."""
    envelope = event.envelope
    first_hello = isinstance(envelope.message, Hello) and envelope.addressee == NOBODY
    if envelope.addressee != turn.local.incarnation and not first_hello:
        turn.out.count(event.peer, "wrong_incarnation")
        if not isinstance(envelope.message, WrongIncarnation):
            turn.out.send(event.peer, envelope.sender, WrongIncarnation(turn.local.incarnation))
        return False
    if envelope.sender != peer.incarnation and not isinstance(envelope.message, Hello):
        turn.out.count(event.peer, "wrong_incarnation")
        return False
    return True


def pair_message(turn: PrefillTurn, peer: Peer, event: MessageReceived, message: PairMessage) -> None:
    match message:
        case Hello():
            hello_received(turn, peer, event, message)
        case LaneReport():
            turn.out.add(LaneMeasured(peer.node_id, message.lane, message.gigabytes_per_second))
        case Heartbeat():
            _renew(turn, peer, message.leases)
        case Sync():
            _sync_received(turn, peer, message)
        case SessionClosed():
            _session_closed(turn, peer, message)
        case HelloRefused() | WrongIncarnation():
            turn.out.count(peer.node_id, "unexpected_refusal")


def hello_received(turn: PrefillTurn, peer: Peer, event: MessageReceived, hello: Hello) -> None:
    """A first Hello (addressed to nobody in particular) opens a new session and ends the one before; one that is addressed
    to us goes on with a session that we should know."""
    sender = event.envelope.sender
    if event.envelope.addressee != NOBODY:
        _session_resumed(turn, peer, sender, hello)
        return
    if peer.session == hello.session:
        turn.out.count(peer.node_id, "repeated_hello")
        return
    if peer.session:
        session_over(turn, replace(peer, streaming=False), "replaced", tell=False)
    mismatch = hello_mismatch(turn.local.hello, hello, turn.local.cut)
    if refusal := mismatch or _session_taken(turn, hello.session):
        turn.out.send(event.peer, sender, HelloRefused(refusal))
        turn.out.add(CloseStream(event.peer))
        turn.peers = turn.peers.drop(event.peer) if event.peer in turn.peers else turn.peers
        return
    fresh = Peer(event.peer, incarnation=sender, hello=hello, session=hello.session, streaming=True)
    fresh = fresh.take(PeerStep.PAIRED)
    turn.peers = turn.peers.put(event.peer, fresh)
    turn.out.tell(fresh, replace(turn.local.hello, session=hello.session))
    turn.out.add(OpenLane(event.peer, hello.session, ""))


def _session_taken(turn: PrefillTurn, session: int) -> str | None:
    """Numbers are drawn at random, so it is a stranger who says one that is another pair's, or not fenced yet."""
    taken = session in turn.closing or any(peer.session == session for peer in turn.peers.values())
    return f"session: {session:#x} is taken" if taken else None


def _session_resumed(turn: PrefillTurn, peer: Peer, sender: Incarnation, hello: Hello) -> None:
    if peer.state is PeerState.SUSPECT and (peer.incarnation, peer.session) == (sender, hello.session):
        turn.out.send(peer.node_id, sender, replace(turn.local.hello, session=hello.session))
        transfers = tuple(transfer.synced() for transfer in turn.transfers_of(peer.node_id))
        turn.out.send(peer.node_id, sender, Sync(transfers))
    elif peer.state is PeerState.CONNECTING:
        _say_closed(turn, replace(peer, incarnation=sender), hello.session)
    else:
        turn.out.count(peer.node_id, "repeated_hello")


def _session_closed(turn: PrefillTurn, peer: Peer, message: SessionClosed) -> None:
    if message.session == peer.session:
        session_over(turn, peer, "closed_by_peer", tell=False)
    else:
        _say_closed(turn, peer, message.session)


def _say_closed(turn: PrefillTurn, peer: Peer, session: int) -> None:
    """D wants the proof that we have closed this session: at once, or as soon as the transport has it."""
    if session in turn.closing:
        turn.closing = turn.closing.put(session, replace(turn.closing[session], answer_due=True))
    else:
        _answer_closed(turn, peer.node_id, peer.incarnation, session)


def _renew(turn: PrefillTurn, peer: Peer, leases: tuple[TransferId, ...]) -> None:
    renewed = frozenset(leases)
    for transfer in turn.transfers_of(peer.node_id):
        if transfer.id in renewed:
            turn.put(replace(transfer, renewals=transfer.renewals + 1))


def _sync_received(turn: PrefillTurn, peer: Peer, sync: Sync) -> None:
    """D has said what it knows: say again what it lacks. What it does not know it has forgotten, and for good."""
    if peer.state is not PeerState.SUSPECT or not peer.streaming:
        turn.out.count(peer.node_id, "late_sync")
        return
    peer = peer.take(PeerStep.SYNCED)
    turn.peers = turn.peers.put(peer.node_id, peer)
    known = {synced.transfer: synced for synced in sync.transfers}
    for transfer in turn.transfers_of(peer.node_id):
        if transfer.id in known:
            _say_again(turn, peer, transfer, known[transfer.id])
        else:
            turn.end(transfer, Gone, "gone", failed=False, acknowledged=True)


def _say_again(turn: PrefillTurn, peer: Peer, transfer: PrefillTransfer, theirs: SyncedTransfer) -> None:
    if transfer.state is PrefillState.ENDING:
        turn.say_ending(transfer, failed=True)
        return
    turn.out.tell(peer, Accepted(transfer.id))
    if transfer.state is PrefillState.QUEUED:
        return
    turn.out.tell(peer, Offer(transfer.id, transfer.computed_positions, transfer.expected_positions))
    if transfer.first_token is not None and not theirs.first_token:
        turn.out.tell(peer, transfer.first_token)
    if transfer.state is PrefillState.SEALED and not theirs.sealed:
        turn.out.tell(peer, turn.sealed_message(transfer))
