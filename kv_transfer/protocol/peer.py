"""One pair of nodes: its control stream, its session, and whom we believe to be at the other end.

    CONNECTING -> READY <-> SUSPECT -> LOST

CONNECTING: no session yet. READY: a stream on which both have said all they know. SUSPECT: the session lives, its stream is
broken or has not been synchronised yet; nothing is sent but `Hello` and `Sync`, and what was not said is said after `Sync`.
LOST is the end of the session; the pair's record is dropped with it, and a new session starts from CONNECTING.

Must not know: transfers.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import auto
from typing import Generic, TypeVar

from foundation.ids import Incarnation, NodeId
from kv_transfer.plan.parcels import layout_mismatch
from kv_transfer.protocol.effects import Count, Send
from kv_transfer.protocol.local import CutParcels
from kv_transfer.protocol.messages import Envelope, Heartbeat, Hello, Message
from kv_transfer.protocol.record import replace
from kv_transfer.protocol.state import State

Effect = TypeVar("Effect")

NOBODY = Incarnation(0)
"""Addressee of D's first Hello, when it does not know yet whom it dials."""


class PeerState(State):
    CONNECTING = auto()
    READY = auto()
    SUSPECT = auto()
    LOST = auto()


class PeerStep(State):
    PAIRED = auto()
    STREAM_LOST = auto()
    SYNCED = auto()
    OVER = auto()


PEER_TRANSITIONS: dict[tuple[PeerState, PeerStep], PeerState] = {
    (PeerState.CONNECTING, PeerStep.PAIRED): PeerState.READY,
    (PeerState.CONNECTING, PeerStep.STREAM_LOST): PeerState.CONNECTING,
    (PeerState.CONNECTING, PeerStep.OVER): PeerState.LOST,
    (PeerState.READY, PeerStep.STREAM_LOST): PeerState.SUSPECT,
    (PeerState.READY, PeerStep.OVER): PeerState.LOST,
    (PeerState.SUSPECT, PeerStep.STREAM_LOST): PeerState.SUSPECT,
    (PeerState.SUSPECT, PeerStep.SYNCED): PeerState.READY,
    (PeerState.SUSPECT, PeerStep.OVER): PeerState.LOST,
}


@dataclass(frozen=True, slots=True)
class Peer:
    """`incarnation` is NOBODY and `hello` None until the peer has said Hello; `session` is 0 until one was named.
    `control_address` is where D dials.

    The last three only feed the deadlines and decide nothing here, so they are no part of the state's identity.
    """

    node_id: NodeId
    control_address: str = ""
    state: PeerState = PeerState.CONNECTING
    incarnation: Incarnation = NOBODY
    hello: Hello | None = None
    session: int = 0
    streaming: bool = False
    lane_open: bool = False
    messages_heard: int = field(default=0, compare=False)
    engine_steps: int = field(default=0, compare=False)
    has_work: bool = field(default=False, compare=False)

    def take(self, step: PeerStep) -> Peer:
        assert (self.state, step) in PEER_TRANSITIONS, f"a peer that is {self.state.name} cannot take {step.name}"
        return replace(self, state=PEER_TRANSITIONS[self.state, step])

    def heard(self, message: Message) -> Peer:
        if isinstance(message, Heartbeat):
            steps, has_work = message.engine_steps, message.has_work
            return replace(self, messages_heard=self.messages_heard + 1, engine_steps=steps, has_work=has_work)
        return replace(self, messages_heard=self.messages_heard + 1)


def hello_mismatch(ours: Hello, theirs: Hello, cut: CutParcels) -> str | None:
    """The first thing that keeps two nodes from pairing, by name, with both values. `wire` refuses sizes out of range."""
    if ours.protocol_major != theirs.protocol_major:
        return f"protocol_major: {ours.protocol_major} here, {theirs.protocol_major} there"
    if difference := ours.fingerprint.first_difference(theirs.fingerprint):
        return difference
    if difference := layout_mismatch(ours.layout, theirs.layout):
        return difference
    if ours.digest != theirs.digest:
        return f"digest: {ours.digest!r} here, {theirs.digest!r} there"
    try:
        cut(0, 1, theirs.layout, ours.layout, min(ours.slot_bytes, theirs.slot_bytes))
    except ValueError as error:
        return str(error)
    return None


def agreed_minor(ours: Hello, theirs: Hello) -> int:
    """The minor version that a pair speaks: what only a later one knows is not said to the other."""
    return min(ours.protocol_minor, theirs.protocol_minor)


class Outbox(Generic[Effect]):
    """The effects of one turn, in order."""

    def __init__(self, incarnation: Incarnation) -> None:
        self._incarnation = incarnation
        self.effects: list[Effect | Send | Count] = []

    def add(self, effect: Effect) -> None:
        self.effects.append(effect)

    def count(self, peer: NodeId, reason: str) -> None:
        self.effects.append(Count(peer, reason))

    def send(self, peer: NodeId, addressee: Incarnation, message: Message) -> None:
        self.effects.append(Send(peer, Envelope(self._incarnation, addressee, message)))

    def tell(self, peer: Peer | None, message: Message) -> None:
        """Says it if both sides are in step; otherwise it is said again from the state, after `Sync`."""
        if peer is not None and peer.state is PeerState.READY:
            self.send(peer.node_id, peer.incarnation, message)
