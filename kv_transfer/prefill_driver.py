"""The prefill node's half of the transfers, brought to life: runs `protocol.prefill_side` and does what it says.

Streams -> events -> protocol -> effects -> node, copier, sending slots, sessions. Completions come back as events. Nothing is
decided here but whether a ticket is good; what is added is memory: which blocks a transfer is read from, and what is on its
way out of which sending slot.

Must not know: models, routers.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import assert_never

import grpc

from foundation.ids import BlockId, NodeId, SessionNonce, SlotIndex, TransferId
from foundation.keys import NodeKeys
from foundation.log import get_logger
from kv_transfer.arena import Arena, StagingMemory
from kv_transfer.control_server import ControlServer
from kv_transfer.data_sessions import DataSessions
from kv_transfer.digest import TRAILER_BYTES, DigestSeeds, TokenHistory
from kv_transfer.driver import (
    SELF_TEST_LIMIT_S,
    Clockwork,
    NodeIdentity,
    ReadProgress,
    TransferLimits,
    TransferObserver,
    local_node,
)
from kv_transfer.faults import Faults
from kv_transfer.port import PrefillListener, PrefillRequest, SettledToken, TransferProgress
from kv_transfer.protocol import effects as do
from kv_transfer.protocol import events as on
from kv_transfer.protocol.deadlines import prefill_waits
from kv_transfer.protocol.messages import Ask, Envelope
from kv_transfer.protocol.prefill_side import handle
from kv_transfer.protocol.prefill_turn import PrefillSide
from kv_transfer.protocol.sending import new_sending_slots
from kv_transfer.pump import Pump
from kv_transfer.staging import AnyPool, Gather, Gathered, copier_of, digest_kind, slot_memory
from kv_transfer.ticket import TicketGate
from kv_transfer.transfer_blocks import NO_BLOCKS, TransferBlocks
from kv_transfer.transport.base import (
    Bytes,
    DataSession,
    SendFailed,
    SendOutcome,
    Sent,
    Transport,
    TransportError,
    credit_tag,
)
from kv_transfer.transport.self_test import measure_lane

log = get_logger()

SELF_TEST_BUFFERS = 2
SESSIONS_AT_ONCE = 4
"""Sending slots are shared; a session may hold one share of so many, so that a hung peer never holds all."""
NO_NONCE = SessionNonce(0)
"""The nonce is D's to draw; P learns it with its first credits."""


@dataclass(slots=True)
class _Outbound:
    """What a live transfer needs beside its state. `history`: prompt and settled tokens, as D asked for them."""

    history: TokenHistory
    begun_s: float
    blocks: TransferBlocks = NO_BLOCKS
    seeds: DigestSeeds | None = None


class PrefillDriver:
    """Implements `kv_transfer.port.PrefillTransfers`. Made and used on the asyncio thread.

    `data_address`: host:port under which decode nodes reach `transport`, which must be listening.
    """

    def __init__(
        self,
        identity: NodeIdentity,
        pool: AnyPool,
        limits: TransferLimits,
        transport: Transport,
        data_address: str,
        keys: NodeKeys,
        listener: PrefillListener,
        progress: ReadProgress,
        observer: TransferObserver,
        faults: Faults | None = None,
    ) -> None:
        self._identity = identity
        self._limits = limits
        self._transport = transport
        self._listener = listener
        self._observer = observer
        self._faults = faults or Faults()
        self._loop = asyncio.get_running_loop()
        self._gate = TicketGate(identity.incarnation, keys, identity.fingerprint, self._loop.time())
        self._copier = copier_of(pool)
        slots = limits.staging_bytes // limits.slot_bytes
        memory = slot_memory(pool, (slots + SELF_TEST_BUFFERS) * limits.slot_bytes, limits.slot_bytes)
        staging = StagingMemory((slots + SELF_TEST_BUFFERS) * limits.slot_bytes, memory)
        self._arena = _drawn(staging, slots, limits.slot_bytes)
        self._scratch = _drawn(staging, SELF_TEST_BUFFERS, limits.slot_bytes)
        """What all self-tests send from and receive into: the sending slots are other sessions' too."""
        self._outbound: dict[TransferId, _Outbound] = {}
        self._gathered: dict[SlotIndex, do.Gather] = {}
        local = local_node(identity, pool.layout, limits, data_address, digest_kind(pool))
        self._side = PrefillSide(local, new_sending_slots(slots, max(1, slots // SESSIONS_AT_ONCE)))
        self._clockwork = Clockwork(limits, progress, prefill_waits)
        self._pump: Pump[on.PrefillEvent, do.PrefillEffect] = Pump(
            self._handle, self._execute, self._busy, self._tick, self._clockwork.tick_s
        )
        self._copier.failure.add_done_callback(self._pump.fail_with)
        self._streams = ControlServer(self._pump.emit, self._receive, observer.dropped, limits.silence_limit_s)
        self._sessions = DataSessions(self._pump.emit)

    @property
    def failure(self) -> asyncio.Future[None]:
        """Ends with an exception when the transfers cannot go on, which is a bug: the node must end with it."""
        return self._pump.failure

    @property
    def side(self) -> PrefillSide:
        """The protocol's state, to be looked at: who waits for whom."""
        return self._side

    @property
    def epoch(self) -> int:
        """The ticket epoch, which routers must be told."""
        return self._gate.epoch(self._loop.time())

    def progress(self) -> list[TransferProgress]:
        """Every live transfer, oldest first, for people."""
        layout, now_s, found = self._side.local.layout, self._loop.time(), []
        for transfer in self._side.transfers.values():
            outbound = self._outbound.get(transfer.id)
            sizes = [parcel.wire_bytes(layout) for parcel in transfer.parcels]
            done = len(transfer.digests)
            found.append(
                TransferProgress(
                    transfer.id,
                    transfer.peer,
                    transfer.state.name.lower(),
                    done,
                    len(sizes),
                    sum(sizes[:done]),
                    sum(sizes),
                    now_s - outbound.begun_s if outbound is not None else 0.0,
                )
            )
        return found

    def register(self, server: grpc.aio.Server) -> None:
        """Serve decant.v1.KvTransfer on this server, which has not been started yet."""
        self._streams.register(server)

    async def close(self) -> None:
        """End every session by name (`closing`), and tell every decode node; then close all that was opened."""
        for peer in list(self._side.peers.values()):
            self._pump.emit(on.EndpointLost(peer.node_id, peer.session, "closing"))
        await self._sessions.close_all()
        await self._copier.close()
        self._pump.close()
        await self._streams.close_all()

    # From the node.

    def refuse(self, transfer: TransferId, reason: str, retry_after_s: float) -> None:
        self._outbound.pop(transfer, None)
        self._pump.emit(on.PrefillRefused(transfer, reason, retry_after_s))

    def reserved(
        self,
        transfer: TransferId,
        block_ids: Sequence[BlockId],
        owner_words: Sequence[int],
        cached_positions: int,
        expected_positions: int,
    ) -> None:
        outbound = self._outbound.get(transfer)
        if outbound is not None:
            outbound.blocks = TransferBlocks.of(block_ids, owner_words)
            self._pump.emit(on.PrefillReserved(transfer, cached_positions, expected_positions))
            self._loop.call_soon(outbound.history.hash_until, 0)  # while D reserves, not before the first parcel

    def layers_computed(self, transfer: TransferId, positions: int, end_layer: int) -> None:
        self._pump.emit(on.LayersComputed(transfer, positions, end_layer))

    def computed(self, transfer: TransferId, positions: int) -> None:
        self._observer.computed(transfer, positions)
        self._pump.emit(on.Computed(transfer, positions))

    def first_token(self, transfer: TransferId, tokens: Sequence[SettledToken] | None) -> None:
        self._pump.emit(on.TokenSampled(transfer, None if tokens is None else tuple(tokens)))

    def failed(self, transfer: TransferId, reason: str) -> None:
        self._pump.emit(on.PrefillFailed(transfer, reason))

    # From decode nodes.

    def _receive(self, peer: NodeId, envelope: Envelope) -> None:
        self._pump.emit(on.MessageReceived(peer, envelope, self._ticket_refusal(peer, envelope)))

    def _ticket_refusal(self, peer: NodeId, envelope: Envelope) -> str:
        """Checking uses the ticket up, so an Ask that is repeated after a break, or meant for somebody else, is not checked."""
        ask = envelope.message
        if not isinstance(ask, Ask) or envelope.addressee != self._identity.incarnation:
            return ""
        if ask.transfer in self._side.transfers:
            return ""
        refusal = self._gate.check(
            ask.ticket, ask.transfer, envelope.sender, ask.prompt, ask.settled, self._loop.time()
        )
        if refusal is None:
            return ""
        self._observer.dropped(peer, refusal.value)
        return refusal.value

    # The protocol.

    def _handle(self, event: on.PrefillEvent) -> tuple[do.PrefillEffect, ...]:
        self._side, effects = handle(self._side, event)
        return effects

    def _busy(self) -> bool:
        return bool(self._side.peers)

    def _tick(self, now_s: float) -> Iterable[on.PrefillEvent]:
        sending = self._side.sending
        self._observer.slots(free=len(sending.free), sending=len(sending.slots) - len(sending.free))
        return self._clockwork.tick(self._side, now_s)

    def _execute(self, effect: do.PrefillEffect) -> None:
        match effect:
            case do.CloseStream(peer=peer):
                self._streams.close(peer)
            case do.Send(peer=peer, envelope=envelope):
                self._streams.send(peer, envelope)
            case do.OpenLane():
                self._open_lane(effect)
            case do.CloseSession(peer=peer, session=session):
                self._sessions.close(peer, session)
            case do.LaneMeasured(peer=peer, lane=lane, gigabytes_per_second=measured):
                self._observer.lane(peer, f"{lane}/to_peer", measured)
            case do.Count(peer=peer, reason=reason):
                self._observer.dropped(peer, reason)
            case do.Gather():
                self._gather(effect)
            case do.SendParcel():
                self._send_parcel(effect)
            case do.NodePrefill(ask=ask):
                self._ask_node(ask)
            case do.NodeReleased(transfer=transfer, reason=reason):
                self._outbound.pop(transfer, None)
                self._listener.released(transfer, reason)
            case do.OpenStream() | do.ReleaseArena() | do.QuarantineArena():
                raise AssertionError(f"{type(effect).__name__} on a prefill node")
            case _:
                assert_never(effect)

    def _ask_node(self, ask: Ask) -> None:
        request = PrefillRequest(
            ask.transfer, ask.prompt, ask.settled, ask.sampling, ask.choices, ask.deadline_s, ask.traceparent
        )
        self._outbound[ask.transfer] = _Outbound(TokenHistory(ask.prompt + ask.settled), self._loop.time())
        self._listener.prefill(request)

    # Sessions.

    def _open_lane(self, effect: do.OpenLane) -> None:
        hello = self._side.peers[effect.peer].hello
        assert hello is not None, f"a lane to {effect.peer} before its Hello"
        slot_bytes = min(self._limits.slot_bytes, hello.slot_bytes)
        self._sessions.open(
            effect.peer,
            effect.session,
            partial(self._transport.expect, effect.session),
            partial(self._measure, effect.peer, slot_bytes),
            lambda outcome, reported: None,
        )

    async def _measure(self, peer: NodeId, slot_bytes: int, data: DataSession) -> on.LaneOpened:
        buffers = [self._scratch.message(slot, slot_bytes) for slot in range(SELF_TEST_BUFFERS)]
        measure = await measure_lane(data, buffers, receive_first=False, deadline_s=SELF_TEST_LIMIT_S)
        self._observer.lane(peer, measure.lane.name, measure.gigabytes_per_second)
        return on.LaneOpened(
            peer=peer,
            session=data.session,
            nonce=NO_NONCE,
            slots=0,
            slot_bytes=slot_bytes,
            lane=measure.lane.name,
            bytes_per_second=measure.gigabytes_per_second * 1e9,
        )

    # Parcels.

    def _gather(self, effect: do.Gather) -> None:
        outbound = self._outbound[effect.transfer]
        payload_bytes = effect.parcel.wire_bytes(self._side.local.layout)
        job = Gather(
            blocks=outbound.blocks,
            parcel=effect.parcel,
            seed=self._seeds(effect, outbound).seed(effect.credit, effect.parcel, payload_bytes),
            message=self._arena.message(effect.slot, payload_bytes),
        )
        if effect.parcel.end_position > self._side.transfers[effect.transfer].computed_positions:
            self._observer.early(effect.transfer, effect.parcel_index)
        self._copier.gather(job, partial(self._was_gathered, effect, payload_bytes))

    def _seeds(self, effect: do.Gather, outbound: _Outbound) -> DigestSeeds:
        if outbound.seeds is None:
            nonce = self._side.transfers[effect.transfer].nonce
            assert nonce is not None, f"{effect.transfer} is gathered before its credits"
            outbound.seeds = DigestSeeds(
                effect.transfer,
                self._identity.incarnation,
                self._side.peers[effect.peer].incarnation,
                nonce,
                self._identity.fingerprint,
                outbound.history,
            )
        return outbound.seeds

    def _was_gathered(self, effect: do.Gather, payload_bytes: int, outcome: Gathered) -> None:
        self._gathered[effect.slot] = effect
        if outcome.intact:
            self._observer.parcel("gathered", effect.transfer, effect.parcel_index, payload_bytes)
        refusal = "" if outcome.intact else "owner_changed"
        self._pump.emit(on.Gathered(effect.slot, outcome.digest, refusal))

    def _send_parcel(self, effect: do.SendParcel) -> None:
        data = self._sessions.data(effect.session)
        if data is None:
            self._pump.emit(on.SendRefused(effect.slot, "session_closed"))
            return
        gathered = self._gathered[effect.slot]
        message = self._arena.message(effect.slot, effect.length - TRAILER_BYTES)
        leaving = self._faults.before_send(gathered.transfer, gathered.parcel_index, message)
        if leaving is None:
            return
        if delay_s := self._faults.send_delay_s(self._loop.time()):
            self._loop.call_later(delay_s, self._send_late, data, effect, gathered, leaving)
        else:
            self._send_now(data, effect, gathered, leaving)

    def _send_late(self, data: DataSession, effect: do.SendParcel, gathered: do.Gather, leaving: Bytes) -> None:
        if self._sessions.data(effect.session) is data:  # else the slot was fenced with its session
            self._send_now(data, effect, gathered, leaving)

    def _send_now(self, data: DataSession, effect: do.SendParcel, gathered: do.Gather, leaving: Bytes) -> None:
        try:
            data.send(credit_tag(effect.nonce, effect.credit), leaving, partial(self._was_sent, gathered, effect))
        except TransportError as error:
            self._pump.emit(on.SendRefused(effect.slot, error.reason))

    def _was_sent(self, gathered: do.Gather, effect: do.SendParcel, outcome: SendOutcome) -> None:
        match outcome:
            case Sent():
                payload_bytes = effect.length - TRAILER_BYTES
                self._observer.parcel("sent", gathered.transfer, gathered.parcel_index, payload_bytes)
                self._pump.emit(on.Sent(effect.slot))
            case SendFailed(reason=reason):
                self._pump.emit(on.SendFailed(effect.slot, reason))
            case _:
                assert_never(outcome)


def _drawn(staging: StagingMemory, slots: int, slot_bytes: int) -> Arena:
    arena = staging.draw_arena(slots, slot_bytes, session=None)
    assert arena is not None, f"no room for {slots} slots of {slot_bytes} bytes in memory made for them"
    return arena
