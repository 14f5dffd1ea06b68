"""A model of the data plane inside one process, for tests: sessions and transports over a `memory_network`.

It does what UCX was seen to do, unpleasant as that is:

- matching is by tag for the whole transport; small messages nobody posted for are kept, outlive their sender, and meet any
  later receive with that tag; larger ones wait for their receive as long as the session lives;
- a matched receive cannot be cancelled;
- a send completes when its last bytes have left, not when they have landed;
- short messages land without saying so, longer ones than the buffer end as truncated while their sender sees success.

Must not know: parcels, digests, the protocol's states.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import TypeVar

import numpy as np

from kv_transfer.transport.base import (
    NUMBER_BITS,
    Bytes,
    CloseOutcome,
    DataSession,
    Fenced,
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
from kv_transfer.transport.memory_network import MemoryNetwork, Message, Receive

Told = TypeVar("Told")


class MemorySession:
    """See `base.DataSession`."""

    def __init__(self, transport: MemoryTransport, session: int, lost: LostCallback) -> None:
        self.session = session
        self.transport = transport
        self.peer: MemorySession | None = None
        self._lost: LostCallback | None = lost
        self._receives: dict[Tag, Receive] = {}
        self._sends: list[Message] = []
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
        self._receives[tag] = receive = Receive(self, tag, buffer, done)
        self._nonces.add(tag >> NUMBER_BITS)
        self.transport.post(receive)

    def cancel_unused(self, tag: Tag) -> None:
        receive = self._receives.get(tag)
        if receive is not None and self.transport.withdraw(receive):
            self.complete(receive, ReceiveCancelled(tag))

    def send(self, tag: Tag, buffer: Bytes, done: Callable[[SendOutcome], None]) -> None:
        assert not self._closed, f"session {self.session:#x} is closed"
        small = buffer.size <= self.transport.network.eager_bytes
        message = Message(self, tag, buffer.copy() if small else buffer, done)
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

    def complete(self, receive: Receive, outcome: ReceiveOutcome) -> None:
        """Tell the owner, once."""
        if receive.open:
            receive.open = False
            del self._receives[receive.tag]
            if isinstance(outcome, ReceiveFailed) and outcome.reason != "message_truncated" and not self.lane.fences:
                self._late.add(receive.tag)
            self.transport.tell(receive.done, outcome)
        self.settle()

    def sent(self, message: Message) -> None:
        if message in self._sends:
            self._sends.remove(message)
            assert message.done is not None
            self.transport.tell(message.done, Sent(message.tag))

    def _fail_send(self, message: Message, reason: str) -> None:
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
        self._posted: dict[Tag, Receive] = {}
        self._unexpected: list[Message] = []
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

    def post(self, receive: Receive) -> None:
        """A new receive: the oldest message that waits for this tag meets it, whoever sent it."""
        waiting = next((message for message in self._unexpected if message.tag == receive.tag), None)
        if waiting is None:
            self._posted[receive.tag] = receive
            return
        self._unexpected.remove(waiting)
        self._match(waiting, receive)

    def arrive(self, message: Message) -> None:
        receive = self._posted.pop(message.tag, None)
        if receive is None:
            self._unexpected.append(message)
        else:
            self._match(message, receive)

    def withdraw(self, receive: Receive) -> bool:
        """False when it has met its message: then it cannot be withdrawn."""
        return self._posted.pop(receive.tag, None) is not None

    def drop(self, message: Message) -> None:
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

    def _match(self, message: Message, receive: Receive) -> None:
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
