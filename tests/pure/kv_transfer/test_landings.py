"""What a session is given to land in."""

from __future__ import annotations

import pytest

from foundation.ids import NodeId
from kv_transfer.arena import ARENA_SLOTS_AT_MOST, HostSlots, StagingMemory, slot_stride
from kv_transfer.data_sessions import DataSessions, SessionEvent
from kv_transfer.landings import Landings
from kv_transfer.transport.base import Bytes
from kv_transfer.transport.memory import MemoryTransport
from kv_transfer.transport.memory_network import MemoryNetwork

P0 = NodeId("p0")
MIB = 1 << 20


class InPieces:
    """Memory none of whose gaps is longer than `longest`."""

    def __init__(self, longest: int) -> None:
        self._longest = longest

    def draw(self, size: int) -> Bytes | None:
        return HostSlots().draw(size) if size <= self._longest else None

    def give_back(self, run: Bytes) -> None:
        pass


@pytest.mark.parametrize(
    ("slot_bytes", "slots"), [(4 * MIB, 512 // 4 // 4), (200 * MIB, 2), (512, ARENA_SLOTS_AT_MOST)], ids=str
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


async def test_the_first_peers_get_much_and_room_remains_for_many() -> None:
    events: list[SessionEvent] = []
    sessions = DataSessions(events.append)
    staging = StagingMemory(512 * MIB)
    landings = Landings(
        MemoryTransport(MemoryNetwork()), sessions, staging, events.append, lambda peer, lane, speed: None
    )
    slots: list[int] = []
    for session in range(1, 13):
        before = landings.drawn_bytes
        landings.open(P0, session, "nobody:1", 4 * MIB)
        slots.append((landings.drawn_bytes - before) // (4 * MIB))
    assert slots == [32, 24, 18, 13, 10, 7, 6, 4, 3, 2, 2, 2]
    await sessions.close_all()


async def test_where_no_gap_holds_a_share_an_arena_is_a_part_of_it() -> None:
    """Arenas of many sizes that come and go leave a GPU's staging memory in pieces."""
    events: list[SessionEvent] = []
    sessions = DataSessions(events.append)
    staging = StagingMemory(512 * MIB, InPieces(10 * slot_stride(4 * MIB)))
    landings = Landings(
        MemoryTransport(MemoryNetwork()), sessions, staging, events.append, lambda peer, lane, speed: None
    )
    landings.open(P0, 1, "nobody:1", 4 * MIB)
    assert landings.drawn_bytes == 512 * MIB // 4 // 2 // 2
    await sessions.close_all()
