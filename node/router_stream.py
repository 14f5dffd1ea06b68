"""The Node service: one long-lived stream for each router, over which a node hears requests and tells tokens and load.

A router's attachment is its stream: requests that came over it are cancelled when it ends, or when nothing was heard on it
for the lease that the router named (a router that is cut off cannot say goodbye). A router that attaches again sends what
it still wants as a higher attempt. Several routers may be attached at once; none hears of another's requests.

Must not know: what a role does with a request.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Callable
from typing import Any, Protocol

import grpc
from decant_proto.v1 import node_pb2, node_pb2_grpc

from foundation.log import get_logger

HELLO_WITHIN_S = 5.0
SHORTEST_LEASE_S = 0.1
LONGEST_LEASE_S = 600.0
OUTBOX_LIMIT = 4096
"""Messages that may wait for one slow router; beyond it the router is detached, which cancels its requests."""
OUTBOX_FULL = "outbox_full"
MOST_ROUTERS = 64
STATUS_AT_MOST_EVERY_S = 0.05
DETAIL_AT_MOST_EVERY_S = 0.2
LONGEST_WATCH_S = 60.0

log = get_logger()


class Attachment:
    """One router's stream, as the role sees it: where answers to its requests go."""

    def __init__(self, router_id: str, lease_s: float) -> None:
        self.router_id = router_id
        self.lease_s = lease_s
        self.open = True
        self.watched_until = 0.0
        """On the loop's clock: so long this router wants to hear what the node does in detail."""
        self._outbox: asyncio.Queue[node_pb2.NodeMessage | None] = asyncio.Queue(OUTBOX_LIMIT)
        self.end_reason = ""

    def send(self, message: node_pb2.NodeMessage) -> None:
        """Never waits; a router that does not read its stream is detached when the outbox is full."""
        if not self.open:
            return
        if self._outbox.qsize() >= OUTBOX_LIMIT - 1:
            self.close(OUTBOX_FULL)
            return
        self._outbox.put_nowait(message)

    def close(self, reason: str) -> None:
        if self.open:
            self.open = False
            self.end_reason = reason
            self._outbox.put_nowait(None)

    async def messages(self) -> AsyncIterator[node_pb2.NodeMessage]:
        while (message := await self._outbox.get()) is not None:
            yield message


class RequestHandler(Protocol):
    """What a role does with a router's messages. Called on the asyncio thread; must not wait."""

    def submit(self, attachment: Attachment, message: node_pb2.Submit) -> None: ...

    def cancel(self, attachment: Attachment, message: node_pb2.Cancel) -> None: ...

    def detached(self, attachment: Attachment, reason: str) -> None:
        """The router is gone: cancel what it sent."""


class RouterStreams(node_pb2_grpc.NodeServicer):
    """`hello`, `status` and `detail` build the messages of the same name; `status` is asked for each push, `detail` only while
    some router watches."""

    def __init__(
        self,
        handler: RequestHandler,
        hello: node_pb2.NodeHello,
        status: Callable[[], node_pb2.NodeStatus],
        heartbeat_s: float,
        detail: Callable[[], node_pb2.NodeDetail] = node_pb2.NodeDetail,
    ) -> None:
        self._handler = handler
        self._detail = detail
        self._detail_sent_at = 0.0
        self._hello = hello
        self._status = status
        self._heartbeat_s = heartbeat_s
        self._attachments: set[Attachment] = set()
        self._status_changed = asyncio.Event()

    @property
    def routers(self) -> int:
        return len(self._attachments)

    def status_changed(self) -> None:
        """Load, readiness or epoch changed: tell the routers before the next heartbeat."""
        self._status_changed.set()

    async def push_status(self) -> None:
        """Runs for the node's life."""
        while True:
            try:
                async with asyncio.timeout(self._heartbeat_s):
                    await self._status_changed.wait()
            except TimeoutError:
                pass
            self._status_changed.clear()
            self._push()
            await asyncio.sleep(STATUS_AT_MOST_EVERY_S)

    def _push(self) -> None:
        if self._attachments:
            message = node_pb2.NodeMessage(status=self._status())
            for attachment in self._attachments:
                attachment.send(message)
            self._push_detail(asyncio.get_running_loop().time())

    def _push_detail(self, now: float) -> None:
        watching = [attachment for attachment in self._attachments if attachment.watched_until > now]
        if watching and now - self._detail_sent_at >= DETAIL_AT_MOST_EVERY_S:
            self._detail_sent_at = now
            message = node_pb2.NodeMessage(detail=self._detail())
            for attachment in watching:
                attachment.send(message)

    def close(self, reason: str) -> None:
        for attachment in tuple(self._attachments):
            attachment.close(reason)

    async def Attach(self, request_iterator: Any, context: Any) -> None:  # type: ignore[override]
        attachment = await self._hear_hello(context)
        self._attachments.add(attachment)
        log.info("router attached", router=attachment.router_id, lease_s=attachment.lease_s)
        attachment.send(node_pb2.NodeMessage(hello=self._hello))
        attachment.send(node_pb2.NodeMessage(status=self._status()))
        # A router that is cut off reads nothing: then a write waits, until the lease that the reader watches is over.
        reader = asyncio.create_task(self._read(attachment, context), name=f"read {attachment.router_id}")
        writer = asyncio.create_task(self._write(attachment, context), name=f"write {attachment.router_id}")
        try:
            await asyncio.wait((reader, writer), return_when=asyncio.FIRST_COMPLETED)
        finally:
            attachment.close("stream_ended")
            self._attachments.discard(attachment)
            reader.cancel()
            writer.cancel()
            log.info("router detached", router=attachment.router_id, reason=attachment.end_reason)
            self._handler.detached(attachment, attachment.end_reason)
        await asyncio.gather(reader, writer, return_exceptions=True)
        for task in (reader, writer):
            if not task.cancelled() and task.exception() is not None:  # a bug, of which the node's loop must hear
                asyncio.get_running_loop().call_soon(task.result)

    async def _hear_hello(self, context: Any) -> Attachment:
        try:
            async with asyncio.timeout(HELLO_WITHIN_S):
                first = await context.read()
        except TimeoutError:
            first = grpc.aio.EOF
        if first is grpc.aio.EOF or first.WhichOneof("message") != "hello":
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "the first message must be RouterHello")
        lease_s = first.hello.lease_ms / 1000
        if not first.hello.router_id or not SHORTEST_LEASE_S <= lease_s <= LONGEST_LEASE_S:
            await context.abort(
                grpc.StatusCode.INVALID_ARGUMENT,
                f"RouterHello needs a router_id and a lease_ms from {math.ceil(SHORTEST_LEASE_S * 1000)} "
                f"to {math.floor(LONGEST_LEASE_S * 1000)}",
            )
        if len(self._attachments) >= MOST_ROUTERS:
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, f"{MOST_ROUTERS} routers are attached already")
        return Attachment(first.hello.router_id, lease_s)

    async def _write(self, attachment: Attachment, context: Any) -> None:
        try:
            async for message in attachment.messages():
                await context.write(message)
        except (grpc.RpcError, grpc.aio.BaseError, asyncio.InvalidStateError):
            attachment.close("stream_broken")

    async def _read(self, attachment: Attachment, context: Any) -> None:
        reason = "stream_ended"
        try:
            while attachment.end_reason != OUTBOX_FULL:  # other ends still let the writer say what was said
                async with asyncio.timeout(attachment.lease_s):
                    message = await context.read()
                if message is grpc.aio.EOF:
                    break
                self._take(attachment, message)
        except TimeoutError:
            reason = "lease_lapsed"
        except (grpc.RpcError, grpc.aio.BaseError, asyncio.InvalidStateError):
            reason = "stream_broken"
        finally:
            attachment.close(reason)

    def _take(self, attachment: Attachment, message: node_pb2.RouterMessage) -> None:
        match message.WhichOneof("message"):
            case "submit":
                self._handler.submit(attachment, message.submit)
            case "cancel":
                self._handler.cancel(attachment, message.cancel)
            case "heartbeat":
                pass
            case "watch":
                watched_s = min(message.watch.for_ms / 1000, LONGEST_WATCH_S)
                attachment.watched_until = asyncio.get_running_loop().time() + watched_s
                self.status_changed()
            case other:
                log.warning("router message ignored", router=attachment.router_id, kind=other)
