"""Control streams are bounded and say why they end."""

from __future__ import annotations

import asyncio
import contextlib

import grpc
import pytest

from foundation.ids import NodeId
from kv_transfer.control_client import SHORTEST_PAUSE_S, ControlClient
from kv_transfer.control_stream import ControlStream
from kv_transfer.protocol.events import StreamLost

pytestmark = pytest.mark.sockets


class StuckPeer:
    """A fake call whose peer never reads and never speaks."""

    async def read(self) -> object:
        await asyncio.Event().wait()
        return grpc.aio.EOF

    async def write(self, message: bytes) -> None:
        await asyncio.Event().wait()


class OpenPeer:
    """A fake call that keeps what is written, and speaks from a queue."""

    def __init__(self) -> None:
        self.written: list[bytes] = []
        self.incoming: asyncio.Queue[object] = asyncio.Queue()

    async def read(self) -> object:
        return await self.incoming.get()

    async def write(self, message: bytes) -> None:
        self.written.append(message)


async def test_a_peer_that_does_not_read_ends_the_stream_by_name_and_not_the_memory() -> None:
    stream = ControlStream(StuckPeer(), lambda raw: None, queue_limit=10)
    running = asyncio.create_task(stream.run())
    await asyncio.sleep(0)
    for _ in range(12):
        stream.send(b"x")
    async with asyncio.timeout(5):
        assert await running == "control_queue_full"


async def test_finish_writes_all_that_was_sent_before_and_hears_nothing_more() -> None:
    peer, heard, half_closed = OpenPeer(), [], asyncio.Event()

    async def half_close() -> None:
        half_closed.set()
        peer.incoming.put_nowait(b"late")
        peer.incoming.put_nowait(grpc.aio.EOF)

    def received(raw: bytes) -> None:
        heard.append(raw)

    stream = ControlStream(peer, received, half_close)
    for number in range(100):
        stream.send(b"%d" % number)
    stream.finish()
    async with asyncio.timeout(5):
        assert await stream.run() == "finished"
    assert peer.written == [b"%d" % number for number in range(100)]
    assert half_closed.is_set()
    assert heard == []


async def test_a_message_that_is_refused_ends_the_stream_with_that_reason() -> None:
    peer = OpenPeer()
    peer.incoming.put_nowait(b"bad")
    stream = ControlStream(peer, lambda raw: "field_out_of_range")
    async with asyncio.timeout(5):
        assert await stream.run() == "field_out_of_range"


class DeafToCancellation(ControlClient):
    """A cancellation that meets the end of a gRPC call can get lost in it; here it always does."""

    async def _accepted(self, call: object) -> bool:
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.sleep(30)
        return False


async def test_a_closed_dialler_ends_and_says_nothing_even_when_its_cancellation_is_lost() -> None:
    events: list[object] = []
    client = DeafToCancellation(events.append, lambda peer, reason: None, 1.0)
    client.open(NodeId("p0"), "127.0.0.1:1")
    await asyncio.sleep(0.01)
    async with asyncio.timeout(5):
        await client.close_all()
    assert events == []


async def test_a_peer_that_is_not_there_is_dialled_again_with_growing_pauses_until_closed() -> None:
    events: list[object] = []
    loop = asyncio.get_running_loop()
    lost_s: list[float] = []

    def emit(event: object) -> None:
        events.append(event)
        lost_s.append(loop.time())

    client = ControlClient(emit, lambda peer, reason: None, 1.0)
    client.open(NodeId("p0"), "127.0.0.1:1")
    async with asyncio.timeout(10):
        while len(events) < 4:
            await asyncio.sleep(0.01)
    await client.close_all()
    assert events[:4] == [StreamLost(NodeId("p0"), "unreachable")] * 4
    assert lost_s[3] - lost_s[2] >= 4 * SHORTEST_PAUSE_S
