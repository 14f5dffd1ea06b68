"""A transport that is closed while sessions are being opened: everything ends, soon and with a reason."""

from __future__ import annotations

import asyncio
from collections import deque

import numpy as np
import pytest

from kv_transfer.transport.base import ReceiveFailed, Tag, TransportError
from kv_transfer.transport.contact import Contact
from kv_transfer.transport.rendezvous import read_call, welcome
from kv_transfer.transport.ucx import UcxSession, UcxTransport
from kv_transfer.transport.ucx_environment import ucx_environment
from kv_transfer.transport.ucx_worker import CANCELED

pytestmark = pytest.mark.sockets

SOON_S = 10.0
"""On a machine that keeps processes waiting: far less than a dial may take."""
DIAL_LIMIT_S = 60.0
TAG = Tag(0xABC)
CONNECTION_RESET = -25


@pytest.fixture(params=["tcp", "sm,self,tcp"])
def _lanes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in ucx_environment(request.param).items():
        monkeypatch.setenv(name, value)


def ignore(reason: str) -> None: ...


@pytest.mark.usefixtures("_lanes")
@pytest.mark.parametrize("dialler_closes", [True, False])
async def test_f30_a_dial_ends_with_either_transport_at_whatever_moment_that_is_closed(dialler_closes: bool) -> None:
    unhandled: list[dict[str, object]] = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: unhandled.append(context))
    others = asyncio.all_tasks()
    for turns in range(0, 80, 4):
        near, far = UcxTransport(), UcxTransport()
        arriving = far.expect(7, ignore)
        dialling = asyncio.create_task(near.dial(await far.listen("127.0.0.1", 0), 7, ignore, DIAL_LIMIT_S))
        for _ in range(turns):
            await asyncio.sleep(0)
        async with asyncio.timeout(SOON_S):
            for transport in (near, far) if dialler_closes else (far, near):
                await transport.close()
            for opened in await asyncio.gather(dialling, arriving, return_exceptions=True):
                assert isinstance(opened, UcxSession | TransportError | asyncio.CancelledError), opened
    assert not unhandled
    assert asyncio.all_tasks() == others


@pytest.mark.usefixtures("_lanes")
async def test_a_dial_says_that_its_own_side_has_ended() -> None:
    near = UcxTransport()
    called = asyncio.Event()

    async def say_nothing(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        called.set()
        await reader.read()
        writer.close()

    async with await asyncio.start_server(say_nothing, "127.0.0.1", 0) as server:
        address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
        dialling = asyncio.create_task(near.dial(address, 7, ignore, DIAL_LIMIT_S))
        await called.wait()
        async with asyncio.timeout(SOON_S):
            await near.close()
            with pytest.raises(TransportError, match="closed"):
                await dialling


@pytest.mark.usefixtures("_lanes")
@pytest.mark.parametrize("part", [slice(None, -9), slice(40), slice(7, None), slice(1)])
async def test_f17_a_contact_that_is_cut_off_never_reaches_ucx(part: slice) -> None:
    """Which would end this process."""
    near = UcxTransport()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_call(reader)
        welcome(writer, Contact(near.worker.address).to_bytes()[part])
        await reader.read()
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
        with pytest.raises(TransportError, match="garbage"):
            await near.dial(address, 7, ignore, DIAL_LIMIT_S)
    await near.close()


@pytest.mark.usefixtures("_lanes")
@pytest.mark.parametrize("endpoint_says_so", [True, False])
async def test_f31_a_session_says_that_its_endpoint_has_failed_before_what_that_ended(endpoint_says_so: bool) -> None:
    """Otherwise a transfer would be named after whichever receive ended first."""
    near, far = UcxTransport(), UcxTransport()
    told: list[object] = []
    arriving = far.expect(7, ignore)
    session = await near.dial(await far.listen("127.0.0.1", 0), 7, told.append, DIAL_LIMIT_S)
    await arriving
    assert isinstance(session, UcxSession)
    session.post_receive(TAG, np.zeros(8, np.uint8), told.append)
    failure = [(session._endpoint._number, CONNECTION_RESET, 0)] if endpoint_says_so else []
    near.worker._tell(deque([*failure, (session._receives[TAG].number, CANCELED, 0)]))
    assert told == ["endpoint_failed", ReceiveFailed(TAG, "canceled")]
    await near.close()
    await far.close()
    assert len(told) == 2
