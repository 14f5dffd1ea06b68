"""A peer whose data port answers and whose UCX does not: a firewall stands between, or its process has just died."""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractContextManager, asynccontextmanager, contextmanager
from pathlib import Path

import pytest
from far_side_process import open_sockets
from transport_worlds import UcxWorld

from kv_transfer.transport.base import TransportError
from kv_transfer.transport.contact import Contact
from kv_transfer.transport.rendezvous import read_call, welcome
from kv_transfer.transport.ucx import UcxTransport

pytestmark = pytest.mark.sockets

ROUNDS = 3
LISTENING = "0A"
LONGEST_STANDSTILL_S = 10.0
"""This process may itself be kept waiting; a connect that blocks waits for minutes."""


@pytest.fixture
async def near() -> AsyncIterator[UcxTransport]:
    transport = UcxWorld("tcp", frozenset({"tcp"})).near
    assert isinstance(transport, UcxTransport)
    yield transport
    await transport.close()


@contextmanager
def refusing_port() -> Iterator[int]:
    with socket.socket() as taken:
        taken.bind(("0.0.0.0", 0))
        yield taken.getsockname()[1]


@contextmanager
def silent_port() -> Iterator[int]:
    """Its backlog is full: the kernel drops what else would connect."""
    with socket.socket() as full:
        full.bind(("0.0.0.0", 0))
        full.listen(0)
        port = full.getsockname()[1]
        waiting = [socket.socket() for _ in range(4)]
        for caller in waiting:
            caller.setblocking(False)
            caller.connect_ex(("127.0.0.1", port))
        yield port
        for caller in waiting:
            caller.close()


def ucx_ports() -> set[int]:
    """On which this process listens."""
    own = {str(link.readlink()) for link in Path("/proc/self/fd").iterdir() if link.is_symlink()}
    rows = [line.split() for line in Path("/proc/self/net/tcp").read_text().splitlines()[1:]]
    return {int(row[1].partition(":")[2], 16) for row in rows if row[3] == LISTENING and f"socket:[{row[9]}]" in own}


@asynccontextmanager
async def peer_with_ucx_at(port: int, near: UcxTransport) -> AsyncIterator[str]:
    """The data address of a fake peer that is called properly and whose worker's address leads to `port`."""
    worker_address = near.worker.address
    for listens in ucx_ports():
        worker_address = worker_address.replace(struct.pack("!H", listens), struct.pack("!H", port))
    assert worker_address != near.worker.address

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_call(reader)
        welcome(writer, Contact(worker_address).to_bytes())
        await reader.read()
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with server:
        yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}"


async def longest_standstill_s(during: asyncio.Task[None]) -> float:
    """For how long at most the event loop did nothing else."""
    loop, longest_s = asyncio.get_running_loop(), 0.0
    while not during.done():
        before_s = loop.time()
        await asyncio.sleep(0.005)
        longest_s = max(longest_s, loop.time() - before_s)
    return longest_s


async def dial_in_vain(near: UcxTransport, address: str, reason: str) -> None:
    for session in range(1, 1 + ROUNDS):
        with pytest.raises(TransportError, match=reason):
            await near.dial(address, session, lambda lost: None, 0.3)


@pytest.mark.parametrize(("bad_port", "reason"), [(refusing_port, "unreachable"), (silent_port, "dial_timeout")])
async def test_f25_a_peer_whose_ucx_is_out_of_reach_is_given_up_without_a_standstill_or_a_socket_left(
    near: UcxTransport, bad_port: Callable[[], AbstractContextManager[int]], reason: str
) -> None:
    with bad_port() as port:
        async with peer_with_ucx_at(port, near) as address:
            before = open_sockets()
            dialling = asyncio.create_task(dial_in_vain(near, address, reason))
            assert await longest_standstill_s(dialling) < LONGEST_STANDSTILL_S
            await dialling
            async with asyncio.timeout(20):
                while open_sockets() > before:
                    await asyncio.sleep(0.01)
