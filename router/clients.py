"""One multiplexed stream between this router and one node, dialled again whenever it breaks, with bounded backoff.

All attempts on the node share the stream: submissions and cancels go out, one message a step comes back. When the stream ends,
for whatever reason, every attempt on it is lost at once and `journey` decides; nothing is resumed on a new stream, for tokens
may have been lost between the two. The node's lease ends what it still computes for us.

Must not know: what an answer is for, texts, HTTP.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import grpc.aio
from decant_proto.v1 import node_pb2, node_pb2_grpc, types_pb2

from foundation.background import Background, end
from foundation.fingerprint import Fingerprint
from foundation.ids import Incarnation, NodeId
from foundation.log import get_logger
from foundation.registry_entry import NodeEntry, Role
from foundation.ticket import digest_of_fingerprint
from net.grpc_calls import end_call
from net.grpc_plane import IN_THE_CLEAR, GrpcPlane
from router.health import LinkState, NodeHealth, Status

log = get_logger()

LARGEST_MESSAGE_BYTES = 64 * 2**20
OUTGOING_LIMIT = 8192
"""Messages that may wait for the node to read them; a node that lets more pile up is given up."""
FIRST_BACKOFF_S = 0.05
LONGEST_BACKOFF_S = 1.0
CHANNEL_OPTIONS = (
    ("grpc.max_receive_message_length", LARGEST_MESSAGE_BYTES),
    ("grpc.max_send_message_length", LARGEST_MESSAGE_BYTES),
    # Each stream dials for itself, so that the library's own long backoff never stands in the way.
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.initial_reconnect_backoff_ms", 50),
    ("grpc.min_reconnect_backoff_ms", 50),
    ("grpc.max_reconnect_backoff_ms", 500),
)
_ROLES = {types_pb2.ROLE_PREFILL: Role.PREFILL, types_pb2.ROLE_DECODE: Role.DECODE}


class LinkListener(Protocol):
    """What links tell the fleet. Nothing here waits."""

    def link_changed(self, link: NodeLink) -> None:
        """State, status or hello changed: placement may see it differently now."""

    def link_reported(self, link: NodeLink) -> None:
        """The node has told its status, as it does with every heartbeat and when its load changes."""

    def link_lost(self, link: NodeLink, reason: str) -> None:
        """Every attempt on this link is lost."""

    def outputs(self, link: NodeLink, outputs: node_pb2.StepOutput) -> None: ...


@dataclass(frozen=True, slots=True)
class LinkTiming:
    silence_limit_s: float
    heartbeat_s: float

    @property
    def tick_s(self) -> float:
        return min(self.heartbeat_s, self.silence_limit_s / 8)


@dataclass(frozen=True, slots=True)
class Hello:
    """What the node said of itself when the stream began."""

    incarnation: Incarnation
    fingerprint: Fingerprint
    fingerprint_digest: bytes
    model_id: str
    max_model_len: int
    block_size: int
    kv_bytes_per_token: int
    max_num_seqs: int
    """Sequences that its engine decodes at once; 0: it does not say."""
    max_num_batched_tokens: int
    """Most tokens of one step; 0: it does not say."""


class HelloRefused(Exception):
    """What answers under this address is not the node that the registry names."""


class NodeLink:
    """`start` once, `close` once. `send` never waits."""

    def __init__(
        self,
        entry: NodeEntry,
        router_id: str,
        timing: LinkTiming,
        listener: LinkListener,
        now: Callable[[], float],
        plane: GrpcPlane = IN_THE_CLEAR,
    ) -> None:
        self.entry = entry
        self.health = NodeHealth(timing.silence_limit_s)
        self.hello: Hello | None = None
        self.attempts: set[str] = set()
        """Ids of the requests whose current attempt is on this node (decode nodes only)."""
        self.detail: node_pb2.NodeDetail | None = None
        """What the node said last when it was watched, and when that was."""
        self.detail_s = 0.0
        self.pending_prompts = 0
        self.pending_tokens = 0
        """Prompts sent here to be computed whose first token has not been seen: the node's status may not count them yet."""
        self._router_id = router_id
        self._timing = timing
        self._listener = listener
        self._now = now
        self._plane = plane
        self._outgoing: deque[node_pb2.RouterMessage] = deque()
        self._wake = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._end_reason: str | None = None
        self._stream_task: asyncio.Task[str] | None = None

    @property
    def node_id(self) -> NodeId:
        return self.entry.node_id

    @property
    def usable(self) -> bool:
        return self.health.refusal(self._now()) is None

    def start(self, background: Background) -> None:
        assert self._task is None
        self._task = background.start(self._keep_connected(), f"link {self.node_id}")

    async def close(self) -> None:
        await end(self._task)

    def send(self, message: node_pb2.RouterMessage) -> bool:
        """False when there is no stream to send on; then nothing was sent."""
        if self.health.state not in (LinkState.READY, LinkState.SUSPECT):
            return False
        if len(self._outgoing) >= OUTGOING_LIMIT:
            self.give_up("node_does_not_read")
            return False
        self._outgoing.append(message)
        self._wake.set()
        return True

    def give_up(self, reason: str) -> None:
        """End the present stream; the node is dialled again."""
        self._end_reason = self._end_reason or reason
        self.health.broken()
        if self._stream_task is not None:
            self._stream_task.cancel()

    async def _keep_connected(self) -> None:
        backoff_s = FIRST_BACKOFF_S
        while True:
            self.health.dialling()
            self._end_reason = None
            self._outgoing.clear()
            self._stream_task = asyncio.create_task(self._one_stream(), name=f"stream {self.node_id}")
            try:
                await asyncio.wait((self._stream_task,))
            finally:
                # Also when this link is being closed.
                self._stream_task.cancel()
                await asyncio.wait((self._stream_task,))
            was_connected = self.health.state is not LinkState.CONNECTING
            reason = self._end_reason or _outcome(self.node_id, self._stream_task)
            self.health.broken()
            self._ended(reason, was_connected)
            backoff_s = FIRST_BACKOFF_S if was_connected else min(2 * backoff_s, LONGEST_BACKOFF_S)
            await asyncio.sleep(backoff_s)

    def _ended(self, reason: str, was_connected: bool) -> None:
        if was_connected:
            log.warning("node lost", node=self.node_id, reason=reason, attempts=len(self.attempts))
            self._listener.link_lost(self, reason)
            self._listener.link_changed(self)
        else:
            log.debug("node not reached", node=self.node_id, address=self.entry.control_address, reason=reason)

    async def _one_stream(self) -> str:
        """Runs one stream to its end; why it ended."""
        async with self._plane.channel(self.entry.control_address, CHANNEL_OPTIONS) as channel:
            call = node_pb2_grpc.NodeStub(channel).Attach()
            companions = Background(self._companion_failed)
            try:
                lease_ms = round(self._timing.silence_limit_s * 1000)
                await call.write(
                    node_pb2.RouterMessage(hello=node_pb2.RouterHello(router_id=self._router_id, lease_ms=lease_ms))
                )
                first = await asyncio.wait_for(call.read(), self._timing.silence_limit_s)
                if not isinstance(first, node_pb2.NodeMessage):
                    return "stream_ended"
                self._take_hello(first)
                companions.start(self._write(call), f"writer {self.node_id}")
                companions.start(self._watch(), f"watch {self.node_id}")
                await self._read(call)
            except grpc.aio.AioRpcError as error:
                return self._plane.why_lost(self.node_id, error.code(), error.details())
            except TimeoutError:
                return "silent_at_hello"
            except HelloRefused as refusal:
                log.warning("node refused", node=self.node_id, reason=str(refusal))
                return "wrong_node"
            finally:
                end_call(call)
                await companions.close()
        return "stream_ended"

    def _companion_failed(self, error: BaseException) -> None:
        """Without its writer or its watch a stream would look alive, and nothing would be said, or no silence noticed."""
        self.give_up(_failure(self.node_id, error))

    def _take_hello(self, message: node_pb2.NodeMessage) -> None:
        if not message.HasField("hello"):
            raise HelloRefused(f"the first message was {message.WhichOneof('message')}, not hello")
        hello, entry = message.hello, message.hello.entry
        if entry.node_id != self.node_id or _ROLES.get(entry.role) is not self.entry.role:
            raise HelloRefused(f"{self.entry.control_address} is {entry.node_id!r}, not {self.node_id!r}")
        # The registry may still name the node's former life, or already a later one: what the stream says is true of it.
        fingerprint = _fingerprint(hello.fingerprint)
        self.hello = Hello(
            Incarnation(entry.incarnation),
            fingerprint,
            digest_of_fingerprint(fingerprint),
            hello.model_id,
            hello.max_model_len,
            hello.block_size,
            hello.kv_bytes_per_token,
            hello.max_num_seqs,
            hello.max_num_batched_tokens,
        )
        self.health.connected(self._now(), hello.step_limit_ms / 1000)
        log.info("node connected", node=self.node_id, peer_incarnation=f"{entry.incarnation:016x}")
        self._listener.link_changed(self)

    async def _read(self, call: grpc.aio.StreamStreamCall[node_pb2.RouterMessage, node_pb2.NodeMessage]) -> None:
        while True:
            message = await call.read()
            if not isinstance(message, node_pb2.NodeMessage):
                return
            match message.WhichOneof("message"):
                case "step":
                    was_suspect = self.health.state is LinkState.SUSPECT
                    self.health.heard(self._now())
                    if was_suspect:
                        self._listener.link_changed(self)
                    self._listener.outputs(self, message.step)
                case "status":
                    before = self.usable
                    self.health.reported(_status(message.status), self._now())
                    if self.usable and not before:
                        self._listener.link_changed(self)
                    self._listener.link_reported(self)
                case "detail":
                    self.health.heard(self._now())
                    self.detail, self.detail_s = message.detail, self._now()
                case "hello" | None:
                    self.health.heard(self._now())

    async def _write(self, call: grpc.aio.StreamStreamCall[node_pb2.RouterMessage, node_pb2.NodeMessage]) -> None:
        try:
            while True:
                while self._outgoing:
                    await call.write(self._outgoing.popleft())
                self._wake.clear()
                await self._wake.wait()
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
            return  # the reader learns why

    async def _watch(self) -> None:
        """Sends heartbeats, and ends the stream when the node is silent or stalled."""
        next_heartbeat_s = last_tick_s = self._now()
        while True:
            now_s = self._now()
            since_tick_s, last_tick_s = now_s - last_tick_s, now_s
            if since_tick_s >= self._timing.silence_limit_s / 2:  # this process itself was stopped
                self.health.not_watched(since_tick_s, self._timing.heartbeat_s, now_s)
            if now_s >= next_heartbeat_s:
                self.send(node_pb2.RouterMessage(heartbeat=node_pb2.RouterHeartbeat()))
                next_heartbeat_s = now_s + self._timing.heartbeat_s
            self.health.tick(now_s)
            if self.health.state is LinkState.LOST:
                self.give_up("node_silent")
            elif self.attempts and self.health.stalled(now_s):
                # It speaks, so the stream stays; its requests go elsewhere.
                self._listener.link_lost(self, "node_stalled")
            await asyncio.sleep(self._timing.tick_s)


def _outcome(node: NodeId, task: asyncio.Task[str]) -> str:
    if task.cancelled():
        return "cancelled"
    error = task.exception()
    return task.result() if error is None else _failure(node, error)


def _failure(node: NodeId, error: BaseException) -> str:
    """A bug of ours on one stream: told with its traceback, and the stream is begun again."""
    log.error("link failed", node=node, exc_info=error)
    return f"link_{type(error).__name__}"


def _fingerprint(message: types_pb2.Fingerprint) -> Fingerprint:
    return Fingerprint(
        message.weights,
        message.architecture,
        message.tokenizer,
        message.vocabulary_size,
        message.kv_dtype,
        message.quantization,
        message.rope,
        message.protocol_major,
    )


def _status(message: node_pb2.NodeStatus) -> Status:
    return Status(
        ready=message.ready,
        not_ready_reasons=tuple(message.not_ready_reasons),
        draining=message.draining,
        running=message.running,
        waiting=message.waiting,
        queued_tokens=message.queued_tokens,
        engine_steps=message.engine_steps,
        has_work=message.has_work,
        blocks_total=message.blocks_total,
        blocks_free=message.blocks_free,
        epoch=message.epoch,
        tokens_per_second=message.prompt_tokens_per_second,
        lanes={NodeId(lane.node_id): lane.bytes_per_second for lane in message.lanes},
        serves_alone=message.serves_alone,
        broken_lanes=frozenset(map(NodeId, message.broken_lanes)),
    )
