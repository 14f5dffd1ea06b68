"""Which progress each waiting state waits for, and for how long.

A deadline never measures age: every `Wait` names a *marker*, and passes only when the marker has not changed for the limit.
The rim looks at the waits a few times a second and hands the events that come out back to `handle`. Limits are durations of
this process; nothing here crosses to the other side.

Must not know: clocks. `now_s` is any monotonic time.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator
from dataclasses import dataclass, field

from kv_transfer.protocol.decode_transfer import DecodeState, DecodeTransfer
from kv_transfer.protocol.decode_turn import DecodeSide
from kv_transfer.protocol.events import Idle, LeaseExpired, Silent, Stalled
from kv_transfer.protocol.peer import Peer, PeerState
from kv_transfer.protocol.prefill_transfer import PrefillState, PrefillTransfer
from kv_transfer.protocol.prefill_turn import PrefillSide
from kv_transfer.protocol.table import Table

DeadlineEvent = Silent | Idle | Stalled | LeaseExpired


@dataclass(frozen=True, slots=True)
class Limits:
    silence_s: float = 2.0
    connect_s: float = 5.0
    reservation_s: float = 10.0
    lease_s: float = 30.0
    idle_s: float = 60.0


@dataclass(frozen=True, slots=True)
class Wait:
    event: DeadlineEvent
    marker: Hashable
    limit_s: float


@dataclass(frozen=True, slots=True)
class Watch:
    """Since when each wait has had its marker."""

    since: Table[DeadlineEvent, tuple[Hashable, float]] = field(default_factory=Table)

    def look(
        self, waits: Iterable[Wait], now_s: float, stopped_s: float = 0.0, spare_s: float = 0.0
    ) -> tuple[Watch, tuple[DeadlineEvent, ...]]:
        """The watch after this look, and the deadlines that have passed; each of those starts anew.

        `stopped_s` is time since the last look in which this node did not run: it does not count, and after it each wait has
        `spare_s` more at least, for what has come meanwhile to be read.
        """
        since: dict[DeadlineEvent, tuple[Hashable, float]] = {}
        passed = []
        for wait in waits:
            marker, since_s = self.since.get(wait.event, (wait.marker, now_s))
            if stopped_s:
                since_s = min(now_s, max(since_s + stopped_s, now_s - wait.limit_s + spare_s))
            if marker != wait.marker:
                since_s = now_s
            elif now_s - since_s >= wait.limit_s:
                passed.append(wait.event)
                since_s = now_s
            since[wait.event] = (wait.marker, since_s)
        return Watch(Table(since)), tuple(passed)


def _progress_limit_s(peer: Peer, limits: Limits) -> float:
    """Slow is not dead: a peer may take three of the steps that it has announced."""
    return max(limits.silence_s, 3 * peer.hello.step_limit_s if peer.hello is not None else 0.0)


def _peer_wait(peer: Peer, limits: Limits) -> Wait:
    if peer.state is PeerState.CONNECTING:
        return Wait(Silent(peer.node_id), (peer.streaming, peer.hello is not None), limits.connect_s)
    return Wait(Silent(peer.node_id), peer.messages_heard, limits.silence_s)


def decode_waits(side: DecodeSide, limits: Limits) -> Iterator[Wait]:
    busy = {transfer.peer for transfer in side.transfers.values()}
    for peer in side.peers.values():
        yield _peer_wait(peer, limits)
        if peer.node_id not in busy:
            yield Wait(Idle(peer.node_id), peer.session, limits.idle_s)
    for transfer in side.transfers.values():
        pair = side.peers.get(transfer.peer)
        if pair is not None and pair.session == transfer.session:
            yield from _decode_transfer_waits(side, transfer, pair, limits)


def _decode_transfer_waits(side: DecodeSide, transfer: DecodeTransfer, peer: Peer, limits: Limits) -> Iterator[Wait]:
    stalled, limit_s = Stalled(transfer.id), _progress_limit_s(peer, limits)
    state = transfer.state
    match state:
        case DecodeState.ASKED if transfer.expected_positions:
            yield Wait(stalled, (state, "reservation"), limits.reservation_s)
        case DecodeState.ASKED:
            yield Wait(stalled, (state, peer.engine_steps), limit_s)
        case DecodeState.LANDING:
            arena = side.arenas[transfer.session]
            computing = transfer.ready_positions < transfer.expected_positions or not transfer.first_token
            landed = (arena.credits_returned, len(transfer.verified), transfer.ready_positions)
            yield Wait(stalled, (state, landed, peer.engine_steps if computing else None), limit_s)
        case DecodeState.ENDING if transfer.drained:
            pass  # only the own device is waited for
        case _:
            yield Wait(stalled, state, limit_s)


def prefill_waits(side: PrefillSide, limits: Limits) -> Iterator[Wait]:
    for peer in side.peers.values():
        yield _peer_wait(peer, limits)
    for transfer in side.transfers.values():
        pair = side.peers.get(transfer.peer)
        if pair is not None and pair.session == transfer.session:
            yield from _prefill_transfer_waits(transfer, pair, limits)


def _prefill_transfer_waits(transfer: PrefillTransfer, peer: Peer, limits: Limits) -> Iterator[Wait]:
    limit_s = _progress_limit_s(peer, limits)
    if transfer.state is not PrefillState.ENDING:
        yield Wait(LeaseExpired(transfer.id), transfer.renewals, limits.lease_s)
    if transfer.state is PrefillState.RESERVED:
        yield Wait(Stalled(transfer.id), (transfer.state, peer.engine_steps), limit_s + limits.reservation_s)
    elif transfer.waits_for_credits:
        marker = (transfer.state, len(transfer.credits), transfer.computed_positions, peer.engine_steps)
        yield Wait(Stalled(transfer.id), marker, limit_s + limits.reservation_s)
    elif transfer.state is PrefillState.ENDING and not transfer.acknowledged:
        yield Wait(Stalled(transfer.id), transfer.state, limit_s)
