"""What a session is given to land in."""

from __future__ import annotations

import pytest

from foundation.ids import NodeId
from kv_transfer.arena import ARENA_SLOTS_AT_MOST, StagingMemory
from kv_transfer.data_sessions import DataSessions, SessionEvent
from kv_transfer.landings import Landings
from kv_transfer.transport.memory import MemoryTransport
from kv_transfer.transport.memory_network import MemoryNetwork

P0 = NodeId("p0")
MIB = 1 << 20


@pytest.mark.parametrize(
    ("slot_bytes", "slots"), [(4 * MIB, 512 // 4 // 8), (200 * MIB, 2), (512, ARENA_SLOTS_AT_MOST)], ids=str
)
async def test_f17_an_arena_is_a_share_of_the_staging_memory_in_a_bounded_number_of_slots(
    slot_bytes: int, slots: int
) -> None:
    events: list[SessionEvent] = []
    sessions = DataSessions(events.append)
    landings = Landings(
        MemoryTransport(MemoryNetwork()),
        sessions,
        StagingMemory(512 * MIB),
        events.append,
        lambda peer, lane, speed: None,
    )
    landings.open(P0, 1, "nobody:1", slot_bytes)
    assert landings.drawn_bytes == slots * slot_bytes
    await sessions.close_all()
    assert landings.drawn_bytes == 0
