"""The transport's contract between two processes on one GPU, and between two GPUs where there are two: the lane on which the
receiver reads, and that on which the sender writes, which is refused."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from typing import cast

import pytest
import torch
from device_world import DeviceWorld, Where, freed, landed_bytes, last_byte_landed, untouched, whole
from test_transport_contract import MIDDLE_BYTES, NONCE, Near, soon, tag
from transport_worlds import until

from foundation.ids import SessionNonce
from kv_transfer.transport.base import (
    Bytes,
    Fenced,
    Landed,
    NotFenced,
    ReceiveCancelled,
    ReceiveFailed,
    ReceiveOutcome,
    SendFailed,
    TransportError,
)
from kv_transfer.transport.cuda_memory import DeviceBytes
from kv_transfer.transport.peer_mappings import peer_mappings
from kv_transfer.transport.self_test import measure_lane

pytestmark = [pytest.mark.gpu, pytest.mark.sockets]
RESTARTS = 20
BUSY_CYCLES = 8_000_000_000
"""Some four seconds."""
two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one GPU")
PLACES = [
    pytest.param(Where(near=0, far=0), id="same_gpu"),
    pytest.param(Where(near=0, far=1), id="other_gpu", marks=two_gpus),
]
ALL_PLACES = [*PLACES, pytest.param(Where(near=1, far=0), id="other_gpu_back", marks=two_gpus)]
SENDER_WRITES = [
    pytest.param(Where(near=0, far=0, scheme="put_zcopy"), id="same_gpu"),
    pytest.param(Where(near=0, far=1, scheme="put_zcopy"), id="other_gpu", marks=two_gpus),
]
both_directions = pytest.mark.parametrize("world", ALL_PLACES, indirect=True)


@pytest.fixture(params=PLACES)
async def world(request: pytest.FixtureRequest) -> AsyncIterator[DeviceWorld]:
    world = DeviceWorld(request.param)
    await world.start()
    yield world
    await world.close()
    freed()


def receive(near: Near, number: int, buffer: DeviceBytes) -> asyncio.Future[ReceiveOutcome]:
    return near.receive(tag(number), cast(Bytes, buffer))


async def caught_half_way(world: DeviceWorld, near: Near) -> tuple[DeviceBytes, asyncio.Future[ReceiveOutcome]]:
    buffer = world.room(world.large_bytes)
    outcome = receive(near, 0, buffer)
    await world.send_partly(7, tag(0), cast(Bytes, buffer), seed=0)
    return buffer, outcome


async def nothing_more_lands(buffer: DeviceBytes) -> None:
    """Refilled, since it may be whole: watched for 300 ms, far longer than a late byte needed, then every byte is counted."""
    buffer.fill(0)
    await asyncio.sleep(0.3)
    assert landed_bytes(buffer) == 0


@both_directions
async def test_messages_go_both_ways_on_the_lane_where_the_receiver_reads(world: DeviceWorld) -> None:
    near = await Near.dial(world, await world.listen())
    assert near.session.lane.name == "cuda_ipc/get"
    assert near.session.lane.receiver_reads
    for number, size in enumerate((1, 1000, MIDDLE_BYTES, 48 << 20)):
        buffer = world.room(size)
        landed = receive(near, 2 * number, buffer)
        await world.far_send(7, tag(2 * number), size, seed=number)
        assert await soon(landed) == Landed(tag(2 * number))
        assert whole(buffer, number)
        assert await world.far_outcome(tag(2 * number)) == "Sent"
        await world.far_receive(7, tag(2 * number + 1), size, seed=number)
        near.send(tag(2 * number + 1), world.message(size, number))
        assert await world.far_outcome(tag(2 * number + 1)) == "Landed"


async def test_several_in_flight_land_each_in_its_own_slot_of_one_allocation(world: DeviceWorld) -> None:
    near = await Near.dial(world, await world.listen())
    size = 16 << 20
    memory = world.room(6 * size)
    slots = [memory[number * size : (number + 1) * size] for number in range(6)]
    landed = [receive(near, number, slots[number]) for number in range(6)]
    for number in reversed(range(6)):
        await world.far_send(7, tag(number), size, seed=number)
    assert [await soon(outcome) for outcome in landed] == [Landed(tag(number)) for number in range(6)]
    assert all(whole(slot, number) for number, slot in enumerate(slots))


@both_directions
async def test_messages_land_while_the_gpu_is_busy_and_wait_for_nothing(world: DeviceWorld) -> None:
    """UCX's own unmapping of what it has read would wait until the kernel ends, and so would all that is launched meanwhile."""
    near = await Near.dial(world, await world.listen())
    mappings = peer_mappings()
    assert mappings is not None
    buffers = [world.room(1 << 20) for _ in range(4)]

    async def lands(number: int) -> None:
        landed = receive(near, number, buffers[number])
        await world.far_send(7, tag(number), buffers[number].size, seed=number)
        assert await soon(landed) == Landed(tag(number))
        with torch.cuda.stream(other):
            small.add_(1)
        other.synchronize()

    with torch.cuda.device(world.where.near):
        busy, other, ended = torch.cuda.Stream(), torch.cuda.Stream(), torch.cuda.Event()  # type: ignore[no-untyped-call]
        small = torch.zeros(8, device="cuda")
        with torch.cuda.stream(busy):
            torch.cuda._sleep(1)  # type: ignore[no-untyped-call]
        await lands(0)  # a kernel is loaded, and UCX makes what it needs, the first time: that waits
        busy.synchronize()
        asked_before = mappings.answered
        with torch.cuda.stream(busy):
            torch.cuda._sleep(BUSY_CYCLES)  # type: ignore[no-untyped-call]
            ended.record(busy)
        for number in (1, 2, 3):
            await lands(number)
        assert not ended.query(), "somebody waited for the kernel"  # type: ignore[no-untyped-call]
        ended.synchronize()
    assert mappings.answered >= asked_before + 3
    assert all(whole(buffer, number) for number, buffer in enumerate(buffers))


@both_directions
async def test_each_session_of_the_same_two_processes_reads_where_memory_is_mapped_for_it(world: DeviceWorld) -> None:
    """What UCX mapped once and never unmapped it would read at its old place: it must ask for every message."""
    mappings = peer_mappings()
    assert mappings is not None
    address = await world.listen()
    for session in (7, 8):
        near = await Near.dial(world, address, session)
        for number in range(3):
            asked_before, buffer = mappings.answered, world.room(1 << 20)
            place = tag(number, SessionNonce(NONCE + session))
            landed = near.receive(place, cast(Bytes, buffer))
            await world.far_send(session, place, buffer.size, seed=number)
            assert await soon(landed) == Landed(place)
            assert whole(buffer, number)
            assert mappings.answered > asked_before
        assert isinstance(await near.session.close(), Fenced)


async def test_f33_a_receive_cancelled_before_its_match_is_never_written(world: DeviceWorld) -> None:
    near = await Near.dial(world, await world.listen())
    buffers = [world.room(MIDDLE_BYTES) for _ in range(2)]
    cancelled, other = receive(near, 0, buffers[0]), receive(near, 1, buffers[1])
    near.session.cancel_unused(tag(0))
    assert await soon(cancelled) == ReceiveCancelled(tag(0))
    await world.far_send(7, tag(0), MIDDLE_BYTES, seed=3)
    await world.far_send(7, tag(1), MIDDLE_BYTES, seed=4)
    assert await soon(other) == Landed(tag(1))
    assert isinstance(await near.session.close(), Fenced)
    assert untouched(buffers[0])


async def test_f33_a_matched_receive_cannot_be_cancelled_and_lands(world: DeviceWorld) -> None:
    near = await Near.dial(world, await world.listen())
    buffer, outcome = await caught_half_way(world, near)
    near.session.cancel_unused(tag(0))
    assert not last_byte_landed(buffer)
    assert await soon(outcome) == Landed(tag(0))
    assert whole(buffer, 0)


@both_directions
async def test_f01_a_receive_outlives_a_peer_killed_in_mid_message_and_is_its_own_fence(world: DeviceWorld) -> None:
    near = await Near.dial(world, await world.listen())
    buffer, outcome = await caught_half_way(world, near)
    assert not last_byte_landed(buffer)
    await world.kill()
    assert await asyncio.wait_for(near.lost, 5.0)
    assert await soon(outcome) == Landed(tag(0))
    assert whole(buffer, 0)
    assert isinstance(await near.session.close(), Fenced)
    await nothing_more_lands(buffer)


async def test_f02_a_receive_ends_by_itself_while_its_peer_is_stopped(world: DeviceWorld) -> None:
    near = await Near.dial(world, await world.listen())
    buffer, outcome = await caught_half_way(world, near)
    assert not last_byte_landed(buffer)
    await world.stop()
    assert await soon(outcome) == Landed(tag(0))
    assert whole(buffer, 0)
    assert not near.lost.done()
    assert isinstance(await near.session.close(), Fenced)
    await nothing_more_lands(buffer)
    await world.resume()
    assert await world.far_outcome(tag(0)) in ("Sent", "SendFailed")
    await nothing_more_lands(buffer)


@both_directions
@pytest.mark.parametrize("stopped", [False, True])
async def test_f03_once_the_receiver_has_closed_its_endpoint_nothing_lands(world: DeviceWorld, stopped: bool) -> None:
    near = await Near.dial(world, await world.listen())
    buffer, outcome = await caught_half_way(world, near)
    if stopped:
        await world.stop()
    began_s = time.monotonic()
    assert isinstance(await near.session.close(), Fenced)
    assert time.monotonic() - began_s < 5.0
    assert isinstance(await soon(outcome), Landed | ReceiveFailed)
    await nothing_more_lands(buffer)
    if stopped:
        await world.resume()
        assert await world.far_outcome(tag(0)) in ("Sent", "SendFailed")
        await nothing_more_lands(buffer)


async def test_f34_a_message_of_a_dead_session_never_meets_a_later_receive(world: DeviceWorld) -> None:
    address = await world.listen()
    old = await Near.dial(world, address)
    buffers = [world.room(1000) for _ in range(2)]
    first = receive(old, 0, buffers[0])
    await world.far_send(7, tag(1), 1000, seed=5)
    await world.far_send(7, tag(0), 1000, seed=6)
    assert await soon(first) == Landed(tag(0))
    await old.session.close()
    assert world.near.stray_messages == 1
    new = await Near.dial(world, address, session=8)
    later_tag = tag(1, SessionNonce(NONCE + 1))
    later = new.receive(later_tag, cast(Bytes, buffers[1]))
    assert untouched(buffers[1])
    await world.far_send(8, later_tag, 1000, seed=7)
    assert await soon(later) == Landed(later_tag)
    assert whole(buffers[1], 7)


async def test_f35_a_short_message_leaves_the_tail_and_a_long_one_fails_within_its_buffer(world: DeviceWorld) -> None:
    near = await Near.dial(world, await world.listen())
    buffer = world.room(MIDDLE_BYTES)
    landed = receive(near, 0, buffer)
    await world.far_send(7, tag(0), 100_000, seed=10)
    assert await soon(landed) == Landed(tag(0))
    assert whole(buffer[:100_000], 10)
    assert untouched(buffer[100_000:])
    memory = world.room(700_000)
    truncated = receive(near, 1, memory[:350_000])
    await world.far_send(7, tag(1), 700_000, seed=11)
    assert await soon(truncated) == ReceiveFailed(tag(1), "message_truncated")
    assert untouched(memory[350_000:])


async def test_f28_closing_one_session_leaves_its_neighbour_alone(world: DeviceWorld) -> None:
    address = await world.listen()
    near, neighbour = await Near.dial(world, address), await Near.dial(world, address, session=8)
    mine, theirs = world.room(MIDDLE_BYTES), world.room(world.large_bytes)
    open_receive, landed = receive(near, 0, mine), receive(neighbour, 1, theirs)
    await world.send_partly(8, tag(1), cast(Bytes, theirs), seed=13)
    await near.session.close()
    assert isinstance(await soon(open_receive), ReceiveFailed)
    assert await soon(landed) == Landed(tag(1))
    assert whole(theirs, 13)
    assert untouched(mine)


async def test_a_send_that_nobody_takes_fails_when_the_peer_dies(world: DeviceWorld) -> None:
    near = await Near.dial(world, await world.listen())
    outcome = near.send(tag(0), world.message(MIDDLE_BYTES, 14))
    await world.kill()
    assert await asyncio.wait_for(near.lost, 5.0)
    assert isinstance(await near.session.close(), Fenced)
    assert isinstance(await asyncio.wait_for(outcome, 5.0), SendFailed)


async def test_f22_twenty_restarts_of_a_peer_leave_no_mapping_of_its_memory(world: DeviceWorld) -> None:
    """A mapping would hold what the dead peer had on its own GPU, and pages of this side's tables on the other."""
    address = await world.listen()
    size, buffer = 256 << 20, world.room(256 << 20)
    free_bytes: list[dict[int, int]] = []

    def measure() -> None:
        free_bytes.append({gpu: torch.cuda.mem_get_info(gpu)[0] for gpu in {world.where.near, world.where.far}})

    def nothing_is_held() -> bool:
        measure()
        return all(free >= free_bytes[2][gpu] - 2 * size for gpu, free in free_bytes[-1].items())

    for life in range(RESTARTS):
        near = await Near.dial(world, address, session=life)
        landed = receive(near, life, buffer)
        await world.far_send(life, tag(life), size, seed=life)
        assert await soon(landed) == Landed(tag(life))
        assert whole(buffer, life)
        await world.kill()
        assert await asyncio.wait_for(near.lost, 5.0)
        assert isinstance(await near.session.close(), Fenced)
        measure()
        if life + 1 < RESTARTS:
            await world.restart()
            assert await world.listen(int(address.split(":")[1])) == address
    try:
        await until(nothing_is_held)  # a mapping is closed behind the fence, by a thread of the transport
    except TimeoutError:
        lives = [*free_bytes[:RESTARTS], free_bytes[-1]]
        pytest.fail(f"MiB free, life by life and at last: {[{g: b >> 20 for g, b in free.items()} for free in lives]}")


@pytest.mark.parametrize("world", SENDER_WRITES, indirect=True)
async def test_a_lane_on_which_the_sender_writes_is_refused_and_proves_nothing(world: DeviceWorld) -> None:
    near = await Near.dial(world, await world.listen())
    assert near.session.lane.name == "cuda_ipc/put"
    assert not near.session.lane.fences
    buffers = [cast(Bytes, world.room(1 << 20)) for _ in range(2)]
    with pytest.raises(TransportError, match="lane_cannot_fence"):
        await measure_lane(near.session, buffers, receive_first=True, deadline_s=1.0)
    _, outcome = await caught_half_way(world, near)
    await world.kill()
    if isinstance(await soon(outcome), ReceiveFailed):
        assert await near.session.close() == NotFenced(7, frozenset({tag(0)}))
