"""A model of the data plane inside one process, for tests: deterministic, and harmed only by its script.

It does what UCX was seen to do, unpleasant as that is:

- matching is by tag for the whole transport; small messages nobody posted for are kept, outlive their sender, and meet any
  later receive with that tag; larger ones wait for their receive as long as the session lives;
- a matched receive cannot be cancelled;
- a send completes when its last bytes have left, not when they have landed;
- short messages land without saying so, longer ones than the buffer end as truncated while their sender sees success;
- what happens to bytes under way when something dies depends on the lane:

      FENCED     (TCP, shared memory)  receives fail; bytes on the wire still land until this side's endpoint is destroyed
      READS      (receiver reads)      a matched receive completes by itself, whole, whatever became of the peer
      WRITES     (sender writes)       receives fail, and all the rest of the bytes lands afterwards

One fragment of each message moves in each turn of the event loop, unless the script holds it.

Must not know: parcels, digests, the protocol's states.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

import numpy as np

from kv_transfer.transport.base import (
    NUMBER_BITS,
    Bytes,
    CloseOutcome,
    DataSession,
    Fenced,
    Landed,
    Lane,
    LostCallback,
    NotFenced,
    ReceiveCancelled,
    ReceiveFailed,
    ReceiveOutcome,
    SendFailed,
    SendOutcome,
    Sent,
    Tag,
    TransportError,
    mint_fence,
)

FENCED = Lane("memory", receiver_reads=False, close_fences_receives=True)
READS = Lane("memory_receiver_reads", receiver_reads=True, close_fences_receives=False)
WRITES = Lane("memory_sender_writes", receiver_reads=False, close_fences_receives=False)


Told = TypeVar("Told")


@dataclass(slots=True, eq=False)
class _Receive:
    session: MemorySession
    tag: Tag
    buffer: Bytes
    done: Callable[[ReceiveOutcome], None]
    open: bool = True


@dataclass(slots=True, eq=False)
class _Message:
    """`source` is the sender's own memory, read fragment by fragment; a copy for a small message."""

    sender: MemorySession
    tag: Tag
    source: Bytes
    done: Callable[[SendOutcome], None] | None
    receive: _Receive | None = None
    read_bytes: int = 0
    landed_bytes: int = 0
    wire: deque[Bytes] = field(default_factory=deque)


class MemoryNetwork:
    """Where transports of one test meet, and the script that harms them."""

    def __init__(
        self, lane: Lane = FENCED, eager_bytes: int = 8192, fragment_bytes: int = 64 * 1024, wire_fragments: int = 4
    ) -> None:
        self.lane = lane
        self.eager_bytes = eager_bytes
        self.fragment_bytes = fragment_bytes
        self.wire_fragments = wire_fragments
        self.listeners: dict[str, MemoryTransport] = {}
        self.moving: list[_Message] = []
        self._holds: dict[Tag, int] = {}
        self._turn_scheduled = False
        self._next_port = 1

    def transport(self) -> MemoryTransport:
        return MemoryTransport(self)

    def hold(self, tag: Tag, after_bytes: int = 0) -> None:
        """No more than this much of the message with this tag leaves its sender until `release`."""
        self._holds[tag] = after_bytes

    def release(self, tag: Tag) -> None:
        del self._holds[tag]
        self.wake()

    def free_port(self) -> int:
        self._next_port += 1
        return self._next_port

    def moves(self, session: MemorySession) -> bool:
        """Whether bytes may still come to a session that is closed, or be read from its memory."""
        return any(
            (message.receive is not None and message.receive.session is session)
            or (message.sender is session and not self.lane.close_fences_receives)
            for message in self.moving
        )

    def wake(self) -> None:
        if not self._turn_scheduled:
            self._turn_scheduled = True
            asyncio.get_running_loop().call_soon(self._turn)

    def _turn(self) -> None:
        self._turn_scheduled = False
        moved = [self._move(message) for message in list(self.moving)]
        if any(moved):
            self.wake()

    def _move(self, message: _Message) -> bool:
        """One fragment off the source, one off the wire."""
        receive = message.receive
        assert receive is not None
        landed = self._land(message, receive)
        read = self._read(message)
        if message.landed_bytes == message.source.size and self._may_complete(message, receive):
            self.moving.remove(message)
            receive.session.complete(receive, _verdict(message, receive))
            message.sender.settle()
            return True
        return landed or read

    def _read(self, message: _Message) -> bool:
        limit = min(message.source.size, self._holds.get(message.tag, message.source.size))
        end = min(message.read_bytes + self.fragment_bytes, limit)
        if end <= message.read_bytes or len(message.wire) >= self.wire_fragments or not self._source_moves(message):
            return False
        message.wire.append(message.source[message.read_bytes : end].copy())
        message.read_bytes = end
        if end == message.source.size:
            message.sender.sent(message)
        return True

    def _land(self, message: _Message, receive: _Receive) -> bool:
        if not message.wire or not self._sink_moves(receive):
            return False
        fragment = message.wire.popleft()
        room = receive.buffer[message.landed_bytes : message.landed_bytes + fragment.size]
        room[:] = fragment[: room.size]
        message.landed_bytes += fragment.size
        return True

    def _source_moves(self, message: _Message) -> bool:
        if self.lane.close_fences_receives:
            receive = message.receive
            assert receive is not None
            return message.sender.running and receive.open and receive.session.running
        return True

    def _sink_moves(self, receive: _Receive) -> bool:
        return receive.session.transport.running or not self.lane.close_fences_receives

    def _may_complete(self, message: _Message, receive: _Receive) -> bool:
        small = message.source.size <= self.eager_bytes
        return self.lane.receiver_reads or small or not receive.open or message.sender.transport.running


def _verdict(message: _Message, receive: _Receive) -> ReceiveOutcome:
    if message.source.size > receive.buffer.size:
        return ReceiveFailed(receive.tag, "message_truncated")
    return Landed(receive.tag)


class MemorySession:
    """See `base.DataSession`."""

    def __init__(self, transport: MemoryTransport, session: int, lost: LostCallback) -> None:
        self.session = session
        self.transport = transport
        self.peer: MemorySession | None = None
        self._lost: LostCallback | None = lost
        self._receives: dict[Tag, _Receive] = {}
        self._sends: list[_Message] = []
        self._nonces: set[int] = set()
        self._late: set[Tag] = set()
        """Receives that failed on a lane whose endings prove nothing: nobody here knows whether bytes still land."""
        self._closed = False
        self._ended = asyncio.Event()
        self._fence: asyncio.Future[Fenced] = asyncio.get_running_loop().create_future()

    @property
    def lane(self) -> Lane:
        return self.transport.network.lane

    @property
    def fence(self) -> asyncio.Future[Fenced]:
        return self._fence

    @property
    def running(self) -> bool:
        return self.transport.running and not self._closed

    def post_receive(self, tag: Tag, buffer: Bytes, done: Callable[[ReceiveOutcome], None]) -> None:
        assert not self._closed, f"session {self.session:#x} is closed"
        assert tag not in self._receives, f"tag {tag:#x} is posted already"
        self._receives[tag] = receive = _Receive(self, tag, buffer, done)
        self._nonces.add(tag >> NUMBER_BITS)
        self.transport.post(receive)

    def cancel_unused(self, tag: Tag) -> None:
        receive = self._receives.get(tag)
        if receive is not None and self.transport.withdraw(receive):
            self.complete(receive, ReceiveCancelled(tag))

    def send(self, tag: Tag, buffer: Bytes, done: Callable[[SendOutcome], None]) -> None:
        assert not self._closed, f"session {self.session:#x} is closed"
        small = buffer.size <= self.transport.network.eager_bytes
        message = _Message(self, tag, buffer.copy() if small else buffer, done)
        self._sends.append(message)
        if self.peer is None or self.peer._closed:
            self._fail_send(message, "connection_reset")
            return
        self.peer.transport.arrive(message)
        if small:
            self.sent(message)

    async def close(self) -> CloseOutcome:
        if not self._closed:
            self._closed = True
            self._end_operations("canceled")
            if self.peer is not None:
                self.peer.lose("peer_closed")
            self.transport.forget(self._nonces)
        await self._ended.wait()
        await asyncio.sleep(0)  # what was told just now is heard before this returns
        return self._fence.result() if self._fence.done() else NotFenced(self.session, frozenset(self._late))

    def lose(self, reason: str) -> None:
        """The peer is gone: what its lane does then, and one call to the owner."""
        if self._closed or not self.transport.alive:
            return
        self._end_operations("connection_reset")
        lost, self._lost = self._lost, None
        if lost is not None:
            self.transport.tell(lost, reason)

    def complete(self, receive: _Receive, outcome: ReceiveOutcome) -> None:
        """Tell the owner, once."""
        if receive.open:
            receive.open = False
            del self._receives[receive.tag]
            if isinstance(outcome, ReceiveFailed) and outcome.reason != "message_truncated" and not self.lane.fences:
                self._late.add(receive.tag)
            self.transport.tell(receive.done, outcome)
        self.settle()

    def sent(self, message: _Message) -> None:
        if message in self._sends:
            self._sends.remove(message)
            assert message.done is not None
            self.transport.tell(message.done, Sent(message.tag))

    def _fail_send(self, message: _Message, reason: str) -> None:
        self._sends.remove(message)
        assert message.done is not None
        self.transport.tell(message.done, SendFailed(message.tag, reason))

    def _end_operations(self, reason: str) -> None:
        network = self.transport.network
        for message in list(self._sends):
            if self.peer is not None:
                self.peer.transport.drop(message)
            self._fail_send(message, reason)
        matched = {message.receive for message in network.moving}
        for receive in list(self._receives.values()):
            if receive in matched and network.lane.receiver_reads:
                continue
            self.transport.withdraw(receive)
            self.complete(receive, ReceiveFailed(receive.tag, reason))
        if self._closed and network.lane.close_fences_receives:
            network.moving = [m for m in network.moving if m.receive is None or m.receive.session is not self]
        self.settle()
        network.wake()

    def settle(self) -> None:
        """Note what has come to its end: all operations, and with them perhaps every byte."""
        if not self._closed or self._receives:
            return
        self._ended.set()
        if not self._late and not self._fence.done() and not self.transport.network.moves(self):
            self._fence.set_result(mint_fence(self.session))


class MemoryTransport:
    """See `base.Transport`. `kill`, `stop` and `resume` do what the signals do to the process."""

    def __init__(self, network: MemoryNetwork) -> None:
        self.network = network
        self.alive = True
        self.stopped = False
        self.strangers_refused = 0
        self.stray_messages = 0
        self._sessions: list[MemorySession] = []
        self._expected: dict[int, tuple[asyncio.Future[DataSession], LostCallback]] = {}
        self._posted: dict[Tag, _Receive] = {}
        self._unexpected: list[_Message] = []
        self._untold: list[Callable[[], None]] = []

    @property
    def running(self) -> bool:
        return self.alive and not self.stopped

    def kill(self) -> None:
        self.alive = False
        self._stop_listening()
        for session in self._sessions:
            if session.peer is not None:
                session.peer.transport.drop_waiting(session)
                session.peer.lose("peer_closed")

    def stop(self) -> None:
        self.stopped = True

    def resume(self) -> None:
        self.stopped = False
        untold, self._untold = self._untold, []
        for tell in untold:
            tell()
        self.network.wake()

    def tell(self, callback: Callable[[Told], None], news: Told) -> None:
        """Call back in the loop's next turn; a stopped process hears of it when it goes on, a dead one never."""
        if self.stopped:
            self._untold.append(partial(self.tell, callback, news))
        elif self.alive:
            asyncio.get_running_loop().call_soon(callback, news)

    def new_session(self, session: int, lost: LostCallback) -> MemorySession:
        return MemorySession(self, session, lost)

    async def listen(self, host: str, port: int) -> str:
        address = f"{host}:{port or self.network.free_port()}"
        if address in self.network.listeners:
            raise TransportError("address_in_use", f"--data-port {port} on {host} is taken; choose another")
        self.network.listeners[address] = self
        return address

    def expect(self, session: int, lost: LostCallback) -> asyncio.Future[DataSession]:
        assert session not in self._expected, f"session {session:#x} is expected already"
        arrived: asyncio.Future[DataSession] = asyncio.get_running_loop().create_future()
        self._expected[session] = arrived, lost
        arrived.add_done_callback(lambda _: self._expected.pop(session, None))
        return arrived

    async def dial(self, address: str, session: int, lost: LostCallback, deadline_s: float) -> DataSession:
        await asyncio.sleep(0)
        peer = self.network.listeners.get(address)
        if peer is None:
            raise TransportError("unreachable", f"nobody listens at {address}")
        if peer.stopped:
            await asyncio.sleep(deadline_s)
            raise TransportError("dial_timeout", f"{address} did not greet within {deadline_s} s")
        arrived, their_lost = peer._expected.pop(session, (None, None))
        if arrived is None or their_lost is None or arrived.done():
            peer.strangers_refused += 1
            raise TransportError("not_expected", f"{address} does not expect session {session:#x}")
        ours, theirs = self.new_session(session, lost), peer.new_session(session, their_lost)
        ours.peer, theirs.peer = theirs, ours
        self._sessions.append(ours)
        peer._sessions.append(theirs)
        arrived.set_result(theirs)
        return ours

    async def close(self) -> None:
        self._stop_listening()
        for arrived, _ in list(self._expected.values()):
            arrived.cancel()
        for session in self._sessions:
            await session.close()

    def post(self, receive: _Receive) -> None:
        """A new receive: the oldest message that waits for this tag meets it, whoever sent it."""
        waiting = next((message for message in self._unexpected if message.tag == receive.tag), None)
        if waiting is None:
            self._posted[receive.tag] = receive
            return
        self._unexpected.remove(waiting)
        self._match(waiting, receive)

    def arrive(self, message: _Message) -> None:
        receive = self._posted.pop(message.tag, None)
        if receive is None:
            self._unexpected.append(message)
        else:
            self._match(message, receive)

    def withdraw(self, receive: _Receive) -> bool:
        """False when it has met its message: then it cannot be withdrawn."""
        return self._posted.pop(receive.tag, None) is not None

    def drop(self, message: _Message) -> None:
        """Its sender has given it up while it waited."""
        if message in self._unexpected:
            self._unexpected.remove(message)

    def drop_waiting(self, sender: MemorySession) -> None:
        """Messages of a dead process that wait for a receive: the large ones are gone, the small ones stay."""
        self._unexpected = [
            message
            for message in self._unexpected
            if message.sender is not sender or message.source.size <= self.network.eager_bytes
        ]

    def forget(self, nonces: set[int]) -> None:
        """Drop and count what was sent to a session that is over."""
        kept = [message for message in self._unexpected if message.tag >> NUMBER_BITS not in nonces]
        self.stray_messages += len(self._unexpected) - len(kept)
        self._unexpected = kept

    def _match(self, message: _Message, receive: _Receive) -> None:
        message.receive = receive
        if message.source.size <= self.network.eager_bytes:
            message.wire.append(np.array(message.source))
            message.read_bytes = message.source.size
        self.network.moving.append(message)
        self.network.wake()

    def _stop_listening(self) -> None:
        self.network.listeners = {
            address: transport for address, transport in self.network.listeners.items() if transport is not self
        }
