"""The data plane's sessions of one node: each opened, tested, used and closed exactly once, by number.

Opening and closing take time, so they are tasks; what becomes of them comes back through `emit` as the protocol's events.
A session that is closed while it opens is never reported as open.

Must not know: transfers, credits, what travels.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from foundation.ids import NodeId
from foundation.log import get_logger
from kv_transfer.protocol.events import EndpointLost, Fenced, LaneFailed, LaneOpened
from kv_transfer.pump import watched
from kv_transfer.transport.base import CloseOutcome, DataSession, LostCallback, NotFenced, TransportError

log = get_logger()

SessionEvent = LaneOpened | LaneFailed | EndpointLost | Fenced
Connect = Callable[[LostCallback], Awaitable[DataSession]]
Measure = Callable[[DataSession], Awaitable[LaneOpened]]
Closed = Callable[[CloseOutcome | None], None]
"""Takes what the transport could prove, before any event tells of it; None when there never was an endpoint."""


@dataclass(slots=True)
class _Entry:
    peer: NodeId
    closed: Closed
    opening: asyncio.Task[None] | None = None
    closing: asyncio.Task[None] | None = None
    data: DataSession | None = None
    reported: bool = False
    lost_reason: str | None = None
    failure: str | None = None


class DataSessions:
    def __init__(self, emit: Callable[[SessionEvent], None]) -> None:
        self._emit = emit
        self._entries: dict[int, _Entry] = {}

    def open(self, peer: NodeId, session: int, connect: Connect, measure: Measure, closed: Closed) -> None:
        """Connect, then measure; `LaneOpened` or `LaneFailed` follows, unless `close` comes first."""
        assert session not in self._entries, f"session {session:#x} is opened twice"
        entry = self._entries[session] = _Entry(peer, closed)
        connecting = connect(lambda reason: self.broken(session, reason))
        entry.opening = watched(self._open(entry, session, connecting, measure))

    def data(self, session: int) -> DataSession | None:
        """The endpoint of a session that has been reported open and is not being closed."""
        entry = self._entries.get(session)
        return entry.data if entry and entry.reported and not entry.closing else None

    def broken(self, session: int, reason: str) -> None:
        """The endpoint is of no use any more. The protocol is told once, and then closes the session."""
        entry = self._entries.get(session)
        if entry is None or entry.lost_reason is not None:
            return
        entry.lost_reason = reason
        if entry.reported and not entry.closing:
            self._emit(EndpointLost(entry.peer, session, reason))

    def close(self, peer: NodeId, session: int) -> None:
        """Idempotent while the session is open; `Fenced` follows when the lane can prove it, or nothing was ever opened."""
        entry = self._entries.setdefault(session, _Entry(peer, lambda fence: None))
        entry.failure = None  # whoever has ended the session waits for its fence alone
        if entry.closing is None:
            log.info("session closed", peer=peer, session=f"{session:#x}")
            entry.closing = watched(self._close(entry, session))

    async def close_all(self) -> None:
        """Close every session; their events follow as ever."""
        for session, entry in list(self._entries.items()):
            self.close(entry.peer, session)
        await asyncio.gather(*(entry.closing for entry in list(self._entries.values()) if entry.closing))

    async def _open(self, entry: _Entry, session: int, connecting: Awaitable[DataSession], measure: Measure) -> None:
        try:
            entry.data = await connecting
            opened = await measure(entry.data)
            if entry.lost_reason is not None:
                raise TransportError(entry.lost_reason, "the endpoint broke while it was tested")
        except TransportError as error:
            log.warning("no lane", peer=entry.peer, session=f"{session:#x}", reason=error.reason, detail=str(error))
            if entry.closing is None:
                entry.failure = error.reason
                entry.closing = watched(self._close(entry, session))
        else:
            if entry.closing is None:
                entry.reported = True
                self._emit(opened)

    async def _close(self, entry: _Entry, session: int) -> None:
        if entry.opening is not None and not entry.opening.done():
            entry.opening.cancel()
            await asyncio.wait({entry.opening})
        outcome = await entry.data.close() if entry.data else None
        assert entry.opening is None or entry.opening.done()
        del self._entries[session]
        entry.closed(outcome)
        if entry.failure is not None:
            self._emit(LaneFailed(entry.peer, session, entry.failure))
        elif not isinstance(outcome, NotFenced):
            self._emit(Fenced(entry.peer, session))
