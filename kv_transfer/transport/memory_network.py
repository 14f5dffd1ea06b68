"""What travels between the transports of `memory`, inside one process: deterministic, and harmed only by its script.

One fragment of each matched message moves in each turn of the event loop, unless the script holds it. What happens to bytes under
way when something dies depends on the lane:

    FENCED     (TCP, shared memory)  receives fail; bytes on the wire still land until this side's endpoint is destroyed
    READS      (receiver reads)      a matched receive completes by itself, whole, whatever became of the peer
    WRITES     (sender writes)       receives fail, and all the rest of the bytes lands afterwards

Must not know: parcels, digests, the protocol's states.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kv_transfer.transport.base import Bytes, Landed, Lane, ReceiveFailed, ReceiveOutcome, SendOutcome, Tag

if TYPE_CHECKING:
    from kv_transfer.transport.memory import MemorySession, MemoryTransport

FENCED = Lane("memory", receiver_reads=False, close_fences_receives=True)
READS = Lane("memory_receiver_reads", receiver_reads=True, close_fences_receives=False)
WRITES = Lane("memory_sender_writes", receiver_reads=False, close_fences_receives=False)


@dataclass(slots=True, eq=False)
class Receive:
    session: MemorySession
    tag: Tag
    buffer: Bytes
    done: Callable[[ReceiveOutcome], None]
    open: bool = True


@dataclass(slots=True, eq=False)
class Message:
    """`source` is the sender's own memory, read fragment by fragment; a copy for a small message."""

    sender: MemorySession
    tag: Tag
    source: Bytes
    done: Callable[[SendOutcome], None] | None
    receive: Receive | None = None
    read_bytes: int = 0
    landed_bytes: int = 0
    wire: deque[Bytes] = field(default_factory=deque)


class MemoryNetwork:
    """Where transports of one test meet, and the script that holds what they send."""

    def __init__(
        self, lane: Lane = FENCED, eager_bytes: int = 8192, fragment_bytes: int = 64 * 1024, wire_fragments: int = 4
    ) -> None:
        self.lane = lane
        self.eager_bytes = eager_bytes
        self.fragment_bytes = fragment_bytes
        self.wire_fragments = wire_fragments
        self.listeners: dict[str, MemoryTransport] = {}
        self.moving: list[Message] = []
        self._holds: dict[Tag, int] = {}
        self._turn_scheduled = False
        self._next_port = 1

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

    def _move(self, message: Message) -> bool:
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

    def _read(self, message: Message) -> bool:
        limit = min(message.source.size, self._holds.get(message.tag, message.source.size))
        end = min(message.read_bytes + self.fragment_bytes, limit)
        if end <= message.read_bytes or len(message.wire) >= self.wire_fragments or not self._source_moves(message):
            return False
        message.wire.append(message.source[message.read_bytes : end].copy())
        message.read_bytes = end
        if end == message.source.size:
            message.sender.sent(message)
        return True

    def _land(self, message: Message, receive: Receive) -> bool:
        if not message.wire or not self._sink_moves(receive):
            return False
        fragment = message.wire.popleft()
        room = receive.buffer[message.landed_bytes : message.landed_bytes + fragment.size]
        room[:] = fragment[: room.size]
        message.landed_bytes += fragment.size
        return True

    def _source_moves(self, message: Message) -> bool:
        if self.lane.close_fences_receives:
            receive = message.receive
            assert receive is not None
            return message.sender.running and receive.open and receive.session.running
        return True

    def _sink_moves(self, receive: Receive) -> bool:
        return receive.session.transport.running or not self.lane.close_fences_receives

    def _may_complete(self, message: Message, receive: Receive) -> bool:
        small = message.source.size <= self.eager_bytes
        return self.lane.receiver_reads or small or not receive.open or message.sender.transport.running


def _verdict(message: Message, receive: Receive) -> ReceiveOutcome:
    if message.source.size > receive.buffer.size:
        return ReceiveFailed(receive.tag, "message_truncated")
    return Landed(receive.tag)
