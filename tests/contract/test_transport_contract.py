"""What every data plane does, and what each lane declares, shown on the model and on UCX over TCP and shared memory."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import numpy as np
import pytest
import pytest_asyncio
from far_side_process import pattern
from transport_worlds import DEADLINE_S, MemoryWorld, UcxWorld, World, until

from foundation.ids import CreditNumber, SessionNonce
from kv_transfer.digest import TRAILER_BYTES, payload_digest
from kv_transfer.transport.base import (
    Bytes,
    DataSession,
    Fenced,
    Landed,
    NotFenced,
    ReceiveCancelled,
    ReceiveFailed,
    ReceiveOutcome,
    SendFailed,
    SendOutcome,
    Tag,
    TransportError,
    credit_tag,
)
from kv_transfer.transport.memory_network import FENCED, READS, WRITES
from kv_transfer.transport.rendezvous import MAGIC
from kv_transfer.transport.self_test import measure_lane

pytestmark = pytest.mark.asyncio(loop_scope="module")

NONCE = SessionNonce(0xABCDE12345)
MIDDLE_BYTES = 300_000
LOST_WITHIN_S = 5.0
"""At once, on a machine that keeps processes waiting."""

FENCED_WORLDS = [
    pytest.param("memory", id="memory"),
    pytest.param("tcp", id="ucx_tcp", marks=pytest.mark.sockets),
    pytest.param("sm,self,tcp", id="ucx_shared_memory", marks=pytest.mark.sockets),
]
ALL_WORLDS = [*FENCED_WORLDS, pytest.param("reads", id="memory_reads"), pytest.param("writes", id="memory_writes")]
MEMORY_LANES = {"memory": FENCED, "reads": READS, "writes": WRITES}
UCX_LANE_NAMES = {"tcp": frozenset({"tcp"}), "sm,self,tcp": frozenset({"sysv", "posix"})}

on_all_lanes = pytest.mark.parametrize("world", ALL_WORLDS, indirect=True)
on_fenced_lanes = pytest.mark.parametrize("world", FENCED_WORLDS, indirect=True)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def ucx_worlds() -> AsyncIterator[dict[str, UcxWorld]]:
    worlds: dict[str, UcxWorld] = {}
    yield worlds
    for world in worlds.values():
        await world.close()


@pytest_asyncio.fixture(loop_scope="module")
async def world(request: pytest.FixtureRequest, ucx_worlds: dict[str, UcxWorld]) -> World:
    lanes: str = request.param
    if lanes in MEMORY_LANES:
        return MemoryWorld(MEMORY_LANES[lanes])
    if lanes in ucx_worlds:
        await ucx_worlds[lanes].begin_anew()
    else:
        ucx_worlds[lanes] = UcxWorld(lanes, UCX_LANE_NAMES[lanes])
        await ucx_worlds[lanes].start()
    return ucx_worlds[lanes]


def tag(number: int, nonce: SessionNonce = NONCE) -> Tag:
    return credit_tag(nonce, CreditNumber(number))


class Near:
    """The near end of one session, with futures for outcomes."""

    def __init__(self, session: DataSession, lost: asyncio.Future[str]) -> None:
        self.session = session
        self.lost = lost

    @classmethod
    async def dial(cls, world: World, address: str, session: int = 7) -> Near:
        await world.expect(session)
        lost: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        return cls(await world.near.dial(address, session, lost.set_result, 5.0), lost)

    def receive(self, tag: Tag, buffer: Bytes) -> asyncio.Future[ReceiveOutcome]:
        outcome: asyncio.Future[ReceiveOutcome] = asyncio.get_running_loop().create_future()
        self.session.post_receive(tag, buffer, outcome.set_result)
        return outcome

    def send(self, tag: Tag, buffer: Bytes) -> asyncio.Future[SendOutcome]:
        outcome: asyncio.Future[SendOutcome] = asyncio.get_running_loop().create_future()
        self.session.send(tag, buffer, outcome.set_result)
        return outcome


async def soon(outcome: asyncio.Future[ReceiveOutcome]) -> ReceiveOutcome:
    return await asyncio.wait_for(outcome, DEADLINE_S)


async def caught_half_way(world: World, near: Near) -> tuple[Tag, Bytes, asyncio.Future[ReceiveOutcome]]:
    """A message of which a part has landed, its receive still open when this returns; the next one where it was too quick."""
    for number in range(5):
        buffer = np.zeros(world.large_bytes, np.uint8)
        outcome = near.receive(tag(number), buffer)
        await world.send_partly(7, tag(number), buffer, seed=0)
        if not buffer[-1]:
            return tag(number), buffer, outcome
        world.let_go(tag(number))
        assert await soon(outcome) == Landed(tag(number))
    raise AssertionError("every message landed before it could be caught")


async def nothing_more_lands(buffer: Bytes) -> None:
    """No condition can be awaited for what must not happen: watched for 300 ms, far longer than a late byte needed."""
    before = buffer.copy()
    await asyncio.sleep(0.3)
    assert np.array_equal(before, buffer)


@on_all_lanes
async def test_messages_go_both_ways_and_the_lane_is_the_one_that_was_chosen(world: World) -> None:
    near = await Near.dial(world, await world.listen())
    assert near.session.lane.name in world.lane_names
    buffer = np.zeros(MIDDLE_BYTES, np.uint8)
    landed = near.receive(tag(0), buffer)
    await world.far_send(7, tag(0), buffer.size, seed=1)
    assert await soon(landed) == Landed(tag(0))
    assert np.array_equal(buffer, pattern(buffer.size, 1))
    assert await world.far_outcome(tag(0)) == "Sent"
    await world.far_receive(7, tag(1), MIDDLE_BYTES, seed=2)
    near.send(tag(1), pattern(MIDDLE_BYTES, 2))
    assert await world.far_outcome(tag(1)) == "Landed"


@on_all_lanes
async def test_several_in_flight_land_each_in_its_own_buffer(world: World) -> None:
    near = await Near.dial(world, await world.listen())
    buffers = np.zeros((6, MIDDLE_BYTES), np.uint8)
    landed = [near.receive(tag(number), buffers[number]) for number in range(6)]
    for number in reversed(range(6)):
        await world.far_send(7, tag(number), MIDDLE_BYTES, seed=number)
    assert [await soon(outcome) for outcome in landed] == [Landed(tag(number)) for number in range(6)]
    assert all(np.array_equal(buffers[number], pattern(MIDDLE_BYTES, number)) for number in range(6))


@on_all_lanes
async def test_f33_a_receive_cancelled_before_its_match_is_never_written(world: World) -> None:
    near = await Near.dial(world, await world.listen())
    buffers = np.zeros((2, MIDDLE_BYTES), np.uint8)
    cancelled, other = near.receive(tag(0), buffers[0]), near.receive(tag(1), buffers[1])
    near.session.cancel_unused(tag(0))
    assert await soon(cancelled) == ReceiveCancelled(tag(0))
    await world.far_send(7, tag(0), MIDDLE_BYTES, seed=3)
    await world.far_send(7, tag(1), MIDDLE_BYTES, seed=4)
    assert await soon(other) == Landed(tag(1))
    assert not buffers[0].any()
    assert isinstance(await near.session.close(), Fenced | NotFenced)
    assert not buffers[0].any()


@on_all_lanes
async def test_f33_a_matched_receive_cannot_be_cancelled_and_lands(world: World) -> None:
    near = await Near.dial(world, await world.listen())
    caught, buffer, outcome = await caught_half_way(world, near)
    assert not outcome.done()
    near.session.cancel_unused(caught)
    world.let_go(caught)
    assert await soon(outcome) == Landed(caught)
    assert np.array_equal(buffer, pattern(buffer.size, 0))


@on_fenced_lanes
async def test_f01_a_peer_killed_in_mid_message_is_noticed_and_closing_fences_it(world: World) -> None:
    near = await Near.dial(world, await world.listen())
    caught, buffer, outcome = await caught_half_way(world, near)
    await world.kill()
    assert await asyncio.wait_for(near.lost, LOST_WITHIN_S)
    assert not buffer[-1]
    assert isinstance(await near.session.close(), Fenced)
    assert isinstance(await soon(outcome), ReceiveFailed)
    world.let_go(caught)
    await nothing_more_lands(buffer)


@on_fenced_lanes
async def test_f03_after_a_stopped_peer_was_closed_on_its_late_bytes_never_land(world: World) -> None:
    near = await Near.dial(world, await world.listen())
    caught, buffer, outcome = await caught_half_way(world, near)
    await world.stop()
    assert not buffer[-1]
    assert not outcome.done()
    assert isinstance(await near.session.close(), Fenced)
    assert isinstance(await soon(outcome), ReceiveFailed)
    before = buffer.copy()
    await world.resume()
    world.let_go(caught)
    # The sender may see success all the same: what it sends to a destroyed endpoint is taken off the wire and dropped.
    assert await world.far_outcome(caught) in ("Sent", "SendFailed")
    assert np.array_equal(buffer, before)
    assert await world.far_close(7) == "Fenced"
    await nothing_more_lands(buffer)


@on_fenced_lanes
async def test_f02_a_stopped_peer_says_nothing_and_goes_on_when_it_may(world: World) -> None:
    near = await Near.dial(world, await world.listen())
    caught, buffer, outcome = await caught_half_way(world, near)
    await world.stop()
    await nothing_more_lands(buffer) if world.large_bytes < 1 << 22 else await asyncio.sleep(0.5)
    assert not outcome.done()
    assert not near.lost.done()
    await world.resume()
    world.let_go(caught)
    assert await soon(outcome) == Landed(caught)
    assert np.array_equal(buffer, pattern(buffer.size, 0))


@pytest.mark.parametrize("world", ["reads"], indirect=True)
async def test_where_the_receiver_reads_a_matched_receive_outlives_its_peer_and_is_its_own_fence(world: World) -> None:
    near = await Near.dial(world, await world.listen())
    caught, buffer, outcome = await caught_half_way(world, near)
    await world.kill()
    closing = asyncio.create_task(near.session.close())
    await asyncio.wait_for(near.lost, LOST_WITHIN_S)
    assert not closing.done()
    world.let_go(caught)
    assert await soon(outcome) == Landed(caught)
    assert np.array_equal(buffer, pattern(buffer.size, 0))
    assert isinstance(await closing, Fenced)


@pytest.mark.parametrize("world", ["reads", "writes"], indirect=True)
async def test_memory_that_the_peer_still_reads_is_fenced_later_when_it_does_not(world: World) -> None:
    assert isinstance(world, MemoryWorld)
    near = await Near.dial(world, await world.listen())
    world.network.hold(tag(0), MIDDLE_BYTES // 2)
    await world.far_receive(7, tag(0), MIDDLE_BYTES, seed=16)
    near.send(tag(0), pattern(MIDDLE_BYTES, 16))
    await until(lambda: any(message.read_bytes for message in world.network.moving))
    assert await near.session.close() == NotFenced(7, frozenset())
    assert not near.session.fence.done()
    world.let_go(tag(0))
    assert isinstance(await asyncio.wait_for(near.session.fence, DEADLINE_S), Fenced)


@pytest.mark.parametrize("world", ["writes"], indirect=True)
async def test_where_the_sender_writes_neither_error_nor_close_is_a_fence(world: World) -> None:
    near = await Near.dial(world, await world.listen())
    caught, buffer, outcome = await caught_half_way(world, near)
    await world.kill()
    assert isinstance(await soon(outcome), ReceiveFailed)
    assert await near.session.close() == NotFenced(7, frozenset({caught}))
    assert not buffer[-1]
    world.let_go(caught)
    await until(lambda: bool(buffer[-1]))
    assert np.array_equal(buffer, pattern(buffer.size, 0))


@on_all_lanes
async def test_f34_a_message_of_a_dead_session_never_meets_a_later_receive(world: World) -> None:
    address = await world.listen()
    old = await Near.dial(world, address)
    buffers = np.zeros((2, 1000), np.uint8)
    first = old.receive(tag(0), buffers[0])
    await world.far_send(7, tag(1), 1000, seed=5)
    await world.far_send(7, tag(0), 1000, seed=6)
    assert await soon(first) == Landed(tag(0))
    await old.session.close()
    assert world.near.stray_messages == 1
    new = await Near.dial(world, address, session=8)
    later = new.receive(tag(1, SessionNonce(NONCE + 1)), buffers[1])
    assert not buffers[1].any()
    await world.far_send(8, tag(1, SessionNonce(NONCE + 1)), 1000, seed=7)
    assert await soon(later) == Landed(tag(1, SessionNonce(NONCE + 1)))
    assert np.array_equal(buffers[1], pattern(1000, 7))


@on_all_lanes
async def test_f34_a_stranger_is_refused_and_counted(world: World) -> None:
    address = await world.listen()
    near = await Near.dial(world, address)
    for session in (7, 99):
        with pytest.raises(TransportError, match="not_expected"):
            await world.near.dial(address, session, lambda reason: None, 5.0)
    assert await world.far_strangers() == 2
    buffer = np.zeros(1000, np.uint8)
    landed = near.receive(tag(0), buffer)
    await world.far_send(7, tag(0), 1000, seed=8)
    assert await soon(landed) == Landed(tag(0))


@pytest.mark.parametrize("world", FENCED_WORLDS[1:], indirect=True)
async def test_f17_garbage_on_the_data_port_ends_only_its_own_connection(world: World) -> None:
    address = await world.listen()
    host, port = address.split(":")
    near = await Near.dial(world, address)
    for garbage in (b"GET / HTTP/1.1\r\n\r\n" + bytes(64), MAGIC + b"\xff" * 64, b"\x00"):
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(garbage)
        writer.write_eof()
        assert await asyncio.wait_for(reader.read(), DEADLINE_S) in (b"", bytes(5))
        writer.close()
    assert await world.far_strangers() == 3
    landed = near.receive(tag(0), np.zeros(1000, np.uint8))
    await world.far_send(7, tag(0), 1000, seed=8)
    assert await soon(landed) == Landed(tag(0))


@on_all_lanes
async def test_f35_a_short_message_lands_unnoticed_so_that_only_the_digest_can_refuse_it(world: World) -> None:
    near = await Near.dial(world, await world.listen())
    buffer = pattern(MIDDLE_BYTES, 9)
    tail = buffer[100_000:].copy()
    landed = near.receive(tag(0), buffer)
    await world.far_send(7, tag(0), 100_000, seed=10)
    assert await soon(landed) == Landed(tag(0))
    assert np.array_equal(buffer[:100_000], pattern(100_000, 10))
    assert np.array_equal(buffer[100_000:], tail)
    trailer = int.from_bytes(buffer[-TRAILER_BYTES:].tobytes(), "little")
    assert payload_digest(1, buffer[:-TRAILER_BYTES]) != trailer


@on_all_lanes
@pytest.mark.parametrize("sent_bytes", [2000, 700_000])
async def test_f35_an_oversize_message_fails_and_writes_nothing_beyond_its_buffer(
    world: World, sent_bytes: int
) -> None:
    near = await Near.dial(world, await world.listen())
    memory = np.zeros(sent_bytes, np.uint8)
    outcome = near.receive(tag(0), memory[: sent_bytes // 2])
    await world.far_send(7, tag(0), sent_bytes, seed=11)
    assert await soon(outcome) == ReceiveFailed(tag(0), "message_truncated")
    assert await world.far_outcome(tag(0)) == "Sent"
    assert not memory[sent_bytes // 2 :].any()


@on_all_lanes
async def test_f22_a_peer_that_died_is_met_again_at_the_same_address(world: World) -> None:
    address = await world.listen()
    near = await Near.dial(world, address)
    await world.kill()
    assert await asyncio.wait_for(near.lost, LOST_WITHIN_S)
    await near.session.close()
    with pytest.raises(TransportError, match="unreachable"):
        await world.near.dial(address, 9, lambda reason: None, 5.0)
    await world.restart()
    assert await world.listen(int(address.split(":")[1])) == address
    again = await Near.dial(world, address, session=8)
    buffer = np.zeros(MIDDLE_BYTES, np.uint8)
    landed = again.receive(tag(2), buffer)
    await world.far_send(8, tag(2), MIDDLE_BYTES, seed=12)
    assert await soon(landed) == Landed(tag(2))


@on_all_lanes
async def test_f28_closing_one_session_leaves_its_neighbour_alone(world: World) -> None:
    address = await world.listen()
    near, neighbour = await Near.dial(world, address), await Near.dial(world, address, session=8)
    mine, theirs = np.zeros(MIDDLE_BYTES, np.uint8), np.zeros(world.large_bytes, np.uint8)
    open_receive, landed = near.receive(tag(0), mine), neighbour.receive(tag(1), theirs)
    await world.send_partly(8, tag(1), theirs, seed=13)
    closing = asyncio.create_task(near.session.close())
    world.let_go(tag(1))
    await closing
    assert isinstance(await soon(open_receive), ReceiveFailed)
    assert await soon(landed) == Landed(tag(1))
    assert np.array_equal(theirs, pattern(theirs.size, 13))


@on_all_lanes
async def test_a_send_that_nobody_takes_fails_when_the_peer_dies(world: World) -> None:
    near = await Near.dial(world, await world.listen())
    # Too long to lie ready for the peer in memory that both share, or in its own: it waits for a receive.
    outcome = near.send(tag(0), pattern(world.large_bytes, 14))
    await world.kill()
    assert await asyncio.wait_for(near.lost, LOST_WITHIN_S)
    await near.session.close()
    assert isinstance(await asyncio.wait_for(outcome, DEADLINE_S), SendFailed)


@on_all_lanes
async def test_closing_returns_only_when_every_open_operation_has_said_how_it_ended(world: World) -> None:
    near = await Near.dial(world, await world.listen())
    sent = near.send(tag(0), pattern(MIDDLE_BYTES, 15))
    received = near.receive(tag(1), np.zeros(MIDDLE_BYTES, np.uint8))
    await near.session.close()
    assert sent.done()
    assert received.done()


@on_all_lanes
async def test_f32_a_data_port_in_use_is_named(world: World) -> None:
    address = await world.listen()
    with pytest.raises(TransportError, match=r"address_in_use: --data-port \d+"):
        await world.near.listen("127.0.0.1", int(address.split(":")[1]))


@pytest.mark.parametrize("world", ["writes"], indirect=True)
async def test_the_self_test_refuses_a_lane_that_cannot_fence(world: World) -> None:
    near = await Near.dial(world, await world.listen())
    buffers = [np.zeros(1000, np.uint8)] * 2
    with pytest.raises(TransportError, match="lane_cannot_fence"):
        await measure_lane(near.session, buffers, receive_first=True, deadline_s=1.0)


@pytest.mark.parametrize("world", FENCED_WORLDS[1:], indirect=True)
async def test_cancelling_what_is_just_landing_never_hangs(world: World) -> None:
    """A cancellation beside UCX's progress thread deadlocked within a few dozen of these."""
    near = await Near.dial(world, await world.listen())
    buffer = np.zeros((2, 20_000), np.uint8)
    for number in range(0, 600, 2):
        matched, unused = near.receive(tag(number), buffer[0]), near.receive(tag(number + 1), buffer[1])
        await world.far_send(7, tag(number), 20_000, seed=number)
        near.session.cancel_unused(tag(number))
        near.session.cancel_unused(tag(number + 1))
        assert isinstance(await soon(matched), Landed | ReceiveCancelled)
        assert await soon(unused) == ReceiveCancelled(tag(number + 1))
    assert not buffer[1].any()
