"""However a session ends, and whichever of its two ends knows of it first, no socket of it stays open on either side."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable

import numpy as np
import pytest
import pytest_asyncio
from far_side_process import open_sockets
from transport_worlds import DEADLINE_S, UcxWorld

from foundation.ids import CreditNumber, SessionNonce
from kv_transfer.transport.base import DataSession, Tag, TransportError, credit_tag

pytestmark = [pytest.mark.sockets, pytest.mark.asyncio(loop_scope="module")]

ROUNDS = 3


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def started() -> AsyncIterator[UcxWorld]:
    world = UcxWorld("tcp", frozenset({"tcp"}))
    await world.start()
    yield world
    await world.close()


@pytest_asyncio.fixture(loop_scope="module")
async def world(started: UcxWorld) -> UcxWorld:
    await started.begin_anew()
    return started


async def dial(world: UcxWorld, address: str, session: int) -> DataSession:
    await world.expect(session)
    return await world.near.dial(address, session, lambda reason: None, 5.0)


def tag(session: int) -> Tag:
    return credit_tag(SessionNonce(session), CreditNumber(0))


async def near_closes(world: UcxWorld, address: str, session: int) -> None:
    data = await dial(world, address, session)
    await data.close()
    await world.far_close(session)


async def far_closes(world: UcxWorld, address: str, session: int) -> None:
    data = await dial(world, address, session)
    await world.far_close(session)
    await data.close()


async def near_closes_in_mid_message(world: UcxWorld, address: str, session: int) -> None:
    data = await dial(world, address, session)
    buffer = np.zeros(world.large_bytes, np.uint8)
    data.post_receive(tag(session), buffer, lambda outcome: None)
    await world.send_partly(session, tag(session), buffer, seed=1)
    world.let_go(tag(session))
    await data.close()
    await world.far_close(session)


async def far_is_stopped_in_mid_message(world: UcxWorld, address: str, session: int) -> None:
    data = await dial(world, address, session)
    buffer = np.zeros(world.large_bytes, np.uint8)
    data.post_receive(tag(session), buffer, lambda outcome: None)
    await world.send_partly(session, tag(session), buffer, seed=1)
    await world.stop()
    await data.close()
    await world.resume()
    await world.far_close(session)


async def far_is_stopped_while_it_is_dialled(world: UcxWorld, address: str, session: int) -> None:
    await world.expect(session)
    await world.stop()
    with pytest.raises(TransportError, match="dial_timeout"):
        await world.near.dial(address, session, lambda reason: None, 0.3)
    await world.resume()
    await world.far_gives_up(session)


async def nobody_dials(world: UcxWorld, address: str, session: int) -> None:
    await world.expect(session)
    await world.far_gives_up(session)


ENDS: tuple[Callable[[UcxWorld, str, int], Awaitable[None]], ...] = (
    near_closes,
    far_closes,
    near_closes_in_mid_message,
    far_is_stopped_in_mid_message,
    far_is_stopped_while_it_is_dialled,
    nobody_dials,
)


@pytest.mark.parametrize("end", ENDS)
async def test_f30_a_session_that_is_over_leaves_no_socket_on_either_side(
    world: UcxWorld, end: Callable[[UcxWorld, str, int], Awaitable[None]]
) -> None:
    address = await world.listen()
    near, far = open_sockets(), await world.far_sockets()
    for session in range(1, 1 + ROUNDS):
        await end(world, address, session)
    async with asyncio.timeout(DEADLINE_S):
        while open_sockets() > near or await world.far_sockets() > far:
            await asyncio.sleep(0.02)
