"""D's end of the control plane: one dialled stream for each prefill node, kept up until told otherwise.

Must not know: sessions, transfers.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto
from typing import TypeAlias

import grpc

from foundation.ids import NodeId
from foundation.log import get_logger
from kv_transfer.control_stream import GRPC_OPTIONS, METHOD, WELCOME, ControlStream
from kv_transfer.protocol.events import DialRefused, MessageReceived, StreamLost, StreamOpened
from kv_transfer.protocol.messages import Envelope
from kv_transfer.pump import watched
from kv_transfer.wire import WireRefusal, read_envelope, write_envelope
from net.grpc_calls import end_call
from net.grpc_plane import IN_THE_CLEAR, GrpcPlane

log = get_logger()

SHORTEST_PAUSE_S = 0.05
LONGEST_PAUSE_S = 1.0

StreamEvent = StreamOpened | StreamLost | DialRefused | MessageReceived
Call: TypeAlias = "grpc.aio.StreamStreamCall[bytes, bytes]"


class _Answer(Enum):
    WELCOME = auto()
    REFUSAL = auto()
    SILENCE = auto()


@dataclass(slots=True)
class _Dialled:
    task: asyncio.Task[None] | None = None
    stream: ControlStream | None = None
    closing: bool = False


class ControlClient:
    """`refused(peer, reason)` counts messages that could not be read; each ends its stream."""

    def __init__(
        self,
        emit: Callable[[StreamEvent], None],
        refused: Callable[[NodeId, str], None],
        dial_limit_s: float,
        plane: GrpcPlane = IN_THE_CLEAR,
    ) -> None:
        self._emit = emit
        self._refused = refused
        self._dial_limit_s = dial_limit_s
        self._plane = plane
        self._dialled: dict[NodeId, _Dialled] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._last_dial_s: dict[NodeId, float] = {}

    def open(self, peer: NodeId, control_address: str) -> None:
        """Dial until a stream stands, and carry it until it breaks: `StreamOpened`, then `StreamLost`. `DialRefused` tells of
        each dial that was answered, but not by a prefill node."""
        assert peer not in self._dialled, f"the stream to {peer} is opened twice"
        dialled = self._dialled[peer] = _Dialled()
        dialled.task = watched(self._dial(peer, control_address, dialled))
        self._tasks.add(dialled.task)
        dialled.task.add_done_callback(self._tasks.discard)

    def send(self, peer: NodeId, envelope: Envelope) -> None:
        """Nothing is sent while no stream stands: the protocol says it again when one does."""
        dialled = self._dialled.get(peer)
        if dialled is not None and dialled.stream is not None:
            dialled.stream.send(write_envelope(envelope))

    def close(self, peer: NodeId) -> None:
        """End the stream after what was sent before, or stop dialling; no event of it follows."""
        dialled = self._dialled.pop(peer, None)
        if dialled is None:
            return
        dialled.closing = True
        if dialled.stream is not None:
            dialled.stream.finish()
        elif dialled.task is not None:
            dialled.task.cancel()

    async def close_all(self) -> None:
        for peer in list(self._dialled):
            self.close(peer)
        if self._tasks:
            await asyncio.wait(set(self._tasks))

    async def _dial(self, peer: NodeId, control_address: str, dialled: _Dialled) -> None:
        """`closing` is looked at after every wait: a cancellation that meets the end of a gRPC call can get lost in it."""
        pause_s = SHORTEST_PAUSE_S
        reason = None
        while reason is None:
            await self._pause(peer, pause_s)
            async with self._plane.channel(control_address, GRPC_OPTIONS) as channel:
                call: Call = channel.stream_stream(METHOD)()
                answer = await self._answer(peer, call)
                if answer is _Answer.WELCOME and not dialled.closing:
                    reason = await self._carry(peer, call, dialled)
                end_call(call)
            if answer is _Answer.REFUSAL and not dialled.closing:
                self._emit(DialRefused(peer, "dial_refused"))
            if dialled.closing:
                return
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
        log.warning("control stream ended", peer=peer, reason=reason)
        del self._dialled[peer]
        self._emit(StreamLost(peer, reason))

    async def _pause(self, peer: NodeId, pause_s: float) -> None:
        """A peer is dialled at most once in this time, however often its streams break."""
        now_s = asyncio.get_running_loop().time()
        wait_s = self._last_dial_s.get(peer, now_s - pause_s) + pause_s - now_s
        self._last_dial_s = {known: dial_s for known, dial_s in self._last_dial_s.items() if dial_s > now_s - 60}
        self._last_dial_s[peer] = now_s + max(0.0, wait_s)
        await asyncio.sleep(max(0.0, wait_s))

    async def _answer(self, peer: NodeId, call: Call) -> _Answer:
        """A servicer that runs at the other end welcomes us first of all; a failed call has metadata too, but not this."""
        try:
            async with asyncio.timeout(self._dial_limit_s):
                if WELCOME in tuple(await call.initial_metadata()):
                    return _Answer.WELCOME
                details = await call.details()
                reason = self._plane.why_lost(peer, await call.code(), details)
                log.info("dial refused", peer=peer, reason=reason, details=details)
                return _Answer.REFUSAL
        except TimeoutError:
            return _Answer.SILENCE
        except grpc.RpcError:
            return _Answer.REFUSAL

    async def _carry(self, peer: NodeId, call: Call, dialled: _Dialled) -> str:
        stream = dialled.stream = ControlStream(call, lambda raw: self._received(peer, raw), call.done_writing)
        try:
            self._emit(StreamOpened(peer, secrets.randbits(64) or 1))
            return await stream.run()
        finally:
            dialled.stream = None

    def _received(self, peer: NodeId, raw: bytes) -> str | None:
        envelope = read_envelope(raw)
        if isinstance(envelope, WireRefusal):
            self._refused(peer, envelope.reason)
            return envelope.reason
        self._emit(MessageReceived(peer, envelope))
        return None
