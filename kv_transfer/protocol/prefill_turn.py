"""One turn of P: the workspace in which an event is handled, and the three things that any event may bring about.

`end` gives a transfer up and says so, `settle` tells the node and forgets, `pump` gathers what has a credit, is computed and
finds a sending slot. The workspace is taken from an immutable `PrefillSide` and put back into one.

Must not know: how an event is handled.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from foundation.ids import CreditNumber, Incarnation, NodeId, TransferId
from kv_transfer.protocol.effects import Gather, NodeReleased, PrefillEffect
from kv_transfer.protocol.local import LocalNode
from kv_transfer.protocol.messages import Drained, Failed, Sealed
from kv_transfer.protocol.peer import Outbox, Peer
from kv_transfer.protocol.prefill_transfer import AllSent, PrefillState, PrefillTransfer, Settled
from kv_transfer.protocol.record import replace
from kv_transfer.protocol.sending import SendingSlots
from kv_transfer.protocol.table import Table

GATHERS_A_TURN = 2
"""Each that ends begins as many: asked for at once, all gathers of a long prompt would keep its first parcel from being sent."""


@dataclass(frozen=True, slots=True)
class ClosingSession:
    """A session whose endpoint is being destroyed. `answer_due`: D waits for the proof that it is."""

    peer: NodeId
    incarnation: Incarnation
    answer_due: bool = False


@dataclass(frozen=True, slots=True)
class PrefillSide:
    """All transfers of a prefill node, and its sending slots."""

    local: LocalNode = field(compare=False)
    sending: SendingSlots
    peers: Table[NodeId, Peer] = field(default_factory=Table)
    closing: Table[int, ClosingSession] = field(default_factory=Table)
    transfers: Table[TransferId, PrefillTransfer] = field(default_factory=Table)
    next_turn: int = 0


class PrefillTurn:
    def __init__(self, side: PrefillSide) -> None:
        self.local = side.local
        self.sending = side.sending
        self.peers = side.peers
        self.closing = side.closing
        self.transfers = side.transfers
        self.next_turn = side.next_turn
        self.out: Outbox[PrefillEffect] = Outbox(side.local.incarnation)

    def side(self) -> PrefillSide:
        return PrefillSide(self.local, self.sending, self.peers, self.closing, self.transfers, self.next_turn)

    def put(self, transfer: PrefillTransfer) -> None:
        """Keep the transfer, or forget it when it is released."""
        if transfer.state is PrefillState.RELEASED:
            self.transfers = self.transfers.drop(transfer.id)
        else:
            self.transfers = self.transfers.put(transfer.id, transfer)

    def transfers_of(self, peer: NodeId) -> list[PrefillTransfer]:
        return [transfer for transfer in self.transfers.values() if transfer.peer == peer]

    def peer_of(self, transfer: PrefillTransfer) -> Peer | None:
        """The pair, if the session in which D asked still stands."""
        peer = self.peers.get(transfer.peer)
        return peer if peer is not None and peer.session == transfer.session else None

    def end(
        self, transfer: PrefillTransfer, step: type, reason: str, *, failed: bool, acknowledged: bool = False
    ) -> None:
        """Give the transfer up: no send of it starts any more, so its credits are known at once. `failed`: D does not know
        yet. `acknowledged`: D has forgotten the transfer, or cannot be told."""
        was_ending = transfer.state is PrefillState.ENDING
        ended = replace(
            transfer.take(step),
            end_reason=transfer.end_reason or reason,
            acknowledged=transfer.acknowledged or acknowledged,
        )
        if not was_ending and not acknowledged:
            self.say_ending(ended, failed=failed)
        self.settle(ended)

    def say_ending(self, transfer: PrefillTransfer, *, failed: bool) -> None:
        peer = self.peer_of(transfer)
        if failed:
            self.out.tell(peer, Failed(transfer.id, transfer.end_reason))
        self.out.tell(peer, Drained(transfer.id, used_credits(transfer)))

    def settle(self, transfer: PrefillTransfer) -> None:
        """Tell the node once no gather is open; forget the transfer once D has as well."""
        if transfer.state is PrefillState.ENDING:
            if not transfer.reported and not self.sending.gathers_open(transfer.session, transfer.id):
                self.out.add(NodeReleased(transfer.id, transfer.end_reason))
                transfer = replace(transfer, reported=True)
            if transfer.reported and transfer.acknowledged:
                transfer = transfer.take(Settled)
        self.put(transfer)

    def seal(self, transfer: PrefillTransfer) -> None:
        """Say that everything has been sent, when it has."""
        if transfer.all_sent:
            transfer = replace(transfer.take(AllSent), sealed=True)
            self.out.tell(self.peer_of(transfer), self.sealed_message(transfer))
        self.put(transfer)

    def sealed_message(self, transfer: PrefillTransfer) -> Sealed:
        digests = [transfer.digests[index] for index in range(len(transfer.parcels))]
        return transfer.sealed_message(self.local.digest_of_all(digests))

    def pump(self) -> None:
        """Gather a little more, oldest transfer first, each in parcel order, while sending slots last."""
        ready = [transfer for transfer in self.transfers.values() if transfer.next_is_ready]
        left = GATHERS_A_TURN
        for transfer in sorted(ready, key=lambda transfer: transfer.turn):
            peer = self.peer_of(transfer)
            if peer is None or not peer.lane_open:
                continue
            while left and transfer.next_is_ready and self.sending.available(transfer.session):
                transfer = self._gather(transfer)
                left -= 1

    def _gather(self, transfer: PrefillTransfer) -> PrefillTransfer:
        index = transfer.gathering
        credit = transfer.credits[index].number
        self.sending, slot = self.sending.gather(transfer.session, transfer.id, index, credit)
        self.out.add(Gather(transfer.peer, transfer.session, transfer.id, index, transfer.parcels[index], credit, slot))
        transfer = replace(transfer, gathering=index + 1)
        self.put(transfer)
        return transfer


def used_credits(transfer: PrefillTransfer) -> tuple[CreditNumber, ...]:
    return tuple(sorted(transfer.used))
