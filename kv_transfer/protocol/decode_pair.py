"""D's end of a pair: dialling, Hello, the lane, synchronising after a break, and the end of a session.

D opens every session. A session ends once, in `session_over`, for whatever reason; its transfers end with that reason, and
its arena is released when every credit on it is resolved, or waits for its fence.

Must not know: how a transfer proceeds.
"""

from __future__ import annotations

from foundation.ids import Incarnation, NodeId, TransferId
from kv_transfer.port import BeginTransfer
from kv_transfer.protocol.credit import CREDIT_NUMBER_LIMIT, Arena, SlotState, all_free
from kv_transfer.protocol.decode_transfer import DecodeState, DecodeTransfer, SessionOver
from kv_transfer.protocol.decode_turn import DecodeTurn
from kv_transfer.protocol.effects import (
    CloseSession,
    CloseStream,
    LaneMeasured,
    NodeEnded,
    OpenLane,
    OpenStream,
    QuarantineArena,
    ReleaseArena,
)
from kv_transfer.protocol.events import (
    Beat,
    DialRefused,
    Fenced,
    LaneFailed,
    LaneOpened,
    MessageReceived,
    StreamLost,
    StreamOpened,
)
from kv_transfer.protocol.messages import (
    Abort,
    Committed,
    Credit,
    Credits,
    Gone,
    Heartbeat,
    Hello,
    HelloRefused,
    LaneReport,
    PairMessage,
    SessionClosed,
    Sync,
    SyncedTransfer,
    WrongIncarnation,
)
from kv_transfer.protocol.peer import NOBODY, Peer, PeerState, PeerStep, hello_mismatch
from kv_transfer.protocol.record import replace


def begin(turn: DecodeTurn, request: BeginTransfer) -> None:
    """Ask the request's prefill node, now or as soon as the pair is READY."""
    assert request.transfer not in turn.transfers, f"transfer {request.transfer} began twice"
    node = request.prefill_node
    if node in turn.peers and _worn_out(turn, turn.peers[node]):
        session_over(turn, turn.peers[node], "credit_numbers_exhausted")
    if node not in turn.peers:
        if sum(arena.quarantined for arena in turn.arenas.values()) >= turn.local.quarantine_arenas:
            turn.out.add(NodeEnded(request.transfer, "quarantine_full", 0, 0, 0))
            return
        _connect(turn, node, request.control_address)
    transfer = DecodeTransfer(request)
    turn.put(transfer)
    if turn.peers[node].state is PeerState.READY:
        turn.ask(transfer)


def _worn_out(turn: DecodeTurn, peer: Peer) -> bool:
    """The session ends well before its credit numbers do: once in some ten million parcels."""
    arena = turn.arenas.get(peer.session)
    return arena is not None and arena.next_number >= CREDIT_NUMBER_LIMIT // 4 * 3


def _connect(turn: DecodeTurn, node: NodeId, control_address: str) -> None:
    turn.peers = turn.peers.put(node, Peer(node, control_address=control_address))
    turn.out.add(OpenStream(node, control_address))


def stream_opened(turn: DecodeTurn, event: StreamOpened) -> None:
    peer = turn.peers.get(event.peer)
    if peer is None:
        turn.out.add(CloseStream(event.peer))
        return
    assert not peer.streaming, f"a second stream to {event.peer}"
    if peer.state is PeerState.CONNECTING:
        peer = replace(peer, streaming=True, session=event.fresh_session)
        turn.out.send(peer.node_id, NOBODY, _hello(turn, peer))
    else:
        peer = replace(peer, streaming=True)
        turn.out.send(peer.node_id, peer.incarnation, _hello(turn, peer))
        turn.out.send(peer.node_id, peer.incarnation, _sync(turn, peer))
    turn.peers = turn.peers.put(event.peer, peer)


def _hello(turn: DecodeTurn, peer: Peer) -> Hello:
    return replace(turn.local.hello, session=peer.session)


def _sync(turn: DecodeTurn, peer: Peer) -> Sync:
    asked = (transfer for transfer in turn.transfers_of(peer.node_id) if transfer.session == peer.session)
    return Sync(tuple(transfer.synced() for transfer in asked))


def stream_lost(turn: DecodeTurn, event: StreamLost) -> None:
    """Dial again. A session that was still being set up starts afresh; one that stands waits for `Sync`."""
    peer = turn.peers.get(event.peer)
    if peer is None or not peer.streaming:
        return
    turn.out.count(event.peer, "stream_lost")
    if peer.state is PeerState.CONNECTING:
        if peer.hello is not None:
            turn.out.add(CloseSession(event.peer, peer.session))
        peer = Peer(event.peer, control_address=peer.control_address)
    else:
        peer = replace(peer.take(PeerStep.STREAM_LOST), streaming=False)
    turn.peers = turn.peers.put(event.peer, peer)
    turn.out.add(OpenStream(event.peer, peer.control_address))


def dial_refused(turn: DecodeTurn, event: DialRefused) -> None:
    """What everybody knows need not be waited for. Where a session stands, its P may just be out of reach for a moment: the
    silence limit decides."""
    peer = turn.peers.get(event.peer)
    if peer is not None and peer.state is PeerState.CONNECTING:
        session_over(turn, peer, event.reason)


def lane_opened(turn: DecodeTurn, event: LaneOpened) -> None:
    peer = turn.peers.get(event.peer)
    if peer is None or peer.session != event.session:
        turn.out.add(CloseSession(event.peer, event.session))
        turn.out.add(ReleaseArena(event.peer, event.session))
        return
    hello = peer.hello
    assert hello is not None
    peer = replace(peer.take(PeerStep.PAIRED), lane_open=True)
    turn.peers = turn.peers.put(event.peer, peer)
    turn.arenas = turn.arenas.put(event.session, _arena(turn, peer, hello, event))
    turn.out.tell(peer, LaneReport(event.lane, event.bytes_per_second / 1e9))
    for arena in turn.arenas.values():
        if arena.quarantined and arena.incarnation == peer.incarnation:
            turn.out.tell(peer, SessionClosed(arena.session))
    for transfer in turn.transfers_of(event.peer):
        if transfer.state is DecodeState.ASKED:
            turn.ask(transfer)


def _arena(turn: DecodeTurn, peer: Peer, hello: Hello, event: LaneOpened) -> Arena:
    """What is in flight at once must land within a quarter of the silence limit, and so must one parcel."""
    one_cell = 2 * turn.local.layout.head_bytes
    limit = max(int(event.bytes_per_second * turn.local.silence_limit_s / 4), one_cell + turn.local.trailer_bytes)
    return Arena(
        peer=peer.node_id,
        control_address=peer.control_address,
        incarnation=peer.incarnation,
        session=event.session,
        nonce=event.nonce,
        slot_bytes=min(event.slot_bytes, hello.slot_bytes, limit - turn.local.trailer_bytes),
        granted_bytes_limit=limit,
        free=all_free(event.slots),
    )


def lane_failed(turn: DecodeTurn, event: LaneFailed) -> None:
    peer = turn.peers.get(event.peer)
    if peer is not None and peer.session == event.session:
        session_over(turn, peer, event.reason)


def session_over(turn: DecodeTurn, peer: Peer, reason: str) -> None:
    """The pair's session ends, whatever state it was in. Its transfers end; the next `Begin` opens a new one."""
    turn.out.count(peer.node_id, reason)
    if peer.streaming and peer.incarnation != NOBODY:
        turn.out.send(peer.node_id, peer.incarnation, SessionClosed(peer.session))
    turn.out.add(CloseStream(peer.node_id))
    if peer.hello is not None:
        turn.out.add(CloseSession(peer.node_id, peer.session))
    assert peer.take(PeerStep.OVER).state is PeerState.LOST
    turn.peers = turn.peers.drop(peer.node_id)
    if peer.session in turn.arenas:
        arena = turn.arenas[peer.session].quarantine()
        turn.keep_arena(arena)
        if arena.unresolved:
            turn.out.add(QuarantineArena(peer.node_id, peer.session, arena.unresolved))
    for transfer in turn.transfers_of(peer.node_id):
        if transfer.state is DecodeState.COMMITTED:
            turn.put(transfer.take(SessionOver))
        else:
            turn.end(transfer, SessionOver, reason, abort=False, drained=True)


def fenced(turn: DecodeTurn, event: Fenced) -> None:
    """Nothing can write into this session's arena any more."""
    fence_arena(turn, event.session, "endpoint_closed")


def fence_arena(turn: DecodeTurn, session: int, reason: str) -> None:
    arena = turn.arenas.get(session)
    if arena is None:
        return
    if not arena.quarantined:
        session_over(turn, turn.peers[arena.peer], reason)
        arena = turn.arenas.get(session)
    if arena is not None:
        turn.keep_arena(arena.fence())


def beat(turn: DecodeTurn, event: Beat) -> None:
    """Heartbeats; and a dial to whoever could still tell us that a quarantined arena is safe."""
    for peer in turn.peers.values():
        turn.out.tell(peer, Heartbeat(event.engine_steps, event.has_work, _leases(turn, peer) if event.renew else ()))
    if event.renew:
        for arena in turn.arenas.values():
            if arena.unresolved and arena.peer not in turn.peers:
                _connect(turn, arena.peer, arena.control_address)


def _leases(turn: DecodeTurn, peer: Peer) -> tuple[TransferId, ...]:
    return tuple(transfer.id for transfer in turn.transfers_of(peer.node_id) if transfer.session == peer.session)


# --- messages -----------------------------------------------------------------------------------------------------


def right_incarnations(turn: DecodeTurn, peer: Peer, event: MessageReceived) -> bool:
    """Whether sender and addressee are who they should be; if not, the message changes nothing, unless it shows that P has
    restarted."""
    envelope = event.envelope
    restarted = isinstance(envelope.message, Hello | WrongIncarnation) and peer.incarnation != NOBODY
    if envelope.addressee != turn.local.incarnation:
        turn.out.count(event.peer, "wrong_incarnation")
        if not isinstance(envelope.message, WrongIncarnation):
            turn.out.send(event.peer, envelope.sender, WrongIncarnation(turn.local.incarnation))
        return False
    if envelope.sender == peer.incarnation:
        return True
    if peer.incarnation == NOBODY:
        return isinstance(envelope.message, Hello | HelloRefused)
    turn.out.count(event.peer, "wrong_incarnation")
    if restarted:
        session_over(turn, replace(peer, incarnation=NOBODY), "peer_restarted")
    return False


def pair_message(turn: DecodeTurn, peer: Peer, message: PairMessage, sender: Incarnation) -> None:
    match message:
        case Hello():
            _hello_received(turn, peer, message, sender)
        case HelloRefused():
            session_over(turn, peer, f"refused: {message.reason}")
        case LaneReport():
            turn.out.add(LaneMeasured(peer.node_id, message.lane, message.gigabytes_per_second))
        case Sync():
            _sync_received(turn, peer, message)
        case SessionClosed():
            _session_closed(turn, peer, message)
        case WrongIncarnation():
            turn.out.count(peer.node_id, "late_wrong_incarnation")
        case Heartbeat():
            pass


def _hello_received(turn: DecodeTurn, peer: Peer, hello: Hello, sender: Incarnation) -> None:
    if peer.state is PeerState.SUSPECT and hello.session == peer.session:
        return  # the session goes on; Sync follows
    if hello.session != peer.session or peer.state is not PeerState.CONNECTING or peer.hello is not None:
        turn.out.count(peer.node_id, "repeated_hello")
        return
    peer = replace(peer, incarnation=sender, hello=hello)
    turn.peers = turn.peers.put(peer.node_id, peer)
    if mismatch := hello_mismatch(turn.local.hello, hello, turn.local.cut):
        session_over(turn, peer, f"refused: {mismatch}")
    else:
        turn.out.add(OpenLane(peer.node_id, peer.session, hello.data_address))


def _session_closed(turn: DecodeTurn, peer: Peer, message: SessionClosed) -> None:
    """P's proof: its endpoint is destroyed and its device synchronised. Only the incarnation that had the session can say
    so."""
    arena = turn.arenas.get(message.session)
    if arena is None or arena.incarnation != peer.incarnation:
        turn.out.count(peer.node_id, "late_session_closed")
        return
    fence_arena(turn, message.session, "session_closed")


def _sync_received(turn: DecodeTurn, peer: Peer, sync: Sync) -> None:
    """P has said what it knows: say again what it lacks. What it does not know it has forgotten, and for good."""
    if peer.state is not PeerState.SUSPECT or not peer.streaming:
        turn.out.count(peer.node_id, "late_sync")
        return
    peer = peer.take(PeerStep.SYNCED)
    turn.peers = turn.peers.put(peer.node_id, peer)
    known = {synced.transfer: synced for synced in sync.transfers}
    for transfer in turn.transfers_of(peer.node_id):
        if turn.peers.get(peer.node_id) != peer:
            return
        if transfer.id in known and transfer.session == peer.session:
            _say_again(turn, peer, transfer, known[transfer.id])
        elif transfer.state is DecodeState.ASKED:
            turn.ask(transfer)
        else:
            gone(turn, transfer)
    turn.grant(peer.node_id)


def gone(turn: DecodeTurn, transfer: DecodeTransfer) -> None:
    """P has forgotten the transfer. It may do so only when no credit of it is open; if it did, nobody can say any more
    which ones were used, and only the session's end resolves them."""
    if transfer.state is DecodeState.COMMITTED:
        turn.put(transfer.take(Gone))
        return
    turn.end(transfer, Gone, "gone", abort=False, drained=True)
    arena = turn.arenas.get(transfer.session)
    if arena and not transfer.drained and any(slot.state is SlotState.POSTED for slot in arena.slots_of(transfer.id)):
        session_over(turn, turn.peers[transfer.peer], "gone_with_credits")


def _say_again(turn: DecodeTurn, peer: Peer, transfer: DecodeTransfer, theirs: SyncedTransfer) -> None:
    match transfer.state:
        case DecodeState.LANDING:
            turn.out.tell(peer, _credits_again(turn, transfer, theirs.credits))
        case DecodeState.COMMITTED:
            turn.out.tell(peer, Committed(transfer.id))
        case DecodeState.ENDING:
            turn.out.tell(peer, Abort(transfer.id, transfer.end_reason))
        case _:
            pass


def _credits_again(turn: DecodeTurn, transfer: DecodeTransfer, received: int) -> Credits:
    """The credits that P has not received; they are all still posted, since nobody else can have used them."""
    arena = turn.arenas[transfer.session]
    lost = sorted(
        (slot.parcel_index, slot.credit, slot.length)
        for slot in arena.slots_of(transfer.id)
        if slot.state is SlotState.POSTED and slot.parcel_index >= received
    )
    return Credits(
        transfer.id,
        transfer.from_position,
        transfer.slot_bytes,
        received,
        tuple(Credit(credit, length) for _, credit, length in lost),
        arena.nonce,
    )
