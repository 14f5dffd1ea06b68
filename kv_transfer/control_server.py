"""P's end of the control plane: the service that decode nodes dial. The first message must be a Hello, which names the peer;
a newer stream of the same node replaces the older one.

Must not know: sessions, transfers.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeAlias

import grpc

from foundation.ids import NodeId
from foundation.log import get_logger
from kv_transfer.control_stream import FAREWELL_S, SERVICE, WELCOME, ControlStream
from kv_transfer.protocol.events import StreamLost, StreamOpened
from kv_transfer.protocol.messages import Envelope, Hello
from kv_transfer.wire import WireRefusal, read_envelope, write_envelope

log = get_logger()

STREAM_LIMIT = 256
"""Decode nodes at once; beyond it a stream is refused with RESOURCE_EXHAUSTED."""

Context: TypeAlias = "grpc.aio.ServicerContext[bytes, bytes]"
Handler: TypeAlias = "grpc.RpcMethodHandler[bytes, bytes]"


class ControlServer:
    """`receive` feeds the protocol; `refused(peer, reason)` counts messages that could not be read."""

    def __init__(
        self,
        emit: Callable[[StreamOpened | StreamLost], None],
        receive: Callable[[NodeId, Envelope], None],
        refused: Callable[[NodeId, str], None],
        hello_limit_s: float,
    ) -> None:
        self._emit = emit
        self._receive = receive
        self._refused = refused
        self._hello_limit_s = hello_limit_s
        self._streams: dict[NodeId, ControlStream] = {}
        self._handlers: set[asyncio.Task[None]] = set()

    def register(self, server: grpc.aio.Server) -> None:
        """Add decant.v1.KvTransfer to a gRPC server, before it starts. Messages stay bytes: reading them is ours."""
        handler: Handler = grpc.stream_stream_rpc_method_handler(self._session)
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, {"Session": handler}),))

    def send(self, peer: NodeId, envelope: Envelope) -> None:
        """Nothing is sent while no stream stands: the protocol says it again when one does."""
        if stream := self._streams.get(peer):
            stream.send(write_envelope(envelope))

    def close(self, peer: NodeId) -> None:
        """End the stream after what was sent before; no event of it follows."""
        if stream := self._streams.pop(peer, None):
            stream.finish()

    async def close_all(self) -> None:
        """End every stream; returns when what was sent before has been written, or after a bounded while."""
        for peer in list(self._streams):
            self.close(peer)
        if self._handlers:
            await asyncio.wait(set(self._handlers), timeout=FAREWELL_S)

    async def _session(self, _requests: object, context: Context) -> None:
        if len(self._handlers) >= STREAM_LIMIT:
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, f"{STREAM_LIMIT} decode nodes are connected")
        handler = asyncio.current_task()
        assert handler is not None
        self._handlers.add(handler)
        try:
            await context.send_initial_metadata((WELCOME,))
            await self._carry(context)
        finally:
            self._handlers.discard(handler)

    async def _carry(self, context: Context) -> None:
        try:
            async with asyncio.timeout(self._hello_limit_s):
                raw = await context.read()
        except TimeoutError:
            return
        first = read_envelope(raw) if isinstance(raw, bytes) else WireRefusal("no_hello", "")
        if isinstance(first, WireRefusal) or not isinstance(first.message, Hello):
            self._refused(NodeId(context.peer()), first.reason if isinstance(first, WireRefusal) else "no_hello")
            return
        peer = first.message.node_id
        stream = ControlStream(context, lambda raw: self._received(peer, raw))
        if older := self._streams.get(peer):
            older.end("replaced")
            self._emit(StreamLost(peer, "replaced"))
        self._streams[peer] = stream
        reason = "stream_cancelled"
        try:
            self._emit(StreamOpened(peer, 0))
            self._receive(peer, first)
            reason = await stream.run()
        finally:
            if self._streams.get(peer) is stream:
                log.warning("control stream ended", peer=peer, reason=reason)
                del self._streams[peer]
                self._emit(StreamLost(peer, reason))

    def _received(self, peer: NodeId, raw: bytes) -> str | None:
        envelope = read_envelope(raw)
        if isinstance(envelope, WireRefusal):
            self._refused(peer, envelope.reason)
            return envelope.reason
        self._receive(peer, envelope)
        return None
