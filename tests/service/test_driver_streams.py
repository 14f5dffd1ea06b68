"""Control streams are bounded and say why they end."""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import grpc
import pytest
from control_server_process import TALKS_FOR_S
from driver_pair import FINGERPRINT, WHOLE, until

from foundation.ids import Incarnation, NodeId
from kv_transfer import control_stream
from kv_transfer.control_client import SHORTEST_PAUSE_S, ControlClient
from kv_transfer.control_stream import ControlStream
from kv_transfer.digest import KIND
from kv_transfer.protocol.events import DialRefused, MessageReceived, StreamOpened
from kv_transfer.protocol.messages import Envelope, Heartbeat, Hello

pytestmark = pytest.mark.sockets

HELLO = Hello(NodeId("d0"), 1, 0, FINGERPRINT, WHOLE, 16 << 10, 0.1, "", 77, KIND)


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


async def test_f02_finishing_does_not_wait_for_a_peer_that_reads_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stopped peer's connection was kept for as long as it was stopped, one more with every session."""
    monkeypatch.setattr(control_stream, "FAREWELL_S", 0.05)
    stream = ControlStream(StuckPeer(), lambda raw: None)
    running = asyncio.create_task(stream.run())
    stream.send(b"x")
    stream.finish()
    async with asyncio.timeout(5):
        assert await running == "unread"


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

    async def _answer(self, peer: NodeId, call: object) -> Any:
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.sleep(30)


async def test_a_closed_dialler_ends_and_says_nothing_even_when_its_cancellation_is_lost() -> None:
    events: list[object] = []
    client = DeafToCancellation(events.append, lambda peer, reason: None, 1.0)
    client.open(NodeId("p0"), "127.0.0.1:1")
    await asyncio.sleep(0.01)
    async with asyncio.timeout(5):
        await client.close_all()
    assert events == []


async def test_f06_a_refused_dial_is_told_at_once_and_tried_again_with_growing_pauses_until_closed() -> None:
    events: list[object] = []
    loop = asyncio.get_running_loop()
    lost_s: list[float] = []

    def emit(event: object) -> None:
        events.append(event)
        lost_s.append(loop.time())

    client = ControlClient(emit, lambda peer, reason: None, 60.0)
    opened_s = loop.time()
    client.open(NodeId("p0"), "127.0.0.1:1")
    async with asyncio.timeout(10):
        while len(events) < 4:
            await asyncio.sleep(0.01)
    await client.close_all()
    assert events[:4] == [DialRefused(NodeId("p0"), "dial_refused")] * 4
    assert lost_s[0] - opened_s < 10.0, "not when its limit is over"
    assert lost_s[3] - lost_s[2] >= 4 * SHORTEST_PAUSE_S


def open_sockets() -> int:
    found = 0
    for link in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed since it was listed
            found += str(link.readlink()).startswith("socket:")
    return found


async def test_f30_a_stream_that_ended_while_this_process_was_stopped_leaves_no_connection() -> None:
    """Each one left a socket on both sides: a write had failed, and what the peer had said last was never read."""
    program = Path(__file__).with_name("control_server_process.py")
    server = await asyncio.create_subprocess_exec(
        sys.executable, str(program), stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert server.stdout is not None
    address = f"127.0.0.1:{(await server.stdout.readline()).decode().strip()}"
    events: list[object] = []
    client, peer = ControlClient(events.append, lambda peer, reason: None, 5.0), NodeId("p0")

    def say(message: Hello | Heartbeat) -> None:
        client.send(peer, Envelope(Incarnation(1), Incarnation(2), message))

    async def one_stream() -> None:
        events.clear()
        client.open(peer, address)
        await until(lambda: any(isinstance(event, StreamOpened) for event in events))
        say(HELLO)
        await until(lambda: any(isinstance(event, MessageReceived) for event in events))
        time.sleep(2 * TALKS_FOR_S)  # noqa: ASYNC251 - this process is stopped
        say(Heartbeat(1, True, ()))
        await asyncio.sleep(0)  # the write begins, and will fail
        client.close(peer)
        await until(lambda: not client._tasks)

    try:
        await one_stream()
        before = open_sockets()
        for _ in range(3):
            await one_stream()
        await until(lambda: open_sockets() <= before)
    finally:
        await client.close_all()
        server.kill()
        await server.wait()
