"""One control stream between two nodes, from either end: whole messages, in order, through bounded queues.

Bytes go in and out; `kv_transfer.wire` gives them meaning. A stream that cannot keep up is ended, never silently thinned:
what the peer does not read within `queue_limit` messages is the end of the stream, and the protocol then knows.

Must not know: what messages mean, sessions, transfers.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Protocol

import grpc

METHOD = "/decant.v1.KvTransfer/Session"
SERVICE = "decant.v1.KvTransfer"
WELCOME = ("decant-control", "welcome")
"""Initial metadata of P: the stream was accepted, and is not just a call that failed early."""
QUEUE_LIMIT = 4096
"""Messages that wait for the peer to read; one Ask of a long prompt is the largest of them."""
LARGEST_MESSAGE_BYTES = 16 << 20
FAREWELL_S = 1.0
"""How long a stream may take to end in good order, once we have said our last: to be read by the peer, and to be ended by it."""

GRPC_OPTIONS = (
    ("grpc.max_receive_message_length", LARGEST_MESSAGE_BYTES),
    ("grpc.max_send_message_length", LARGEST_MESSAGE_BYTES),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1000),
    ("grpc.enable_retries", 0),
    ("grpc.use_local_subchannel_pool", 1),
)


class Duplex(Protocol):
    """What a gRPC call looks like from either end."""

    def read(self) -> Awaitable[object]:
        """The next message as bytes, or grpc.aio.EOF."""

    def write(self, message: bytes) -> Awaitable[object]: ...


class ControlStream:
    """`run` carries messages until either side ends the stream, and says why it ended."""

    def __init__(
        self,
        duplex: Duplex,
        received: Callable[[bytes], str | None],
        half_close: Callable[[], Awaitable[None]] | None = None,
        queue_limit: int = QUEUE_LIMIT,
    ) -> None:
        """`received` gets each message and returns None, or the reason why the stream must end. A dialling end says with
        `half_close` that it has written its last message; a serving end just returns."""
        self._duplex = duplex
        self._received = received
        self._half_close = half_close
        self._outgoing: asyncio.Queue[bytes | None] = asyncio.Queue(queue_limit)
        self._ended: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._finishing = False

    def send(self, message: bytes) -> None:
        """Queue a message behind those before it; returns at once."""
        self._put(message)

    def finish(self) -> None:
        """End the stream after what was sent before, or after `FAREWELL_S`: a peer that is stopped reads nothing. Nothing more is
        received."""
        self._finishing = True
        self._put(None)
        asyncio.get_running_loop().call_later(FAREWELL_S, self.end, "unread")

    def end(self, reason: str) -> None:
        """End the stream now; what is still queued is lost."""
        if not self._ended.done():
            self._ended.set_result(reason)

    def _put(self, item: bytes | None) -> None:
        try:
            self._outgoing.put_nowait(item)
        except asyncio.QueueFull:
            self.end("control_queue_full")

    async def run(self) -> str:
        reading, writing = asyncio.create_task(self._read()), asyncio.create_task(self._write())
        try:
            await asyncio.wait({reading, writing, self._ended}, return_when=asyncio.FIRST_COMPLETED)
            if self._finishing and writing.done() and self._half_close:
                await asyncio.wait({reading, self._ended}, return_when=asyncio.FIRST_COMPLETED)
            return next(task.result() for task in (self._ended, writing, reading) if task.done())
        finally:
            for task in (reading, writing):
                task.cancel()
            await asyncio.gather(reading, writing, return_exceptions=True)

    async def _read(self) -> str:
        try:
            while isinstance(message := await self._duplex.read(), bytes):
                if not self._finishing and (refusal := self._received(message)):
                    return refusal
        except (grpc.RpcError, grpc.aio.BaseError, asyncio.InvalidStateError) as error:
            return _name(error)
        return "closed_by_peer"

    async def _write(self) -> str:
        try:
            while (message := await self._outgoing.get()) is not None:
                await self._duplex.write(message)
            if self._half_close:
                await self._half_close()
        except (grpc.RpcError, grpc.aio.BaseError, asyncio.InvalidStateError) as error:
            return _name(error)
        return "finished"


def _name(error: BaseException) -> str:
    if isinstance(error, grpc.aio.AioRpcError):
        return f"stream_{error.code().name.lower()}"
    return "stream_broken"
