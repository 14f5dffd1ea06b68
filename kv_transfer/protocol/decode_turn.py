"""One turn of D: the workspace in which an event is handled, and the three things that any event may bring about.

`end` gives a transfer up, `settle` carries it as far as what is proven allows, `grant` hands out free slots. The workspace is
taken from an immutable `DecodeSide` and put back into one; nothing of it outlives the turn.

Must not know: how an event is handled.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from operator import attrgetter

from foundation.ids import NodeId, TransferId
from kv_transfer.protocol.credit import CREDIT_NUMBER_LIMIT, Arena, SlotState, SlotStep
from kv_transfer.protocol.decode_transfer import (
    CreditsSent,
    DecodeState,
    DecodeTransfer,
    Settled,
    Whole,
    verdict,
)
from kv_transfer.protocol.effects import (
    CancelReceive,
    DecodeEffect,
    NodeCommitted,
    NodeEnded,
    PostReceive,
    ReleaseArena,
)
from kv_transfer.protocol.local import LocalNode
from kv_transfer.protocol.messages import Abort, Ask, Committed, Credit, Credits, Gone
from kv_transfer.protocol.peer import Outbox, Peer, PeerState
from kv_transfer.protocol.record import replace
from kv_transfer.protocol.table import Table


@dataclass(frozen=True, slots=True)
class DecodeSide:
    """All transfers of a decode node. Arenas are by session: one for each live session, and those in quarantine."""

    local: LocalNode = field(compare=False)
    peers: Table[NodeId, Peer] = field(default_factory=Table)
    arenas: Table[int, Arena] = field(default_factory=Table)
    transfers: Table[TransferId, DecodeTransfer] = field(default_factory=Table)
    next_turn: int = 0


class DecodeTurn:
    def __init__(self, side: DecodeSide) -> None:
        self.local = side.local
        self.peers = side.peers
        self.arenas = side.arenas
        self.transfers = side.transfers
        self.next_turn = side.next_turn
        self.out: Outbox[DecodeEffect] = Outbox(side.local.incarnation)

    def side(self) -> DecodeSide:
        return DecodeSide(self.local, self.peers, self.arenas, self.transfers, self.next_turn)

    def put(self, transfer: DecodeTransfer) -> None:
        """Keep the transfer, or forget it when it is closed."""
        if transfer.state is DecodeState.CLOSED:
            self.transfers = self.transfers.drop(transfer.id)
        else:
            self.transfers = self.transfers.put(transfer.id, transfer)

    def transfers_of(self, peer: NodeId) -> list[DecodeTransfer]:
        return [transfer for transfer in self.transfers.values() if transfer.peer == peer]

    def ask(self, transfer: DecodeTransfer) -> None:
        """Put the request to P, in the session that is READY."""
        peer = self.peers[transfer.peer]
        request = transfer.request
        self.put(replace(transfer, session=peer.session))
        self.out.tell(
            peer,
            Ask(
                request.transfer,
                request.ticket,
                request.prompt,
                request.settled,
                request.sampling,
                request.choices,
                request.deadline_s,
                request.traceparent,
            ),
        )

    def end(self, transfer: DecodeTransfer, step: type, reason: str, *, abort: bool, drained: bool = False) -> None:
        """Give the transfer up. `abort`: P does not know yet. `drained`: P will use no further credit (a transfer that P
        was never asked for is drained from the start). A P that has drained while D still meant to commit waits for D's
        `Gone`."""
        peer = self.peers.get(transfer.peer)
        if transfer.state is DecodeState.LANDING and transfer.drained:
            self.out.tell(peer, Gone(transfer.id))
        elif abort:
            self.out.tell(peer, Abort(transfer.id, reason))
        drained = drained or transfer.drained or not transfer.session
        self.settle(replace(transfer.take(step), end_reason=transfer.end_reason or reason, drained=drained))

    def settle(self, transfer: DecodeTransfer) -> None:
        """Commit, report or close, as far as what is proven allows."""
        if transfer.state is DecodeState.LANDING:
            found = verdict(transfer, self.local.layout)
            if found is Whole:
                transfer = self._commit(transfer)
            elif found is not None:
                self.end(transfer, found, "bad_manifest", abort=True)
                return
        elif transfer.state is DecodeState.ENDING:
            if not transfer.reported and not self._scatters_open(transfer):
                transfer = self._report(transfer)
            if transfer.reported and transfer.drained:
                transfer = transfer.take(Settled)
        self.put(transfer)

    def resolve_unused(self, transfer: DecodeTransfer, used: frozenset[int]) -> int:
        """Withdraw the receives whose credit P has not used and never will; how many those are."""
        arena = self.arenas.get(transfer.session)
        if arena is None:
            return 0
        unused = [
            slot.credit
            for slot in arena.slots_of(transfer.id)
            if slot.state is SlotState.POSTED and slot.credit not in used
        ]
        for credit in unused:
            arena = arena.take(credit, SlotStep.KNOWN_UNUSED)
            self.out.add(CancelReceive(arena.peer, arena.session, credit))
        self.arenas = self.arenas.put(arena.session, arena)
        return len(unused)

    def keep_arena(self, arena: Arena) -> None:
        """Store the arena, or release it when its session is lost and every credit is resolved."""
        if arena.quarantined and arena.settled:
            self.arenas = self.arenas.drop(arena.session) if arena.session in self.arenas else self.arenas
            self.out.add(ReleaseArena(arena.peer, arena.session))
        else:
            self.arenas = self.arenas.put(arena.session, arena)

    def grant_again(self, arena: Arena) -> None:
        """Hand out what completions of the data plane have freed: a part of the arena at a time."""
        if arena.worth_granting:
            self.grant(arena.peer)

    def grant(self, node: NodeId) -> None:
        """Hand out the peer's free slots, and say so in one message for each transfer.

        Oldest reservation first: parcels that P has computed may use every slot; parcels that it has yet to compute (so
        that they leave layer by layer) at most half of them, or one slow prompt would hold up finished ones.
        """
        peer = self.peers.get(node)
        if peer is None or peer.state is not PeerState.READY:
            return
        waiting = sorted(self._waiting_for_credits(peer.session), key=attrgetter("turn"))
        fresh: dict[TransferId, list[Credit]] = {}
        for transfer, parcel_index, ahead in _grant_order(waiting):
            credit = self._grant_one(transfer, parcel_index, ahead)
            if credit is None:
                break
            fresh.setdefault(transfer.id, []).append(credit)
        for transfer in waiting:
            if transfer.state is DecodeState.RESERVED or transfer.id in fresh:
                self._send_credits(transfer, peer, fresh.get(transfer.id, []))

    def _waiting_for_credits(self, session: int) -> Iterator[DecodeTransfer]:
        for transfer in self.transfers.values():
            if transfer.session == session and (
                transfer.state is DecodeState.RESERVED
                or (transfer.state is DecodeState.LANDING and transfer.granted < len(transfer.parcels))
            ):
                yield transfer

    def _grant_one(self, transfer: DecodeTransfer, parcel_index: int, ahead: bool) -> Credit | None:
        arena = self.arenas[transfer.session]
        if ahead and len(arena.free) <= arena.slots // 2:
            return None
        length = transfer.parcels[parcel_index].wire_bytes(self.local.layout) + self.local.trailer_bytes
        if not arena.may_grant(length) or arena.next_number >= CREDIT_NUMBER_LIMIT:
            return None
        arena, slot, credit = arena.grant(transfer.id, parcel_index, length)
        self.arenas = self.arenas.put(arena.session, arena)
        self.out.add(PostReceive(arena.peer, arena.session, arena.nonce, credit, slot, length))
        return Credit(credit, length)

    def _send_credits(self, transfer: DecodeTransfer, peer: Peer, credits: list[Credit]) -> None:
        nonce = self.arenas[peer.session].nonce
        self.out.tell(
            peer,
            Credits(transfer.id, transfer.from_position, transfer.slot_bytes, transfer.granted, tuple(credits), nonce),
        )
        opened = replace(transfer.take(CreditsSent), granted=transfer.granted + len(credits))
        self.settle(opened)

    def _commit(self, transfer: DecodeTransfer) -> DecodeTransfer:
        self.out.tell(self.peers.get(transfer.peer), Committed(transfer.id))
        self.out.add(
            NodeCommitted(transfer.id, transfer.from_position, transfer.verified_positions, len(transfer.verified))
        )
        return transfer.take(Whole)

    def _report(self, transfer: DecodeTransfer) -> DecodeTransfer:
        self.out.add(
            NodeEnded(
                transfer.id,
                transfer.end_reason,
                transfer.from_position,
                transfer.verified_positions,
                len(transfer.verified),
            )
        )
        return replace(transfer, reported=True)

    def _scatters_open(self, transfer: DecodeTransfer) -> bool:
        arena = self.arenas.get(transfer.session)
        return arena is not None and arena.scatters_open(transfer.id)


def _grant_order(waiting: list[DecodeTransfer]) -> Iterator[tuple[DecodeTransfer, int, bool]]:
    """(transfer, parcel index, whether P has yet to compute it), a transfer's own always in parcel order. Lazy: only as
    far as there are slots."""
    uncomputed: list[tuple[DecodeTransfer, int]] = []
    for transfer in waiting:
        index = transfer.granted
        while index < len(transfer.parcels) and transfer.parcels[index].end_position <= transfer.ready_positions:
            yield transfer, index, False
            index += 1
        uncomputed.append((transfer, index))
    for transfer, first in uncomputed:
        yield from ((transfer, index, True) for index in range(first, len(transfer.parcels)))
