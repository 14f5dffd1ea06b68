"""The data plane's sessions of one node: each opened, tested, used and closed exactly once, by number.

Opening and closing take time, so they are tasks; what becomes of them comes back through `emit` as the protocol's events.
A session that is closed while it opens is never reported as open. Every session that the lane can fence ends with `Fenced`,
however it began and however late the proof comes.

Must not know: transfers, credits, what travels.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial

from foundation.ids import NodeId
from foundation.log import get_logger
from kv_transfer.protocol.events import EndpointLost, Fenced, LaneFailed, LaneOpened
from kv_transfer.pump import watched
from kv_transfer.transport.base import CloseOutcome, DataSession, LostCallback, NotFenced, TransportError
from kv_transfer.transport.base import Fenced as Proof

log = get_logger()

SessionEvent = LaneOpened | LaneFailed | EndpointLost | Fenced
Connect = Callable[[LostCallback], Awaitable[DataSession]]
Measure = Callable[[DataSession], Awaitable[LaneOpened]]
Closed = Callable[[CloseOutcome | None, bool], None]
"""Takes what the transport could prove, before any event tells of it: None when there never was an endpoint; once more when a
proof came late. And whether `LaneOpened` had been reported."""


@dataclass(slots=True)
class _Entry:
    peer: NodeId
    closed: Closed
    arriving: asyncio.Future[DataSession] | None = None
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
        entry.arriving = asyncio.ensure_future(connect(lambda reason: self.broken(session, reason)))
        entry.opening = watched(self._open(entry, session, entry.arriving, measure))

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
        """Idempotent while the session is known; `Fenced` follows when the lane can prove it, or nothing was ever opened."""
        entry = self._entries.setdefault(session, _Entry(peer, lambda outcome, reported: None))
        if entry.closing is None:
            log.info("session closed", peer=peer, session=f"{session:#x}")
            entry.closing = watched(self._close(entry, session))

    async def close_all(self) -> None:
        """Close every session; their events follow as ever."""
        for session, entry in list(self._entries.items()):
            self.close(entry.peer, session)
        await asyncio.gather(*(entry.closing for entry in list(self._entries.values()) if entry.closing))

    async def _open(self, entry: _Entry, session: int, arriving: asyncio.Future[DataSession], measure: Measure) -> None:
        try:
            entry.data = await arriving
            opened = await measure(entry.data)
            if entry.lost_reason is not None:
                raise TransportError(entry.lost_reason, "the endpoint broke while it was tested")
        except TransportError as error:
            log.warning("no lane", peer=entry.peer, session=f"{session:#x}", reason=error.reason, detail=str(error))
            entry.failure = error.reason
            if entry.closing is None:
                entry.closing = watched(self._close(entry, session))
        else:
            if entry.closing is None:
                entry.reported = True
                self._emit(opened)

    async def _close(self, entry: _Entry, session: int) -> None:
        for work in (entry.opening, entry.arriving):
            if work is not None and not work.done():
                work.cancel()
                await asyncio.wait({work})
        data = entry.data or _arrived_unseen(entry.arriving)
        outcome = await data.close() if data is not None else None
        entry.closed(outcome, entry.reported)
        if entry.failure is not None:
            self._emit(LaneFailed(entry.peer, session, entry.failure))
        if data is not None and isinstance(outcome, NotFenced):
            log.warning("session closed, its fence is still due", peer=entry.peer, session=f"{session:#x}")
            data.fence.add_done_callback(partial(self._fenced_late, entry, session))
        else:
            self._over(entry, session)

    def _fenced_late(self, entry: _Entry, session: int, fence: asyncio.Future[Proof]) -> None:
        if not fence.cancelled():
            entry.closed(fence.result(), entry.reported)
            self._over(entry, session)

    def _over(self, entry: _Entry, session: int) -> None:
        del self._entries[session]
        self._emit(Fenced(entry.peer, session))


def _arrived_unseen(arriving: asyncio.Future[DataSession] | None) -> DataSession | None:
    """An endpoint that came just as its opening was given up: it must be destroyed like any other."""
    if arriving is None or arriving.cancelled() or arriving.exception() is not None:
        return None
    return arriving.result()
