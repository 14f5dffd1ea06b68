"""Sessions of the data plane: whatever becomes of one, whoever has ended it hears of its fence."""

from __future__ import annotations

import asyncio

from foundation.ids import NodeId
from kv_transfer.data_sessions import DataSessions, SessionEvent
from kv_transfer.protocol.events import Fenced, LaneFailed, LaneOpened
from kv_transfer.transport.base import CloseOutcome, DataSession, LostCallback, TransportError, mint_fence

P0 = NodeId("p0")
SESSION = 7


class FakeSession:
    """An endpoint whose closing takes until it is let go."""

    def __init__(self) -> None:
        self.let_go = asyncio.Event()

    async def close(self) -> CloseOutcome:
        await self.let_go.wait()
        return mint_fence(SESSION)


async def settle() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


async def failing(events: list[SessionEvent]) -> tuple[DataSessions, FakeSession]:
    """A session that has failed its self-test and is being closed for that."""
    sessions, endpoint = DataSessions(events.append), FakeSession()

    async def connect(lost: LostCallback) -> DataSession:
        return endpoint  # type: ignore[return-value]

    async def measure(data: DataSession) -> LaneOpened:
        raise TransportError("self_test_failed", "as a test wants it")

    sessions.open(P0, SESSION, connect, measure, lambda outcome: None)
    await settle()
    return sessions, endpoint


async def test_a_lane_that_fails_its_test_is_told_once_it_is_closed() -> None:
    events: list[SessionEvent] = []
    _, endpoint = await failing(events)
    assert events == []
    endpoint.let_go.set()
    await settle()
    assert events == [LaneFailed(P0, SESSION, "self_test_failed")]


async def test_who_ends_a_session_while_its_lane_fails_is_told_of_the_fence() -> None:
    """Found by the simulation, seed 128: P waited for ever, and so did a D that wanted P's proof."""
    events: list[SessionEvent] = []
    sessions, endpoint = await failing(events)
    sessions.close(P0, SESSION)
    endpoint.let_go.set()
    await settle()
    assert events == [Fenced(P0, SESSION)]
