"""Where a decode node's sessions land: each gets an arena of its own before it is dialled, and keeps it until nothing can write
there any more.

An arena's memory is given back when the protocol has released it *and* the transport has fenced it, however late the fence
comes. One whose lane proves nothing is never given back, and says so.

Must not know: transfers, credits, what the protocol decides.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from foundation.ids import NodeId, SessionNonce, SlotIndex
from foundation.log import get_logger
from kv_transfer.arena import ARENA_SLOTS_AT_LEAST, ARENA_SLOTS_AT_MOST, Arena, StagingMemory
from kv_transfer.data_sessions import DataSessions
from kv_transfer.driver import DIAL_LIMIT_S, SELF_TEST_LIMIT_S
from kv_transfer.protocol.events import LaneFailed, LaneOpened
from kv_transfer.transport.base import NONCE_BITS, Bytes, CloseOutcome, DataSession, Fenced, LostCallback, Transport
from kv_transfer.transport.self_test import measure_lane

log = get_logger()

SHARE = 4
"""An arena takes this part of the staging memory that is left: the first peers, often the only ones, get much, and room remains
for many. A transfer has no more on its way than its arena has slots, and waits for a message for each part that is freed."""


@dataclass(slots=True)
class _Landing:
    """`touched`: a slot was handed to the transport."""

    arena: Arena
    nonce: SessionNonce
    lane: str = ""
    touched: bool = False
    released: bool = False
    fence: Fenced | None = None


class Landings:
    def __init__(
        self,
        transport: Transport,
        sessions: DataSessions,
        staging: StagingMemory,
        emit: Callable[[LaneFailed], None],
        measured: Callable[[NodeId, str, float], None],
    ) -> None:
        """`measured(peer, lane, gigabytes_per_second)` hears of every self-test."""
        self._transport = transport
        self._sessions = sessions
        self._staging = staging
        self._emit = emit
        self._measured = measured
        self._landings: dict[int, _Landing] = {}

    @property
    def drawn_bytes(self) -> int:
        """Payload bytes of all arenas that are not given back yet."""
        return self._staging.drawn_bytes

    def open(self, peer: NodeId, session: int, data_address: str, slot_bytes: int) -> None:
        """Draw an arena, dial, measure; `LaneOpened` or `LaneFailed` follows."""
        left_bytes = self._staging.staging_bytes - self._staging.drawn_bytes
        share = left_bytes // slot_bytes // SHARE
        slots = min(max(ARENA_SLOTS_AT_LEAST, share), ARENA_SLOTS_AT_MOST)
        arena = self._staging.draw_arena(slots, slot_bytes, session)
        while arena is None and slots > ARENA_SLOTS_AT_LEAST:  # what is left may lie in pieces
            slots = max(ARENA_SLOTS_AT_LEAST, slots // 2)
            arena = self._staging.draw_arena(slots, slot_bytes, session)
        if arena is None:
            self._emit(LaneFailed(peer, session, "staging_exhausted"))
            return
        landing = self._landings[session] = _Landing(arena, SessionNonce(secrets.randbits(NONCE_BITS)))
        connect = partial(self._connect, data_address, session)
        self._sessions.open(
            peer, session, connect, partial(self._measure, peer, landing), partial(self._closed, session)
        )

    def message(self, session: int, slot: SlotIndex, payload_bytes: int) -> Bytes:
        return self._landings[session].arena.message(slot, payload_bytes)

    def nonce(self, session: int) -> SessionNonce:
        return self._landings[session].nonce

    def lane(self, session: int) -> str:
        return self._landings[session].lane

    def release(self, session: int) -> None:
        """The protocol has no use for the arena any more."""
        self._landings[session].released = True
        self._give_back(session)

    async def _connect(self, data_address: str, session: int, lost: LostCallback) -> DataSession:
        return await self._transport.dial(data_address, session, lost, DIAL_LIMIT_S)

    async def _measure(self, peer: NodeId, landing: _Landing, data: DataSession) -> LaneOpened:
        arena = landing.arena
        buffers = [arena.message(slot, arena.slot_bytes) for slot in range(arena.slots)]
        landing.touched = data.lane.fences  # the self-test posts nothing on any other lane
        measure = await measure_lane(data, buffers, receive_first=True, deadline_s=SELF_TEST_LIMIT_S)
        self._measured(peer, measure.lane.name, measure.gigabytes_per_second)
        landing.lane = measure.lane.name
        return LaneOpened(
            peer=peer,
            session=data.session,
            nonce=landing.nonce,
            slots=arena.slots,
            slot_bytes=arena.slot_bytes,
            lane=measure.lane.name,
            bytes_per_second=measure.gigabytes_per_second * 1e9,
        )

    def _closed(self, session: int, outcome: CloseOutcome | None, reported: bool) -> None:
        """The protocol releases only what was reported to it as open."""
        landing = self._landings[session]
        if not landing.touched:
            self._staging.give_back_untouched(landing.arena)
            del self._landings[session]
            return
        if isinstance(outcome, Fenced):
            landing.fence = outcome
        else:
            log.warning("arena cannot be given back yet: bytes may still land", session=f"{session:#x}")
        landing.released = landing.released or not reported
        self._give_back(session)

    def _give_back(self, session: int) -> None:
        landing = self._landings[session]
        if landing.released and landing.fence is not None:
            self._staging.give_back(landing.arena, landing.fence)
            del self._landings[session]
