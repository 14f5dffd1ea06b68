"""The decode node's half of the transfers, brought to life: runs `protocol.decode_side` and does what it says.

Node -> events -> protocol -> effects -> streams, sessions, slots, copier, node. Completions come back as events. Nothing
is decided here; what is added is memory: which blocks a transfer writes into, which arena a session lands in, and the
figures of each transfer.

Must not know: models, routers.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import assert_never

from foundation.ids import BlockId, CreditNumber, NodeId, TransferId
from foundation.log import get_logger, naming
from kv_transfer.arena import StagingMemory
from kv_transfer.control_client import ControlClient
from kv_transfer.data_sessions import DataSessions
from kv_transfer.digest import TRAILER_BYTES, DigestSeeds, TokenHistory
from kv_transfer.driver import (
    Clockwork,
    NodeIdentity,
    ReadProgress,
    TransferLimits,
    TransferObserver,
    local_node,
)
from kv_transfer.faults import Faults
from kv_transfer.landing_rate import LandingRate
from kv_transfer.landings import Landings
from kv_transfer.port import BeginTransfer, DecodeListener, TransferAccount, TransferProgress
from kv_transfer.protocol import effects as do
from kv_transfer.protocol import events as on
from kv_transfer.protocol.credit import Slot, SlotState
from kv_transfer.protocol.deadlines import decode_waits
from kv_transfer.protocol.decode_side import handle
from kv_transfer.protocol.decode_turn import DecodeSide
from kv_transfer.pump import Pump
from kv_transfer.staging import AnyPool, DigestMismatch, Scatter, Scattered, copier_of, digest_kind, slot_memory
from kv_transfer.transfer_blocks import NO_BLOCKS, TransferBlocks
from kv_transfer.transport.base import (
    Landed,
    ReceiveCancelled,
    ReceiveFailed,
    ReceiveOutcome,
    Transport,
    credit_tag,
)
from net.grpc_plane import IN_THE_CLEAR, GrpcPlane

log = get_logger()

_SLOT_METRIC = {
    SlotState.POSTED: "posted",
    SlotState.CANCELLING: "posted",
    SlotState.LANDED: "landed",
    SlotState.SCATTERING: "scattering",
    SlotState.QUARANTINED: "quarantined",
}


@dataclass(slots=True)
class _Inbound:
    """What a live transfer needs beside its state. `history`: prompt and settled tokens."""

    history: TokenHistory
    begun_s: float
    blocks: TransferBlocks = NO_BLOCKS
    seeds: DigestSeeds | None = None
    lane: str = ""
    landed_parcels: int = 0
    landed_bytes: int = 0
    rate: LandingRate = field(default_factory=LandingRate)


class DecodeDriver:
    """Implements `kv_transfer.port.DecodeTransfers`. Made and used on the asyncio thread."""

    def __init__(
        self,
        identity: NodeIdentity,
        pool: AnyPool,
        limits: TransferLimits,
        transport: Transport,
        listener: DecodeListener,
        progress: ReadProgress,
        observer: TransferObserver,
        faults: Faults | None = None,
        plane: GrpcPlane = IN_THE_CLEAR,
    ) -> None:
        self._identity = identity
        self._limits = limits
        self._listener = listener
        self._observer = observer
        self._faults = faults or Faults()
        self._loop = asyncio.get_running_loop()
        self._copier = copier_of(pool)
        self._inbound: dict[TransferId, _Inbound] = {}
        self._side = DecodeSide(local_node(identity, pool.layout, limits, "", digest_kind(pool)))
        self._clockwork = Clockwork(limits, progress, decode_waits)
        self._pump: Pump[on.DecodeEvent, do.DecodeEffect] = Pump(
            self._handle, self._execute, self._busy, self._tick, self._clockwork.tick_s
        )
        self._copier.failure.add_done_callback(self._pump.fail_with)
        self._streams = ControlClient(self._pump.emit, observer.dropped, limits.silence_limit_s, plane)
        self._sessions = DataSessions(self._pump.emit)
        staging = StagingMemory(limits.staging_bytes, slot_memory(pool, limits.staging_bytes, limits.slot_bytes))
        self._landings = Landings(transport, self._sessions, staging, self._pump.emit, observer.lane)

    @property
    def failure(self) -> asyncio.Future[None]:
        """Ends with an exception when the transfers cannot go on, which is a bug: the node must end with it."""
        return self._pump.failure

    @property
    def side(self) -> DecodeSide:
        """The protocol's state, to be looked at: who waits for whom."""
        return self._side

    @property
    def staging_drawn_bytes(self) -> int:
        """Payload bytes of all arenas that are not given back yet, those in quarantine included."""
        return self._landings.drawn_bytes

    @property
    def quarantined_arenas(self) -> int:
        return sum(arena.quarantined for arena in self._side.arenas.values())

    def progress(self) -> list[TransferProgress]:
        """Every live transfer, oldest first, for people."""
        layout, now_s, found = self._side.local.layout, self._loop.time(), []
        for transfer in self._side.transfers.values():
            inbound = self._inbound.get(transfer.id)
            found.append(
                TransferProgress(
                    transfer.id,
                    transfer.peer,
                    transfer.state.name.lower(),
                    len(transfer.verified),
                    len(transfer.parcels),
                    sum(transfer.parcels[index].wire_bytes(layout) for index in transfer.verified),
                    sum(parcel.wire_bytes(layout) for parcel in transfer.parcels),
                    now_s - inbound.begun_s if inbound is not None else 0.0,
                )
            )
        return found

    async def close(self) -> None:
        """End every session by name (`closing`), and with it every live transfer; then close all that was opened."""
        for peer in list(self._side.peers.values()):
            self._pump.emit(on.EndpointLost(peer.node_id, peer.session, "closing"))
        await self._sessions.close_all()
        await self._copier.close()
        self._pump.close()
        await self._streams.close_all()

    # From the node.

    def begin(self, request: BeginTransfer) -> None:
        history = TokenHistory(request.prompt + request.settled)
        self._inbound[request.transfer] = _Inbound(history, self._loop.time())
        self._pump.emit(on.Begin(request))
        self._loop.call_soon(history.hash_until, 0)  # while P computes, not before the first parcel

    def reserved(
        self, transfer: TransferId, block_ids: Sequence[BlockId], from_position: int, end_position: int
    ) -> None:
        inbound = self._inbound.get(transfer)
        if inbound is not None:
            inbound.blocks = TransferBlocks.of(block_ids)
            self._pump.emit(on.Reserved(transfer, from_position, end_position))

    def unavailable(self, transfer: TransferId, reason: str) -> None:
        self._pump.emit(on.Unavailable(transfer, reason))

    def end(self, transfer: TransferId, reason: str) -> None:
        self._pump.emit(on.End(transfer, reason))

    # The protocol.

    def _handle(self, event: on.DecodeEvent) -> tuple[do.DecodeEffect, ...]:
        self._side, effects = handle(self._side, event)
        return effects

    def _busy(self) -> bool:
        return bool(self._side.peers or self._side.arenas or self._landings.drawn_bytes)

    def _tick(self, now_s: float) -> Iterable[on.DecodeEvent]:
        """Leases expire on P alone."""
        self._report_slots()
        return (event for event in self._clockwork.tick(self._side, now_s) if not isinstance(event, on.LeaseExpired))

    def _execute(self, effect: do.DecodeEffect) -> None:
        match effect:
            case do.OpenStream(peer=peer, control_address=address):
                self._streams.open(peer, address)
            case do.CloseStream(peer=peer):
                self._streams.close(peer)
            case do.Send(peer=peer, envelope=envelope):
                self._streams.send(peer, envelope)
            case do.OpenLane(peer=peer, session=session, data_address=address):
                self._open_lane(peer, session, address)
            case do.CloseSession(peer=peer, session=session):
                self._sessions.close(peer, session)
            case do.ReleaseArena(session=session):
                self._landings.release(session)
            case do.QuarantineArena(peer=peer, unresolved_credits=unresolved):
                log.warning("arena in quarantine", peer=peer, unresolved_credits=unresolved)
            case do.LaneMeasured(peer=peer, lane=lane, gigabytes_per_second=measured):
                self._observer.lane(peer, f"{lane}/to_peer", measured)
            case do.Count(peer=peer, reason=reason):
                self._observer.dropped(peer, reason)
            case do.PostReceive():
                self._post_receive(effect)
            case do.CancelReceive(session=session, credit=credit):
                if data := self._sessions.data(session):
                    data.cancel_unused(credit_tag(self._landings.nonce(session), credit))
            case do.Scatter():
                self._scatter(effect)
            case do.NodeReserve(transfer=transfer, end_position=end_position):
                self._listener.reserve(transfer, end_position)
            case do.NodeFirstToken(transfer=transfer, token=token):
                self._listener.first_token(transfer, token)
            case do.NodeCommitted(transfer=transfer):
                self._listener.committed(transfer, self._account(effect))
            case do.NodeEnded(transfer=transfer, reason=reason):
                self._listener.ended(transfer, reason, self._account(effect))
            case _:
                assert_never(effect)

    def _account(self, ended: do.NodeCommitted | do.NodeEnded) -> TransferAccount:
        inbound = self._inbound.pop(ended.transfer)
        return TransferAccount(
            from_position=ended.from_position,
            verified_positions=ended.verified_positions,
            payload_bytes=inbound.landed_bytes,
            parcels=ended.parcels,
            seconds=self._loop.time() - inbound.begun_s,
            lane=inbound.lane,
            bytes_per_second=inbound.rate.bytes_per_second,
        )

    def _open_lane(self, peer: NodeId, session: int, data_address: str) -> None:
        hello = self._side.peers[peer].hello
        assert hello is not None, f"a lane to {peer} before its Hello"
        slot_bytes = min(self._limits.slot_bytes, hello.slot_bytes)
        self._landings.open(peer, session, data_address, slot_bytes)

    # Parcels.

    def _post_receive(self, effect: do.PostReceive) -> None:
        data = self._sessions.data(effect.session)
        if data is None:
            return
        message = self._landings.message(effect.session, effect.slot, effect.length - TRAILER_BYTES)
        done = partial(self._received, effect.peer, effect.session, effect.credit)
        data.post_receive(credit_tag(effect.nonce, effect.credit), message, done)

    def _received(self, peer: NodeId, session: int, credit: CreditNumber, outcome: ReceiveOutcome) -> None:
        match outcome:
            case Landed():
                if self._notice_landed(session, credit):
                    self._pump.emit(on.Landed(peer, session, credit))
            case ReceiveCancelled():
                self._pump.emit(on.ReceiveCancelled(peer, session, credit))
            case ReceiveFailed(reason="message_truncated"):
                self._pump.emit(on.ReceiveFailed(peer, session, credit, "bad_length"))
            case ReceiveFailed(reason=reason):
                self._sessions.broken(session, reason)
            case _:
                assert_never(outcome)

    def _notice_landed(self, session: int, credit: CreditNumber) -> bool:
        slot = self._slot(session, credit)
        inbound = self._inbound.get(slot.transfer) if slot else None
        if slot is None or inbound is None:
            return True
        payload_bytes = slot.length - TRAILER_BYTES
        inbound.landed_parcels += 1
        inbound.landed_bytes += payload_bytes
        transfer = self._side.transfers[slot.transfer]
        early = transfer.parcels[slot.parcel_index].end_position > transfer.ready_positions
        inbound.rate.landed(payload_bytes, self._loop.time(), early=early)
        inbound.lane = self._landings.lane(session)
        self._observer.parcel("landed", slot.transfer, slot.parcel_index, payload_bytes)
        return self._faults.after_landed(slot.parcel_index, inbound.landed_parcels)

    def _slot(self, session: int, credit: CreditNumber) -> Slot | None:
        arena = self._side.arenas.get(session)
        return arena.taken.get(credit) if arena else None

    def _scatter(self, effect: do.Scatter) -> None:
        inbound = self._inbound[effect.transfer]
        payload_bytes = effect.parcel.wire_bytes(self._side.local.layout)
        job = Scatter(
            blocks=inbound.blocks,
            parcel=effect.parcel,
            seed=self._seeds(effect, inbound).seed(effect.credit, effect.parcel, payload_bytes),
            message=self._landings.message(effect.session, effect.slot, payload_bytes),
        )
        self._copier.scatter(job, partial(self._scattered, effect, payload_bytes))

    def _seeds(self, effect: do.Scatter, inbound: _Inbound) -> DigestSeeds:
        if inbound.seeds is None:
            inbound.seeds = DigestSeeds(
                effect.transfer,
                self._side.arenas[effect.session].incarnation,
                self._identity.incarnation,
                self._landings.nonce(effect.session),
                self._identity.fingerprint,
                inbound.history,
            )
        return inbound.seeds

    def _scattered(self, effect: do.Scatter, payload_bytes: int, outcome: Scattered | DigestMismatch) -> None:
        match outcome:
            case Scattered(digest=digest):
                self._observer.parcel("scattered", effect.transfer, effect.parcel_index, payload_bytes)
                refusal = ""
            case DigestMismatch(computed=digest, received=received):
                log.error(
                    "parcel refused",
                    **naming(effect.transfer),
                    parcel=effect.parcel_index,
                    computed=f"{digest:016x}",
                    received=f"{received:016x}",
                )
                refusal = "bad_digest"
            case _:
                assert_never(outcome)
        self._pump.emit(on.Scattered(effect.peer, effect.session, effect.credit, digest, refusal))

    def _report_slots(self) -> None:
        counts = dict.fromkeys(("free", *_SLOT_METRIC.values()), 0)
        for arena in self._side.arenas.values():
            counts["free"] += len(arena.free)
            for slot in arena.taken.values():
                counts[_SLOT_METRIC[slot.state]] += 1
        self._observer.slots(**counts)
