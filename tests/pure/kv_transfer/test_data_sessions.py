"""Sessions of the data plane: whatever becomes of one, whoever has ended it hears of its fence."""

from __future__ import annotations

import asyncio

import pytest

from foundation.ids import NodeId, SessionNonce
from kv_transfer.data_sessions import DataSessions, SessionEvent
from kv_transfer.protocol.events import Fenced, LaneFailed, LaneOpened
from kv_transfer.transport.base import CloseOutcome, DataSession, LostCallback, NotFenced, TransportError, mint_fence
from kv_transfer.transport.base import Fenced as Proof

P0 = NodeId("p0")
SESSION = 7
OPENED = LaneOpened(P0, SESSION, SessionNonce(1), 2, 8, "fake", 1e9)


async def opened(data: DataSession) -> LaneOpened:
    return OPENED


class FakeSession:
    """An endpoint whose closing takes until it is let go; with `unproven`, its fence is still due then."""

    def __init__(self, unproven: bool = False) -> None:
        self.let_go = asyncio.Event()
        self.closes = 0
        self.fence: asyncio.Future[Proof] = asyncio.get_running_loop().create_future()
        self._unproven = unproven

    async def close(self) -> CloseOutcome:
        self.closes += 1
        await self.let_go.wait()
        return NotFenced(SESSION, frozenset()) if self._unproven else mint_fence(SESSION)


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

    sessions.open(P0, SESSION, connect, measure, lambda outcome, reported: None)
    await settle()
    return sessions, endpoint


async def test_a_lane_that_fails_its_test_is_told_once_it_is_closed() -> None:
    events: list[SessionEvent] = []
    _, endpoint = await failing(events)
    assert events == []
    endpoint.let_go.set()
    await settle()
    assert events == [LaneFailed(P0, SESSION, "self_test_failed"), Fenced(P0, SESSION)]


async def test_who_ends_a_session_while_its_lane_fails_is_told_of_the_fence() -> None:
    """Found by the simulation, seed 128: P waited for ever, and so did a D that wanted P's proof."""
    events: list[SessionEvent] = []
    sessions, endpoint = await failing(events)
    sessions.close(P0, SESSION)
    endpoint.let_go.set()
    await settle()
    assert events[-1] == Fenced(P0, SESSION)


async def test_a_fence_that_comes_late_is_told_when_it_comes_and_only_then() -> None:
    events: list[SessionEvent] = []
    outcomes: list[CloseOutcome | None] = []
    sessions, endpoint = DataSessions(events.append), FakeSession(unproven=True)
    endpoint.let_go.set()

    async def connect(lost: LostCallback) -> DataSession:
        return endpoint  # type: ignore[return-value]

    sessions.open(P0, SESSION, connect, opened, lambda outcome, reported: outcomes.append(outcome))
    await settle()
    sessions.close(P0, SESSION)
    await settle()
    sessions.close(P0, SESSION)
    await settle()
    assert events == [OPENED]
    endpoint.fence.set_result(mint_fence(SESSION))
    await settle()
    assert events == [OPENED, Fenced(P0, SESSION)]
    assert outcomes == [NotFenced(SESSION, frozenset()), mint_fence(SESSION)]
    assert endpoint.closes == 1


async def test_an_endpoint_that_arrives_just_as_its_opening_is_given_up_is_destroyed() -> None:
    """Nobody owned it: its sockets stayed open for good."""
    events: list[SessionEvent] = []
    sessions, endpoint = DataSessions(events.append), FakeSession()
    endpoint.let_go.set()
    arriving: asyncio.Future[DataSession] = asyncio.get_running_loop().create_future()
    sessions.open(P0, SESSION, lambda lost: arriving, opened, lambda outcome, reported: None)
    await settle()
    arriving.set_result(endpoint)  # type: ignore[arg-type]
    sessions.close(P0, SESSION)
    await settle()
    assert endpoint.closes == 1
    assert events == [Fenced(P0, SESSION)]


async def test_a_session_that_is_closed_as_soon_as_it_is_opened_is_not_waited_for_any_more() -> None:
    events: list[SessionEvent] = []
    sessions = DataSessions(events.append)
    arriving: asyncio.Future[DataSession] = asyncio.get_running_loop().create_future()
    sessions.open(P0, SESSION, lambda lost: arriving, opened, lambda outcome, reported: None)
    sessions.close(P0, SESSION)
    await settle()
    assert arriving.cancelled()
    assert events == [Fenced(P0, SESSION)]


@pytest.mark.parametrize("end", ["broken", "closed", "stays"])
async def test_f30_whoever_gave_memory_learns_whether_the_session_was_ever_told_to_be_open(end: str) -> None:
    """What happens while the self-test ends: memory of a session that nobody heard of must not wait to be released."""
    events: list[SessionEvent] = []
    told: list[bool] = []
    sessions, endpoint = DataSessions(events.append), FakeSession()
    endpoint.let_go.set()

    async def connect(lost: LostCallback) -> DataSession:
        return endpoint  # type: ignore[return-value]

    async def measure(data: DataSession) -> LaneOpened:
        if end == "broken":
            sessions.broken(SESSION, "peer_closed")
        elif end == "closed":
            sessions.close(P0, SESSION)
        return await opened(data)

    sessions.open(P0, SESSION, connect, measure, lambda outcome, reported: told.append(reported))
    await settle()
    sessions.close(P0, SESSION)
    await settle()
    assert told == [end == "stays"]
    assert any(isinstance(event, LaneOpened) for event in events) == (end == "stays")
    assert events[-1] == Fenced(P0, SESSION)
