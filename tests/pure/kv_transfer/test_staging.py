from __future__ import annotations

import asyncio
import threading
from dataclasses import replace
from functools import partial

import numpy as np
import pytest

from foundation.fingerprint import Fingerprint
from foundation.ids import CreditNumber, Incarnation, RequestId, SessionNonce, TransferId
from foundation.kv_layout import KvLayout
from kv_transfer import pool_copy, staging
from kv_transfer.arena import Arena, StagingMemory, slot_stride
from kv_transfer.device_slots import DeviceSlots, on_device
from kv_transfer.digest import DigestSeeds, TokenHistory
from kv_transfer.plan.parcels import ParcelName
from kv_transfer.pool_copy import KvPool
from kv_transfer.staging import DigestMismatch, Gather, Gathered, Scatter, Scattered, copier_of, gather, scatter
from kv_transfer.transfer_blocks import TransferBlocks
from kv_transfer.transport.base import Fenced, mint_fence
from kv_transfer.transport.cuda_memory import DeviceBytes

LAYOUT = KvLayout(layers=2, kv_heads=2, head_dim=4, dtype="float32", block_size=4, layer_group=2)
PARCEL = ParcelName(0, 8, 0, 2, 0, 2)
BLOCKS = [3, 1]
OURS = TransferBlocks.of(BLOCKS, [33, 11])
THEIRS = TransferBlocks.of(BLOCKS)
FINGERPRINT = Fingerprint("w", "llama", "t", 10, "float32", "none", "r", 1)


def pool(seed: int) -> KvPool:
    shape = (1, 5, 2, 2, 4, 2, LAYOUT.head_bytes)
    memory = np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)
    return KvPool(LAYOUT, (memory,), np.asarray([0, 11, 0, 33, 0], np.uint64))


def gather_job(seed: int = 5) -> Gather:
    size = PARCEL.wire_bytes(LAYOUT)
    return Gather(OURS, PARCEL, seed, Arena(2, size).message(0, size))


def test_a_gathered_parcel_verifies_and_lands_in_its_blocks() -> None:
    source, target, job = pool(1), pool(2), gather_job()
    gathered = gather(source, job)
    assert gathered.intact
    assert scatter(target, Scatter(THEIRS, PARCEL, 5, job.message)) == Scattered(gathered.digest)
    assert np.array_equal(source.shards[0][0, BLOCKS], target.shards[0][0, BLOCKS])


@pytest.mark.parametrize("place", [0, 100, -9, -1])
def test_one_flipped_bit_is_refused_and_nothing_is_written(place: int) -> None:
    source, target, job = pool(1), pool(2), gather_job()
    gather(source, job)
    job.message[place] ^= 1
    before = target.shards[0].copy()
    assert isinstance(scatter(target, Scatter(THEIRS, PARCEL, 5, job.message)), DigestMismatch)
    assert np.array_equal(target.shards[0], before)


def test_a_parcel_of_another_seed_is_refused() -> None:
    source, target, job = pool(1), pool(2), gather_job()
    gather(source, job)
    assert isinstance(scatter(target, Scatter(THEIRS, PARCEL, 6, job.message)), DigestMismatch)


def test_f39_a_block_that_had_another_owner_before_the_gather_poisons_the_digest() -> None:
    source, target, job = pool(1), pool(2), gather_job()
    source.owner_words[BLOCKS[1]] = 99
    gathered = gather(source, job)
    assert not gathered.intact
    assert isinstance(scatter(target, Scatter(THEIRS, PARCEL, 5, job.message)), DigestMismatch)


def test_f39_a_block_that_changes_owner_during_the_gather_poisons_the_digest(monkeypatch: pytest.MonkeyPatch) -> None:
    source, target, job = pool(1), pool(2), gather_job()
    really = pool_copy.gather_parcel

    def gather_and_lose(*arguments: object) -> None:
        really(*arguments)  # type: ignore[arg-type]
        source.owner_words[BLOCKS[0]] = 99

    monkeypatch.setattr(staging, "gather_parcel", gather_and_lose)
    assert not gather(source, job).intact
    assert isinstance(scatter(target, Scatter(THEIRS, PARCEL, 5, job.message)), DigestMismatch)


def test_the_seed_depends_on_everything_that_names_the_parcel() -> None:
    transfer = TransferId(RequestId("r"), 1, 1)
    tokens = list(range(20))

    def seed(
        transfer: TransferId = transfer,
        prefill: int = 1,
        decode: int = 2,
        nonce: int = 3,
        fingerprint: Fingerprint = FINGERPRINT,
        tokens: list[int] = tokens,
        number: int = 4,
        parcel: ParcelName = PARCEL,
        size: int = 512,
    ) -> int:
        seeds = DigestSeeds(
            transfer, Incarnation(prefill), Incarnation(decode), SessionNonce(nonce), fingerprint, TokenHistory(tokens)
        )
        return seeds.seed(CreditNumber(number), parcel, size)

    variants = [
        seed(),
        seed(transfer=transfer._replace(request=RequestId("s"))),
        seed(transfer=transfer._replace(attempt=2)),
        seed(transfer=transfer._replace(try_number=2)),
        seed(prefill=9),
        seed(decode=9),
        seed(nonce=9),
        seed(fingerprint=replace(FINGERPRINT, weights="v")),
        seed(tokens=[1, *tokens[1:]]),
        seed(number=9),
        seed(size=520),
        *(seed(parcel=PARCEL._replace(**{name: 9})) for name in ParcelName._fields if name != "end_position"),
        seed(parcel=PARCEL._replace(end_position=12)),
    ]
    assert len(set(variants)) == len(variants)
    assert seed(tokens=[*tokens[:8], 99]) == seed(), "tokens beyond the parcel are none of its business"


def test_a_seed_is_what_nodes_of_every_version_have() -> None:
    pair = Incarnation(3), Incarnation(4), SessionNonce(5)
    history = TokenHistory((0, 1, 70_000, 2**32 - 1))
    seeds = DigestSeeds(TransferId(RequestId("r"), 1, 2), *pair, replace(FINGERPRINT, kv_dtype="bfloat16"), history)
    assert seeds.seed(CreditNumber(6), ParcelName(0, 4, 0, 2, 0, 2), 512) == 0xBDDE2DD07FAC0FD


def test_the_hash_of_a_history_does_not_depend_on_what_was_asked_before() -> None:
    tokens = list(range(50))
    stepwise, direct = TokenHistory(tokens), TokenHistory(tokens)
    for end in (0, 3, 10, 7, 50):
        assert stepwise.hash_until(end) == TokenHistory(tokens[:end]).hash_until(end)
    assert direct.hash_until(50) == stepwise.hash_until(50)


def test_slots_of_an_arena_are_disjoint_and_begin_on_pages() -> None:
    arena = Arena(3, 5000)
    for slot in range(3):
        message = arena.message(slot, 5000)
        assert message.ctypes.data % 4096 == 0
        assert not message.any()
        message[...] = slot + 1


def test_staging_is_never_drawn_beyond_its_budget_and_comes_back_only_by_its_own_fence() -> None:
    memory = StagingMemory(4000)
    first = memory.draw_arena(2, 1000, session=1)
    assert first is not None
    assert memory.draw_arena(3, 1000, session=2) is None
    with pytest.raises(AssertionError, match="frees nothing"):
        memory.give_back(first, mint_fence(2))
    assert memory.drawn_bytes == 2000
    memory.give_back(first, mint_fence(1))
    assert memory.drawn_bytes == 0


def test_only_a_transport_makes_a_fence() -> None:
    with pytest.raises(AssertionError, match="only a transport"):
        Fenced(1, object())


async def test_the_copier_answers_in_order_on_the_loop_and_finishes_before_it_closes() -> None:
    copier, here = copier_of(pool(1)), threading.get_ident()
    news: list[tuple[int, int, Gathered]] = []

    def heard(number: int, gathered: Gathered) -> None:
        news.append((number, threading.get_ident(), gathered))

    for number in range(20):
        copier.gather(gather_job(number), partial(heard, number))
    assert not news
    await copier.close()
    await asyncio.sleep(0)
    assert [number for number, _, _ in news] == list(range(20))
    assert all(thread == here and it.intact for _, thread, it in news)


class OneAllocation:
    """Stands in for `CudaDevice`."""

    def allocate(self, size: int) -> DeviceBytes:
        return DeviceBytes(1 << 40, size, self, None)  # type: ignore[arg-type]


def test_arenas_of_a_gpu_lie_apart_in_one_allocation_and_gaps_are_used_again() -> None:
    slots = DeviceSlots(OneAllocation(), 10 * 4096)  # type: ignore[arg-type]
    runs = [slots.draw(size) for size in (5000, 4096, 12_000)]
    places = [(on_device(run).address, on_device(run).size) for run in runs if run is not None]
    assert places == [(1 << 40, 5000), ((1 << 40) + 8192, 4096), ((1 << 40) + 12_288, 12_000)]
    assert slots.draw(5 * 4096) is None
    assert runs[0] is not None
    slots.give_back(runs[0])
    again = slots.draw(8192)
    assert again is not None
    assert on_device(again).address == 1 << 40
    assert slots.draw(4 * 4096) is not None
    assert slots.draw(1) is None


def test_an_arena_for_which_there_is_no_room_is_not_drawn() -> None:
    size = slot_stride(1000)
    memory = StagingMemory(1 << 20, DeviceSlots(OneAllocation(), 5 * size))  # type: ignore[arg-type]
    first = memory.draw_arena(3, 1000, session=1)
    assert first is not None
    assert memory.draw_arena(3, 1000, session=2) is None
    assert memory.drawn_bytes == 3000
    memory.give_back(first, mint_fence(1))
    assert memory.draw_arena(5, 1000, session=3) is not None


async def test_a_copy_that_cannot_be_is_a_bug_that_ends_the_copier_loudly() -> None:
    copier, job = copier_of(pool(1)), gather_job()
    copier.gather(replace(job, blocks=TransferBlocks.of([77, 1], [33, 11])), lambda it: None)
    with pytest.raises((AssertionError, IndexError)):
        await asyncio.wait_for(copier.failure, 10)
    await copier.close()
