"""A GPU's copier, over a stand-in for the driver and kernels that say what they are told to say."""

from __future__ import annotations

import asyncio
import ctypes
from collections.abc import Callable
from dataclasses import replace
from struct import pack
from typing import NamedTuple

import numpy as np
import pytest
from launch_driver import PLENTY, LaunchDriver, compiled_driver
from waiting import until

from foundation.kv_layout import KvLayout
from kv_transfer.device_copies import DeviceCopies
from kv_transfer.device_launches import AT_ONCE, DeviceLaunches, Launch
from kv_transfer.device_places import WORD_BYTES, ParcelPlace, PinnedPlace, place_words
from kv_transfer.plan.parcels import ParcelName
from kv_transfer.staging import DigestMismatch, Gather, Gathered, Scatter, Scattered
from kv_transfer.transfer_blocks import TransferBlocks
from kv_transfer.transport.cuda_memory import DeviceBytes

LAYOUT = KvLayout(layers=2, kv_heads=2, head_dim=4, dtype="float32", block_size=4, layer_group=2)
PARCEL = ParcelName(4, 11, 0, 2, 0, 2)
BLOCKS, OWNERS = [3, 1, 4, 2], [33, 11, 44, 22]
POOL_BLOCKS = 5
POISON = (1 << 64) - 1


@pytest.fixture(scope="module")
def fresh(tmp_path_factory: pytest.TempPathFactory) -> Callable[[], LaunchDriver]:
    return compiled_driver(tmp_path_factory.mktemp("driver"))


@pytest.fixture
def driver(fresh: Callable[[], LaunchDriver]) -> LaunchDriver:
    return fresh()


class Told(NamedTuple):
    """What a kernel finds in its place."""

    parcel: ParcelName
    gather: bool
    seed: int
    blocks: list[int]
    owner_words: list[int]
    message: int


class Kernels:
    """Each says in its place that its digest is its seed, and what the message's trailer is."""

    def __init__(self) -> None:
        self.told: list[Told] = []
        self.trailers: dict[int, int] = {}
        """By seed; where there is none it is the digest."""
        self._answers: list[object] = []

    def launch(self, parcel: ParcelName, place: ParcelPlace, *, gather: bool) -> Launch:
        seed = _words(place.seed, 1)[0]
        blocks = list((ctypes.c_int32 * place.block_count).from_address(place.blocks))
        owner_words = _words(place.expected, place.block_count) if gather else []
        self.told.append(Told(parcel, gather, seed, blocks, owner_words, place.message))
        answer = (ctypes.c_uint64 * 2)(seed, self.trailers.get(seed, seed))
        self._answers.append(answer)
        return Launch(1, 1, 256, 0, pack("3Q", 2, ctypes.addressof(answer), place.outcome))


def _words(address: int, count: int) -> list[int]:
    return list((ctypes.c_uint64 * count).from_address(address))


class Copying:
    def __init__(self, driver: LaunchDriver) -> None:
        self.kernels = Kernels()
        memory = np.zeros((AT_ONCE, place_words(POOL_BLOCKS)), np.uint64)
        self.places = [PinnedPlace(words) for words in memory]
        launches = DeviceLaunches(driver.library, driver.entering(), 1)
        self.copies = DeviceCopies(LAYOUT, self.kernels, self.places, launches)
        self.news: list[tuple[int, object]] = []

    def gather(self, seed: int) -> None:
        job = Gather(TransferBlocks.of(BLOCKS, OWNERS), PARCEL, seed, message(seed))
        self.copies.gather(job, lambda gathered: self.news.append((seed, gathered)))

    def scatter(self, seed: int) -> None:
        job = Scatter(TransferBlocks.of(BLOCKS), PARCEL, seed, message(seed))
        self.copies.scatter(job, lambda scattered: self.news.append((seed, scattered)))


def message(number: int) -> np.ndarray:
    size = PARCEL.wire_bytes(LAYOUT) + WORD_BYTES
    return DeviceBytes((1 << 40) + 4096 * number, size, None, None)  # type: ignore[arg-type, return-value]


async def test_kernels_are_told_what_the_host_knows_and_tell_how_it_went(driver: LaunchDriver) -> None:
    driver.set("may_end", PLENTY)
    copying = Copying(driver)
    copying.kernels.trailers = {7: 7 ^ POISON, 9: 5}
    copying.gather(6)
    copying.gather(7)
    copying.scatter(8)
    copying.scatter(9)
    await copying.copies.close()
    assert copying.news == [
        (6, Gathered(6, intact=True)),
        (7, Gathered(7 ^ POISON, intact=False)),
        (8, Scattered(8)),
        (9, DigestMismatch(9, 5)),
    ]
    expected = [
        Told(PARCEL, seed < 8, seed, [1, 4], [11, 44] if seed < 8 else [], (1 << 40) + 4096 * seed)
        for seed in (6, 7, 8, 9)
    ]
    assert copying.kernels.told[2:] == expected


async def test_before_any_transfer_each_kernel_is_launched_over_nothing(driver: LaunchDriver) -> None:
    driver.set("may_end", PLENTY)
    copying = Copying(driver)
    await copying.copies.close()
    nothing = ParcelName(0, 1, 0, 0, 0, LAYOUT.kv_heads)
    assert nothing.wire_bytes(LAYOUT) == 0
    places = [place.address for place in copying.places]
    assert copying.kernels.told == [
        Told(nothing, gather, 0, [], [], places[index]) for index, gather in enumerate((True, False))
    ]


async def test_more_than_there_are_places_for_are_copied_in_order(driver: LaunchDriver) -> None:
    copying = Copying(driver)
    for seed in range(100):
        copying.gather(seed) if seed % 3 else copying.scatter(seed)
    assert not copying.news
    await driver.until("launched", AT_ONCE)
    driver.set("may_end", PLENTY)
    await until(lambda: len(copying.news) == 100)
    assert [seed for seed, _ in copying.news] == list(range(100))
    assert [told.seed for told in copying.kernels.told[2:]] == list(range(100))
    assert driver.get("most_open") == AT_ONCE
    await copying.copies.close()


async def test_a_copy_that_cannot_be_is_a_bug_that_ends_the_copier_loudly(driver: LaunchDriver) -> None:
    driver.set("may_end", PLENTY)
    copying = Copying(driver)
    job = Gather(TransferBlocks.of(BLOCKS, OWNERS), PARCEL, 1, message(1))
    copying.copies.gather(replace(job, message=job.message[:-1]), lambda gathered: None)
    with pytest.raises(AssertionError, match="bytes for"):
        await asyncio.wait_for(asyncio.shield(copying.copies.failure), 10)
    await copying.copies.close()


@pytest.mark.parametrize("blocks", [1, 2, 3, 100])
def test_a_place_has_room_for_all_blocks_of_a_pool_and_words_do_not_overlap(blocks: int) -> None:
    memory = np.zeros((2, place_words(blocks)), np.uint64)
    place = PinnedPlace(memory[0])
    ids = np.arange(blocks, dtype=np.int64) + 5
    where = place.write(POISON, ids, ids.view(np.uint64) << np.uint64(40), 1 << 40)
    assert _words(where.seed, 1) == [POISON]
    assert _words(where.expected, blocks) == [number << 40 for number in range(5, 5 + blocks)]
    assert list((ctypes.c_int32 * blocks).from_address(where.blocks)) == list(range(5, 5 + blocks))
    assert _words(where.outcome, 2) == [0, 0]
    assert not memory[1].any()
    assert memory.strides[0] % (2 * WORD_BYTES) == 0
