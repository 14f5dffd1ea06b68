"""Control streams are bounded and say why they end."""

from __future__ import annotations

import asyncio

import grpc

from kv_transfer.control_stream import ControlStream


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
